from __future__ import annotations

import itertools
import json
import os
import socket

import pytest

from layerkit.errors import ConfigError
from layerkit_inputs.hugging_face.stream import HuggingFaceStream
from layerkit_inputs.hugging_face.text_input import HuggingFaceInput, HuggingFacePrompts
from layerkit_inputs.testing import laws
from layerkit_inputs.text.tokenizers import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
)

datasets = pytest.importorskip("datasets")
datasets.disable_progress_bars()

NUM_EXAMPLES = (13, 5, 9)


def rows_of(file):
    return [
        {"text": f"d{file}.{number} " * (number * 7 % 5), "question": f"q{number}", "n": number}
        for number in range(NUM_EXAMPLES[file])
    ]


ROWS = [row for file in range(3) for row in rows_of(file)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for file in range(3):
        lines = "".join(json.dumps(row) + "\n" for row in rows_of(file))
        (folder / f"{file}.jsonl").write_text(lines)
    return folder


@pytest.fixture(scope="module")
def fields(folder, tmp_path_factory):
    return {
        "path": "json",
        "data_files": str(folder / "*.jsonl"),
        "cache_dir": str(tmp_path_factory.mktemp("cache")),
        "batch_size": 4,
        "seq_length": 16,
    }


def tokens_read(source):
    """Return the labels that count in an epoch, and the tokens before them."""
    pairs = []
    for batch in source.eval_batches():
        counts = batch.weights > 0
        pairs += zip(batch.ids[counts].tolist(), batch.labels[counts].tolist(), strict=True)
    return sorted(pairs)


def tokens_of(rows, tokenizer, field="text"):
    pairs = []
    for row in rows:
        start = [] if isinstance(tokenizer, HuggingFaceTokenizer) else [tokenizer.start_id]
        ids = [*start, *tokenizer.encode(row[field]).tolist(), tokenizer.eos_id]
        pairs += itertools.pairwise(ids)
    return sorted(pairs)


TRAINING, EPOCH, ROLLING = {"is_training": True}, {}, {"eval_loop_num_batches": 2}


@pytest.mark.parametrize(
    "mode",
    [
        {**TRAINING, "packing": "stream"},
        pytest.param(
            {**EPOCH, "packing": "first_fit", "inputs_field": "question"}, marks=pytest.mark.slow
        ),
        pytest.param({**ROLLING, "packing": "none", "trim": True}, marks=pytest.mark.slow),
    ],
    ids=["training-stream", "epoch-first_fit", "rolling-none"],
)
@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_reader_obeys_the_laws_of_inputs(law, mode, fields):
    law(lambda **more: HuggingFaceInput(**{**fields, **mode, **more}))


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
@pytest.mark.slow
def test_reader_of_prompts_obeys_the_laws_of_inputs(law, fields):
    fields = {name: value for name, value in fields.items() if name != "seq_length"}
    law(lambda **more: HuggingFacePrompts(**{**fields, "prompt_length": 5, **more}))


@pytest.mark.parametrize("packing", ["stream", "first_fit"])
@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "huggingface"])
def test_an_epoch_reads_every_token_once(packing, kind, fields, request):
    if kind == "bytes":
        tokenizer = ByteTokenizer()
    elif kind == "sentencepiece":
        tokenizer = SentencePieceTokenizer(path=request.getfixturevalue("sentencepiece_file"))
    else:
        path = request.getfixturevalue("tokenizer_json")
        tokenizer = HuggingFaceTokenizer(path=path, eos_token="<|endoftext|>")
    source = HuggingFaceInput(**fields, packing=packing, tokenizer=tokenizer)
    # Whatever is cut goes on from the token before it, so the pairs are those of whole texts.
    assert tokens_read(source) == tokens_of(ROWS, tokenizer)
    assert source.token_unit == ("byte" if kind == "bytes" else "token")


@pytest.mark.parametrize("reader", [HuggingFaceInput, HuggingFaceStream])
def test_host_without_examples_makes_batches_of_padding(raises, reader, fields, tmp_path):
    (tmp_path / "one.jsonl").write_text('{"text": "alone"}\n')
    fields = {**fields, "data_files": str(tmp_path / "one.jsonl")}
    fields |= {"infeed_host_index": 1, "num_infeed_hosts": 2}
    (batch,) = reader(**fields).eval_batches()
    assert batch.ids.shape == (4, 16) and not batch.weights.any()
    assert batch.provenance.tolist() == [-1] * 4
    if reader is HuggingFaceStream:  # whose hosts do not share their rows
        with raises(ConfigError, owner="HuggingFaceStream"):
            reader(**fields, is_training=True).get_next()


def test_inputs_have_no_weight_and_are_the_prompts(fields):
    source = HuggingFaceInput(
        **{**fields, "seq_length": 64}, packing="none", inputs_field="question"
    )
    batch = source.get_next()
    row = 1
    question, text = "q1", ROWS[1]["text"]
    size = len(question) + len(text) + 1
    assert batch.weights[row, : len(question)].tolist() == [0, 0]
    assert batch.weights[row].sum() == size - len(question)
    assert source.ids_to_strings(batch.labels[row : row + 1], [64]) == [question + text]
    assert batch.inputs_indicator[row].tolist() == [1, 1, 1] + [0] * 61
    prompts = HuggingFacePrompts(
        **{name: value for name, value in fields.items() if name != "seq_length"},
        inputs_field="question",
        prompt_length=10,
        num_prompts=6,
    )
    batches = list(prompts.eval_batches())
    texts = [prompts.ids_to_strings(batch.ids, batch.prompt_lengths) for batch in batches]
    assert texts == [["q0", "q1", "q2", "q3"], ["q4", "q5", "", ""]]
    assert batches[1].provenance.tolist() == [4, 5, -1, -1]


def test_column_of_token_ids_needs_a_tokenizer(raises, tmp_path, sentencepiece_file):
    tokenizer = SentencePieceTokenizer(path=sentencepiece_file)
    ids = [tokenizer.encode(f"some text {number}").tolist() for number in range(5)]
    datasets.Dataset.from_dict({"ids": ids}).to_parquet(str(tmp_path / "ids.parquet"))
    fields = {
        "path": "parquet",
        "data_files": str(tmp_path / "ids.parquet"),
        "cache_dir": str(tmp_path),
        "batch_size": 5,
        "seq_length": 30,
        "text_field": "ids",
        "packing": "none",
    }
    batch = HuggingFaceInput(tokenizer=tokenizer, **fields).get_next()
    assert batch.labels[2, : len(ids[2]) + 1].tolist() == [*ids[2], 1]
    with raises(ConfigError, field="tokenizer", value=None):
        HuggingFaceInput(**fields).get_next()


@pytest.mark.parametrize("path", ["parquet", "text", "csv", "arrow"])
def test_each_file_format_gives_the_same_batches(path, tmp_path):
    data = datasets.Dataset.from_list([{"text": "one"}, {"text": "two"}])
    file = tmp_path / f"file.{path}"
    if path == "text":
        file.write_text("one\ntwo\n")
    elif path == "arrow":
        data.save_to_disk(str(tmp_path / "saved"))
        file = tmp_path / "saved" / "data-00000-of-00001.arrow"
    else:
        getattr(data, f"to_{path}")(str(file))
    source = HuggingFaceInput(
        path=path, data_files=str(file), cache_dir=str(tmp_path), batch_size=1, seq_length=20
    )
    assert source.ids_to_strings(source.get_next().labels, [20]) == ["onetwo"]


def test_saved_folders_are_read_by_split(raises, folder, tmp_path, fields):
    saved = datasets.DatasetDict(
        train=datasets.Dataset.from_list(ROWS), test=datasets.Dataset.from_list(ROWS[:3])
    )
    saved.save_to_disk(str(tmp_path / "saved"))
    expected = tokens_read(HuggingFaceInput(**fields))
    common = {"batch_size": 4, "seq_length": 16, "cache_dir": str(tmp_path / "cache")}
    on_disk = HuggingFaceInput(path=str(tmp_path / "saved"), **common)
    assert tokens_read(on_disk) == expected
    test = HuggingFaceInput(path=str(tmp_path / "saved"), split="test", **common)
    assert tokens_read(test) == tokens_of(ROWS[:3], ByteTokenizer())
    with raises(ConfigError, field="split", value="tst", choices=("train", "test")):
        HuggingFaceInput(path=str(tmp_path / "saved"), split="tst", **common).get_next()
    plain = HuggingFaceInput(path=str(folder), **common)
    assert tokens_read(plain) == expected


def test_data_set_with_several_cache_blocks(tmp_path):
    rows = [{"text": str(number)} for number in range(2500)]
    (tmp_path / "many.txt").write_text("".join(f"{row['text']}\n" for row in rows))
    fields = {"path": "text", "data_files": str(tmp_path / "many.txt"), "cache_dir": str(tmp_path)}
    source = HuggingFaceInput(**fields, batch_size=64, seq_length=64)
    assert tokens_read(source) == tokens_of(rows, ByteTokenizer())
    assert len(source._documents.ids._pieces) > 1  # else the test shows nothing


def test_tokens_are_cached_until_the_file_changes(tmp_path):
    file = tmp_path / "text.txt"
    fields = {"path": "text", "data_files": str(file), "cache_dir": str(tmp_path / "cache")}

    def read():
        source = HuggingFaceInput(**fields, batch_size=1, seq_length=20)
        return source.ids_to_strings(source.get_next().labels, [20])

    def kept():
        return sorted((tmp_path / "cache" / "layerkit_tokens").glob("*.arrow"))

    file.write_text("before\n")
    assert read() == ["before"] and len(kept()) == 1
    when = kept()[0].stat().st_mtime_ns
    assert read() == ["before"] and [path.stat().st_mtime_ns for path in kept()] == [when]
    file.write_text("later!\n")
    os.utime(file, ns=(when + 10**9, when + 10**9))
    assert read() == ["later!"] and len(kept()) == 2


@pytest.mark.parametrize(
    ("reader", "more"),
    [
        (HuggingFaceInput, {}),
        # In the midst of a window, of a host that reads a share of the files.
        pytest.param(
            HuggingFaceStream,
            {"shuffle_window": 5, "infeed_host_index": 1, "num_infeed_hosts": 2},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_new_process_resumes_mid_epoch(fields, reader, more, read_in_new_process):
    fields = {**fields, "is_training": True, "packing": "first_fit", **more}
    source = reader(**fields)
    laws.take(source, 3)
    state = source.get_state()
    if reader is HuggingFaceStream:
        assert state["position"]["taken"] % 5 and len(json.dumps(state)) < 4096
    else:
        assert len(json.dumps(state)) < 1000
    result = read_in_new_process(reader, fields, state, 9)
    assert [batch["ids"] for batch in result] == [b.ids.tolist() for b in laws.take(source, 9)]


def test_input_rejects_a_state_of_other_data_or_tokenizer(fields, folder, sentencepiece_file):
    source = HuggingFaceInput(**fields, is_training=True)
    state = source.get_state()
    other = {**fields, "data_files": str(folder / "1.jsonl")}
    with pytest.raises(ConfigError) as caught:
        HuggingFaceInput(**other, is_training=True).set_state(state)
    assert [*caught.value.value] == ["num_rows", "tokens_crc32"]
    tokenizer = SentencePieceTokenizer(path=sentencepiece_file)
    with pytest.raises(ConfigError) as caught:
        HuggingFaceInput(**fields, is_training=True, tokenizer=tokenizer).set_state(state)
    assert caught.value.value["tokenizer"] == "bytes"


@pytest.mark.parametrize("reader", [HuggingFaceInput, HuggingFaceStream])
def test_input_does_not_use_the_network(reader, fields, tmp_path, monkeypatch):
    """`datasets` would look up an unknown path on the Hub."""

    def refuse(*arguments, **options):
        raise SystemExit("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    fields = {**fields, "cache_dir": str(tmp_path)}
    reader(**fields).get_next()
    with pytest.raises(ValueError, match="path='nobody/nothing'"):
        reader(**{**fields, "path": "nobody/nothing"}).get_next()


def test_urls_in_the_settings_of_a_local_folder_raise(raises, fields, folder):
    url = "http://localhost/rows.jsonl"
    configs = "configs:\n- config_name: default\n  data_files: {}\n"
    source = HuggingFaceInput(**{**fields, "path": str(folder), "data_files": None})
    page = "---\nlicense_link: https://here\n{}---\nSee https://here.\n"
    (folder / "README.md").write_text(page.format(configs.format("1.jsonl")))
    source.get_next()
    for name, text in (
        ("README.md", page.format(configs.format(url))),
        (".huggingface.yaml", configs.format(url)),
    ):
        (folder / name).write_text(text)
        with raises(ConfigError, field="data_files", value=url):
            HuggingFaceInput(**{**fields, "path": str(folder), "data_files": None}).get_next()
        (folder / name).unlink()


def test_trim_keeps_the_beginning_of_examples(fields):
    source = HuggingFaceInput(**{**fields, "seq_length": 4}, packing="none", trim=True)
    texts = []
    for batch in source.eval_batches():
        texts += source.ids_to_strings(batch.labels, [4] * 4)
    assert texts[: len(ROWS)] == [row["text"][:4] for row in ROWS]
