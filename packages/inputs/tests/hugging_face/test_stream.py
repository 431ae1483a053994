from __future__ import annotations

import itertools
import json
import subprocess
import sys

import numpy as np
import pytest

from layerkit.errors import ConfigError
from layerkit_inputs import Prefetch
from layerkit_inputs.hugging_face.input import HuggingFaceInput
from layerkit_inputs.hugging_face.stream import HuggingFaceStream
from layerkit_inputs.testing import laws
from layerkit_inputs.tokenizers import SentencePieceTokenizer

datasets = pytest.importorskip("datasets")
datasets.disable_progress_bars()

NUM_EXAMPLES = (13, 5, 9)
NUM_ALL = sum(NUM_EXAMPLES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for file, count in enumerate(NUM_EXAMPLES):
        rows = [
            {"text": f"d{file}.{number} " * (number * 7 % 5 + 1), "question": f"q{number}"}
            for number in range(count)
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{file}.jsonl").write_text(lines)
        path = str(folder / f"{file}.parquet")
        datasets.Dataset.from_list(rows).to_parquet(path, batch_size=4)
    return folder


@pytest.fixture(scope="module")
def fields(folder, tmp_path_factory):
    return {
        "path": "json",
        "data_files": str(folder / "*.jsonl"),
        "cache_dir": str(tmp_path_factory.mktemp("cache")),
        "batch_size": 4,
        "seq_length": 16,
        "shuffle_window": 5,
    }


@pytest.mark.parametrize(
    "mode",
    [
        {"is_training": True},
        {"packing": "first_fit", "inputs_field": "question"},
        {"is_training": True, "packing": "none", "trim": True},
        pytest.param({"eval_loop_num_batches": 2}, marks=pytest.mark.slow),
        pytest.param({"is_training": True, "packing": "first_fit"}, marks=pytest.mark.slow),
    ],
    ids=["training-stream", "epoch-first_fit", "training-none", "rolling", "training-first_fit"],
)
@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_reader_obeys_the_laws_of_inputs(law, mode, fields):
    law(lambda **more: HuggingFaceStream(**{**fields, **mode, **more}))


@pytest.mark.parametrize("packing", ["stream", "none"])
@pytest.mark.parametrize("inputs_field", [None, "question"])
def test_epoch_has_the_rows_of_the_mapped_input(packing, inputs_field, fields):
    more = {"packing": packing, "trim": packing == "none", "inputs_field": inputs_field}
    stream = HuggingFaceStream(**{**fields, **more})
    names = [name for name in fields if name != "shuffle_window"]
    by_number = HuggingFaceInput(**{**{name: fields[name] for name in names}, **more})
    laws.assert_same_batches(list(stream.eval_batches()), list(by_number.eval_batches()))


def examples_of(source, num_rows):
    rows = [source.get_next() for _ in range(num_rows // source.local_batch_size)]
    length = rows[0].ids.shape[1]
    return [
        text
        for batch in rows
        for text in source.ids_to_strings(batch.labels, [length] * source.local_batch_size)
    ]


SINGLE = {"packing": "none", "seq_length": 64, "is_training": True}


@pytest.mark.parametrize("path", ["json", "parquet"])
def test_every_epoch_has_every_example_once_in_another_order(path, fields, folder):
    files = str(folder / f"*.{'jsonl' if path == 'json' else path}")
    fields = {**fields, **SINGLE, "batch_size": 1, "path": path, "data_files": files}
    source = HuggingFaceStream(**fields)
    first, second = examples_of(source, NUM_ALL), examples_of(source, NUM_ALL)
    assert len(set(first)) == NUM_ALL and sorted(first) == sorted(second) and first != second
    other = HuggingFaceStream(**fields, input_random_seed=1)
    assert examples_of(other, NUM_ALL) not in (first, second)
    # Files, and examples within windows, are in another order than they lie.
    assert first != sorted(first)


@pytest.mark.parametrize("num_hosts", [2, 3])
def test_hosts_train_on_shares_that_do_not_overlap(num_hosts, fields):
    # Two hosts do not divide three files, so each reads every second example; three read a file.
    shares = []
    for host in range(num_hosts):
        source = HuggingFaceStream(
            **{**fields, **SINGLE, "batch_size": 1},
            infeed_host_index=host,
            num_infeed_hosts=num_hosts,
        )
        share = []
        while source._position.epoch == 0:
            share += examples_of(source, 1)
        shares.append(share[:-1])  # the last one is of the next epoch
    texts = list(itertools.chain(*shares))
    assert len(texts) == len(set(texts)) == NUM_ALL


@pytest.mark.parametrize("num_hosts", [2, 3])
def test_hosts_with_different_shares_evaluate_every_example(num_hosts, fields, folder):
    common = {**fields, "data_files": str(folder / "0.jsonl"), "packing": "none", "seq_length": 64}
    provenance, weight, lengths = [], 0.0, set()
    for host in range(num_hosts):
        source = HuggingFaceStream(
            **{**common, "batch_size": 2}, infeed_host_index=host, num_infeed_hosts=num_hosts
        )
        batches = list(source.eval_batches())
        lengths.add(len(batches))
        provenance += [number for batch in batches for number in batch.provenance.tolist()]
        weight += sum(batch.eval_sample_weights.sum() for batch in batches)
    assert sorted(number for number in provenance if number >= 0) == list(range(13))
    assert weight == 13 and len(lengths) == 1


def test_host_without_examples_evaluates_but_raises_in_training(raises, fields, tmp_path):
    (tmp_path / "one.jsonl").write_text('{"text": "alone"}\n')
    common = {**fields, "data_files": str(tmp_path / "one.jsonl")}
    hosts = {"infeed_host_index": 1, "num_infeed_hosts": 2}
    (batch,) = HuggingFaceStream(**common, **hosts).eval_batches()
    assert batch.ids.shape == (4, 16) and not batch.weights.any()
    assert batch.provenance.tolist() == [-1] * 4
    training = HuggingFaceStream(**common, **hosts, is_training=True)
    with raises(ConfigError, owner="HuggingFaceStream"):
        training.get_next()


RESUME = """
import json, sys
from layerkit_inputs.hugging_face.stream import HuggingFaceStream
source = HuggingFaceStream(**json.loads(sys.argv[1]))
source.set_state(json.loads(sys.argv[2]))
print(json.dumps([source.get_next().ids.tolist() for _ in range(12)]))
"""


@pytest.mark.slow  # in the ordinary run, HuggingFaceInput resumes in a fresh process
def test_new_process_resumes_a_shuffled_packed_stream(fields, folder):
    fields = {
        **fields,
        "path": "parquet",
        "data_files": str(folder / "*.parquet"),
        "is_training": True,
        "packing": "first_fit",
        "infeed_host_index": 1,
        "num_infeed_hosts": 2,
    }
    source = HuggingFaceStream(**fields)
    laws.take(source, 3)
    state = source.get_state()
    assert state["position"]["taken"] % 5  # in the midst of a window, or the test shows less
    assert len(json.dumps(state)) < 4096
    expected = [batch.ids.tolist() for batch in laws.take(source, 12)]
    done = subprocess.run(
        [sys.executable, "-c", RESUME, json.dumps(fields), json.dumps(state)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == expected


def test_a_state_is_small_with_long_rows_too(tmp_path, fields):
    lines = [json.dumps({"text": f"{number} words of an example " * 40}) for number in range(60)]
    (tmp_path / "long.jsonl").write_text("\n".join(lines))
    common = {**fields, "data_files": str(tmp_path / "long.jsonl"), "seq_length": 8192}
    for packing in ("stream", "first_fit", "none"):
        source = HuggingFaceStream(**{**common, "batch_size": 1}, packing=packing, is_training=True)
        source.get_next()
        assert len(json.dumps(source.get_state())) < 32_000, packing


def test_training_state_fits_only_the_same_number_of_hosts(fields):
    state = HuggingFaceStream(**fields, is_training=True).get_state()
    with pytest.raises(ValueError):
        HuggingFaceStream(**fields, is_training=True, num_infeed_hosts=2).set_state(state)
    evaluating = HuggingFaceStream(**fields)
    evaluating.get_next()
    HuggingFaceStream(**fields, num_infeed_hosts=2).set_state(evaluating.get_state())


@pytest.mark.parametrize(
    "more",
    [
        {"shuffle_window": 6},
        {"input_random_seed": 3},
        {"seq_length": 8},
        {"packing": "none", "trim": True},
        {"data_files": "0.jsonl"},
        {"tokenizer": "t5"},
    ],
    ids=lambda more: next(iter(more)),
)
def test_stream_rejects_a_state_of_other_fields_or_data(more, fields, folder, sentencepiece_file):
    state = HuggingFaceStream(**fields, is_training=True).get_state()
    if "data_files" in more:
        more = {"data_files": [str(folder / "0.jsonl")]}
    if "tokenizer" in more:
        more = {"tokenizer": SentencePieceTokenizer(path=sentencepiece_file)}
    with pytest.raises(ConfigError):
        HuggingFaceStream(**{**fields, "is_training": True, **more}).set_state(state)


def test_stream_resumes_under_prefetch(fields):
    fields = {**fields, "is_training": True}
    expected = laws.take(HuggingFaceStream(**fields), 9)
    source = Prefetch(source=HuggingFaceStream(**fields))
    laws.assert_same_batches(laws.take(source, 4), expected[:4])
    state = source.get_state()
    source.close()
    resumed = HuggingFaceStream(**fields)
    resumed.set_state(state)
    laws.assert_same_batches(laws.take(resumed, 5), expected[4:])


def test_a_folder_of_save_to_disk_is_streamed_too(tmp_path, fields):
    rows = [{"text": f"number {number}"} for number in range(150)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    source = HuggingFaceStream(
        **{**fields, **SINGLE, "path": str(tmp_path / "saved"), "data_files": None, "batch_size": 1}
    )
    assert sorted(examples_of(source, 150)) == sorted(row["text"] for row in rows)


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"split": "train[:10%]"}, "split"),
        ({"input_random_seed": -1}, "input_random_seed"),
        ({"packing": "none", "seq_length": 4}, "seq_length"),
    ],
)
def test_stream_raises_for_invalid_fields(raises, more, field, fields):
    with raises(ConfigError, field=field, value=more[field]):
        HuggingFaceStream(**{**fields, **more}).get_next()


@pytest.mark.parametrize("is_training", [True, False])
def test_an_error_is_raised_again(fields, is_training):
    more = {"packing": "none", "seq_length": 4, "is_training": is_training}
    source = HuggingFaceStream(**{**fields, **more})
    for _ in range(2):
        with pytest.raises(ConfigError, match="seq_length"):
            source.get_next()


def test_arrays_are_int32_and_float32(fields):
    batch = HuggingFaceStream(**fields, inputs_field="question").get_next()
    for name, array in batch.items():
        is_float = name in ("weights", "paddings", "eval_sample_weights")
        assert array.dtype == (np.float32 if is_float else np.int32), name
