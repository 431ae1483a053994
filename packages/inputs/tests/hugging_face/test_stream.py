from __future__ import annotations

import json
import shutil

import pytest

from layerkit.errors import ConfigError
from layerkit_inputs.hugging_face.stream import HuggingFaceStream
from layerkit_inputs.hugging_face.text_input import HuggingFaceInput
from layerkit_inputs.testing import laws
from layerkit_inputs.text.tokenizers import SentencePieceTokenizer

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


def test_a_state_is_small_with_long_rows_too(tmp_path, fields):
    lines = [json.dumps({"text": f"{number} words of an example " * 40}) for number in range(60)]
    (tmp_path / "long.jsonl").write_text("\n".join(lines))
    common = {**fields, "data_files": str(tmp_path / "long.jsonl"), "seq_length": 8192}
    for packing in ("stream", "first_fit", "none"):
        source = HuggingFaceStream(**{**common, "batch_size": 1}, packing=packing, is_training=True)
        source.get_next()
        assert len(json.dumps(source.get_state())) < 32_000, packing


@pytest.mark.parametrize(
    "more",
    [
        {"input_random_seed": 3},
        {"seq_length": 8},
        {"data_files": "one file"},
        {"data_files": "other documents of equal size"},
        {"tokenizer": "t5"},
    ],
    ids=lambda more: "-".join(map(str, next(iter(more.items())))),
)
def test_stream_rejects_a_state_of_other_fields_or_data(
    more, fields, folder, tmp_path, sentencepiece_file
):
    state = HuggingFaceStream(**fields, is_training=True).get_state()
    if more.get("data_files") == "one file":
        more = {"data_files": [str(folder / "0.jsonl")]}
    elif "data_files" in more:
        shutil.copytree(folder, tmp_path / "other")
        file = tmp_path / "other" / "0.jsonl"
        file.write_text("".join(reversed(file.read_text().splitlines(keepends=True))))
        more = {"data_files": str(tmp_path / "other" / "*.jsonl")}
    if "tokenizer" in more:
        more = {"tokenizer": SentencePieceTokenizer(path=sentencepiece_file)}
    with pytest.raises(ConfigError):
        HuggingFaceStream(**{**fields, "is_training": True, **more}).set_state(state)


def test_a_folder_of_save_to_disk_is_streamed_too(tmp_path, fields):
    rows = [{"text": f"number {number}"} for number in range(150)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    source = HuggingFaceStream(
        **{**fields, **SINGLE, "path": str(tmp_path / "saved"), "data_files": None, "batch_size": 1}
    )
    assert sorted(examples_of(source, 150)) == sorted(row["text"] for row in rows)


@pytest.mark.parametrize("is_training", [True, False])
def test_an_error_is_raised_again(fields, is_training):
    more = {"packing": "none", "seq_length": 4, "is_training": is_training}
    source = HuggingFaceStream(**{**fields, **more})
    for _ in range(2):
        with pytest.raises(ConfigError, match="seq_length"):
            source.get_next()
