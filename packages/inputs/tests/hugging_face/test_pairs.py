from __future__ import annotations

import pytest

from layerkit.errors import ConfigError
from layerkit_inputs.hugging_face.pairs import HuggingFacePairs
from layerkit_inputs.testing import laws
from layerkit_inputs.text.tokenizers import ByteTokenizer

datasets = pytest.importorskip("datasets")
datasets.disable_progress_bars()


class Numbers(ByteTokenizer):
    """A vocabulary of plain numbers, with T5's special ids."""

    eos_id, bos_id, start_id = 1, None, 0

    def fingerprint(self):
        return "numbers"


def write(folder, pairs):
    data = datasets.Dataset.from_dict(
        {"source": [inputs for inputs, _ in pairs], "target": [targets for _, targets in pairs]}
    )
    data.to_parquet(str(folder / "pairs.parquet"))
    return {
        "path": "parquet",
        "data_files": str(folder / "pairs.parquet"),
        "cache_dir": str(folder / "cache"),
        "inputs_field": "source",
        "text_field": "target",
        "tokenizer": Numbers(),
    }


@pytest.fixture(scope="module")
def fields(tmp_path_factory):
    pairs = [([7] * (n % 4 + 1), [9] * (n % 3)) for n in range(29)]
    folder = tmp_path_factory.mktemp("data")
    return {**write(folder, pairs), "batch_size": 4, "inputs_length": 8, "targets_length": 6}


@pytest.mark.slow
@pytest.mark.parametrize("mode", [{"is_training": True}, {}], ids=["training", "epoch"])
@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_reader_obeys_the_laws_of_inputs(law, mode, fields):
    law(lambda **more: HuggingFacePairs(**{**fields, **mode, **more}))


def test_pairs_are_packed_on_both_sides_as_seqio_packs_them(tmp_path):
    fields = write(tmp_path, [([7, 8, 5, 9, 4], [13, 19]), ([28, 24], [34])])
    source = HuggingFacePairs(**fields, batch_size=1, inputs_length=10, targets_length=5)
    (batch,) = source.eval_batches()
    assert batch.src.ids.tolist() == [[7, 8, 5, 9, 4, 1, 28, 24, 1, 0]]
    assert batch.src.segment_ids.tolist() == [[1] * 6 + [2] * 3 + [0]]
    assert batch.src.paddings.tolist() == [[0] * 9 + [1]]
    assert batch.tgt.labels.tolist() == [[13, 19, 1, 34, 1]]
    assert batch.tgt.ids.tolist() == [[0, 13, 19, 0, 34]]
    assert batch.tgt.segment_ids.tolist() == [[1, 1, 1, 2, 2]]
    assert batch.tgt.weights.tolist() == [[1] * 5]


def test_packing_none_has_one_pair_per_row(tmp_path):
    fields = write(tmp_path, [([7, 8], [13, 19]), ([28, 24, 3], [34])])
    source = HuggingFacePairs(
        **fields, batch_size=3, inputs_length=4, targets_length=3, packing="none"
    )
    (batch,) = source.eval_batches()
    assert batch.src.ids.tolist() == [[7, 8, 1, 0], [28, 24, 3, 1], [0] * 4]
    assert batch.tgt.labels.tolist() == [[13, 19, 1], [34, 1, 0], [0] * 3]
    assert batch.provenance.tolist() == [0, 1, -1]


def test_every_pair_is_read_once_on_any_hosts(fields):
    result = []
    for host in range(3):
        source = HuggingFacePairs(**fields, infeed_host_index=host, num_infeed_hosts=3)
        for batch in source.eval_batches():
            for sides in zip(batch.src.segment_ids, batch.tgt.segment_ids, strict=True):
                for segment in range(1, sides[0].max() + 1):
                    result.append(tuple(int((side == segment).sum()) for side in sides))
    assert sorted(result) == sorted((n % 4 + 2, n % 3 + 1) for n in range(29))


def test_longer_pairs_raise_or_are_trimmed_before_eos(raises, tmp_path):
    fields = write(tmp_path, [([7], [9]), ([2, 3, 4, 5], [9, 9, 9])])
    fields |= {"batch_size": 2, "inputs_length": 3, "targets_length": 2, "packing": "none"}
    with raises(ConfigError, field="[inputs_length, targets_length]", value=[3, 2]):
        HuggingFacePairs(**fields).get_next()
    batch = HuggingFacePairs(**fields, trim=True).get_next()
    assert batch.src.ids.tolist() == [[7, 1, 0], [2, 3, 1]]
    assert batch.tgt.labels.tolist() == [[9, 1], [9, 1]]
