from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys

import numpy as np
import pytest

from layerkit.errors import ConfigError
from layerkit_inputs.base.errors import BadRecordError, BadRecords
from layerkit_inputs.text.text_files import DocumentSizeError
from layerkit_inputs.text.token_store import TokenStore
from layerkit_inputs.tools import build_token_records as tool
from layerkit_inputs.tools.build_token_records import build_token_records, main

pytest.importorskip("array_record")


def lines(texts, field="text"):
    return "".join(json.dumps({field: text, "id": n}) + "\n" for n, text in enumerate(texts))


def write(path, content):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def texts_of(folder, split="train"):
    """Return the documents of a split of byte ids."""
    store = TokenStore(folder, split)
    ids, is_read = store.read(np.array([0]), np.array([store.split.num_ids]), BadRecords())
    assert is_read.all()
    ends = store.document_ends + np.arange(1, len(store.document_ends) + 1)
    documents = np.split(ids, ends[:-1])
    assert all(document[0] == 1 and document[-1] == 2 for document in documents)
    return [(document[1:-1] - 3).astype(np.uint8).tobytes().decode() for document in documents]


def files_of(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def inputs(tmp_path):
    """Return a folder with a file of each format, and its texts in order."""
    folder = tmp_path / "inputs"
    write(folder / "a.txt", "all of a file\nis a document\n")
    write(folder / "b.jsonl", lines(["one", "", "dreißig 世界"]) + "\n" + lines(["after a gap"]))
    write(folder / "c.txt.gz", gzip.compress(b"zipped text"))
    write(folder / "d.jsonl.gz", gzip.compress(lines(["zipped one", "zipped two"]).encode()))
    texts = ["all of a file\nis a document\n", "one", "", "dreißig 世界", "after a gap"]
    return folder, [*texts, "zipped text", "zipped one", "zipped two"]


def test_documents_of_all_formats_keep_the_order_of_the_input(inputs, tmp_path):
    folder, texts = inputs
    about = build_token_records([str(folder)], tmp_path / "out" / "tokens", tokenizer="bytes")
    assert texts_of(tmp_path / "out" / "tokens") == texts
    assert about.dtype == "uint16" and about.tokenizer["vocab_size"] == 259
    assert about.splits["train"].num_documents == len(texts)


def test_parquet_column_is_tokenized_and_a_wrong_one_raises(raises, tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"body": ["first", None, "third"], "n": [1, 2, 3]})
    parquet.write_table(table, tmp_path / "rows.parquet")
    build = {"inputs": [str(tmp_path / "rows.parquet")], "tokenizer": "bytes"}
    build_token_records(output=tmp_path / "out", field="body", on_bad_record="skip", **build)
    assert texts_of(tmp_path / "out") == ["first", "third"]
    for wrong in ("bodi", "n"):
        data = {"field": "column", "value": wrong, "choices": ("body",)}
        with raises(BadRecordError, owner=str(tmp_path / "rows.parquet"), **data):
            build_token_records(output=tmp_path / "other", field=wrong, **build)
    with raises(BadRecordError, problem="no text (null)."):
        build_token_records(output=tmp_path / "other", field="body", **build)
    path = tmp_path / "rows.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BadRecordError, match="rows.parquet: cannot read the Parquet file"):
        build_token_records(output=tmp_path / "other", field="body", **build)
    assert not (tmp_path / "other").exists()


def test_output_does_not_depend_on_the_number_of_workers(tmp_path):
    texts = [f"document {number} " * (number % 9) for number in range(3000)]
    write(tmp_path / "in" / "a.jsonl", lines(texts))
    fields = {"tokenizer": "bytes", "num_shards": 3, "heldout_fraction": 0.1, "block_length": 256}
    for workers in (0, 2):
        build_token_records(
            [str(tmp_path / "in")], tmp_path / f"out{workers}", workers=workers, **fields
        )
    assert files_of(tmp_path / "out0") == files_of(tmp_path / "out2")
    train, heldout = texts_of(tmp_path / "out0"), texts_of(tmp_path / "out0", "heldout")
    assert sorted(train + heldout) == sorted(texts)
    assert not set(train) & set(heldout)
    assert 0.02 < len(heldout) / len(texts) < 0.3
    sizes = [shard.num_ids for shard in TokenStore(tmp_path / "out0", "train").split.shards]
    assert len(sizes) == 3 and max(sizes) < 1.2 * min(sizes)


def test_files_named_as_held_out_make_that_split(raises, tmp_path):
    for name in ("train-0", "train-1", "val", "test"):
        write(tmp_path / "in" / f"{name}.jsonl", lines([f"{name} {n}" for n in range(3)]))
    build = {"inputs": [str(tmp_path / "in")], "tokenizer": "bytes"}
    about = build_token_records(output=tmp_path / "out", workers=2, **build)
    assert sorted(about.splits) == ["heldout", "test", "train"]
    assert texts_of(tmp_path / "out") == [f"train-{i} {n}" for i in range(2) for n in range(3)]
    for split, name in (("heldout", "val"), ("test", "test")):
        assert texts_of(tmp_path / "out", split) == [f"{name} {n}" for n in range(3)]
    with raises(ConfigError, field="heldout_fraction", value=0.1):
        build_token_records(output=tmp_path / "other", heldout_fraction=0.1, **build)


def test_text_that_the_tokenizer_loses_is_reported(tmp_path, sentencepiece_file):
    write(tmp_path / "in" / "a.txt", "line\n\nof text\n")
    said = []
    build_token_records(
        [str(tmp_path / "in")], tmp_path / "out", tokenizer=sentencepiece_file, say=said.append
    )
    assert "WARNING: the tokenizer loses 3 line breaks of the first document" in said


def test_tokenizer_is_read_from_its_file(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 70_000}, "?"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path / "in" / "a.txt", "a b b")
    write(tmp_path / "in" / "b.txt", "")
    write(tmp_path / "in" / "c.txt", "b what a")
    said = []
    about = build_token_records(
        [str(tmp_path / "in")],
        tmp_path / "out",
        tokenizer=str(tmp_path / "tokenizer.json"),
        say=said.append,
    )
    # Neither start nor end here, so the first token of a document is only read.
    assert about.dtype == "int32" and about.tokenizer["eos_id"] is None
    store = TokenStore(tmp_path / "out", "train")
    assert store.document_ends.tolist() == [2, 4]
    ids, _ = store.read(np.array([0]), np.array([6]), BadRecords())
    assert ids.tolist() == [0, 1, 1, 1, 70_000, 0]
    assert said[0] == "text ids: start none, end none, padding 0"
    assert said[2:] == [
        "train: 2 documents, 4 predictions, 1 shards",
        "skipped: 1 documents with nothing to predict",
    ]


BAD_LINES = {
    '{"text": "cut of': r"not a line of JSON \(Unterminated string",
    '["text"]': "a JSON list, expected an object.",
    '{"txt": "x", "n": 1}': "no such field: field='text'. Did you mean 'txt'",
    '{"text": 17}': "field 'text' is 17, expected a string.",
    '{"text": "\\ud800"}': "'utf-8' codec can't encode character",
    b'{"text": "\xff"}': "not UTF-8: byte 10 is 0xff.",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=str)
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_bad_line_raises_or_is_counted(tmp_path, line, workers):
    bad = line if isinstance(line, bytes) else line.encode()
    path = write(tmp_path / "in" / "a.jsonl", lines(["one"]).encode() + bad + b"\n")
    fields = {"tokenizer": "bytes", "workers": workers}
    with pytest.raises(BadRecordError, match=f"a.jsonl, line 2: {BAD_LINES[line]}"):
        build_token_records([path], tmp_path / "out", **fields)
    assert [entry.name for entry in tmp_path.iterdir()] == ["in"]
    said = []
    about = build_token_records(
        [path], tmp_path / "out", on_bad_record="skip", say=said.append, **fields
    )
    assert about.num_skipped == 1 and texts_of(tmp_path / "out") == ["one"]
    assert said[-2].startswith("skipped: 1 documents")
    assert f"{path}, line 2: " in said[-1]


def test_truncated_or_unsupported_files_raise(raises, tmp_path):
    path = write(tmp_path / "in" / "a.jsonl.gz", gzip.compress(lines(["one"] * 100).encode())[:-9])
    for policy in ("refuse", "skip"):
        with pytest.raises(BadRecordError, match=r"a.jsonl.gz: truncated or damaged \(Compressed"):
            build_token_records([path], tmp_path / "out", tokenizer="bytes", on_bad_record=policy)
    path = write(tmp_path / "in" / "b.txt.zst", b"x")
    with raises(BadRecordError, owner=path, field="compression", value=".zst"):
        build_token_records([path], tmp_path / "out", tokenizer="bytes")
    assert [entry.name for entry in tmp_path.iterdir()] == ["in"]


_KILLED = """
import os, signal, sys
from layerkit_inputs.tools import build_token_records as tool
tool._PROGRESS_SECONDS = 0.0
def say(line):
    if line.startswith("5 documents"):
        os.kill(os.getpid(), signal.SIGKILL)
tool.build_token_records([sys.argv[1]], sys.argv[2], tokenizer="bytes", say=say)
"""


def test_killed_build_leaves_no_output(tmp_path):
    path = write(tmp_path / "in" / "a.jsonl", lines(["one"] * 9))
    output = tmp_path / "out"
    done = subprocess.run([sys.executable, "-c", _KILLED, path, str(output)])
    assert done.returncode == -signal.SIGKILL
    assert not output.exists()
    (left,) = (entry for entry in tmp_path.iterdir() if entry.name != "in")
    assert left.name.startswith(".out.partial-")
    with pytest.raises(FileNotFoundError, match="whose build has finished"):
        TokenStore(left, "train")
    build_token_records([path], output, tokenizer="bytes")
    assert texts_of(output) == ["one"] * 9


def test_concurrent_builds_do_not_disturb_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "_PROGRESS_SECONDS", 0.0)
    path = write(tmp_path / "in" / "a.jsonl", lines(["one"] * 3))
    output = tmp_path / "out"

    def while_building(line):
        if line.startswith("1 documents"):
            build_token_records([path], output, tokenizer="bytes")

    # The inner one is done first, so the outer one finds its place taken.
    with pytest.raises(OSError, match="out"):
        build_token_records([path], output, tokenizer="bytes", say=while_building)
    assert texts_of(output) == ["one"] * 3
    assert {entry.name for entry in tmp_path.iterdir()} == {"in", "out"}


def test_command_builds_records_and_reports(inputs, tmp_path, capsys):
    folder, texts = inputs
    arguments = ["--input", str(folder), "--output", str(tmp_path / "out"), "--tokenizer", "bytes"]
    assert main([*arguments, "--heldout_fraction", "0.3", "--num_shards", "2"]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "text ids: start BOS (1), end EOS (2), padding PAD (0)"
    assert said[1].startswith("8 documents, ") and "100% of" in said[1]
    assert [line.partition(":")[0] for line in said[2:]] == ["train", "heldout"]
    assert sorted(texts_of(tmp_path / "out") + texts_of(tmp_path / "out", "heldout")) == sorted(
        texts
    )
    assert main([*arguments, "--quiet"]) == 1
    assert f"{tmp_path}/out: the output exists" in capsys.readouterr().err
    for wrong in (["--tokenizr", "bytes"], ["--on_bad_record", "drop"]):
        with pytest.raises(SystemExit) as caught:
            main([*arguments, *wrong])
        assert caught.value.code == 2


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz"])
def test_document_that_unpacks_to_more_than_the_bound_raises(raises, tmp_path, name):
    document = b"x" * 100_000 if name == "a.txt.gz" else lines(["x" * 100_000]).encode()
    path = write(tmp_path / "in" / name, gzip.compress(document))
    build = {"inputs": [path], "output": tmp_path / "out", "tokenizer": "bytes"}
    with raises(DocumentSizeError, field="max_document_bytes", value=50_000):
        build_token_records(max_document_bytes=50_000, on_bad_record="skip", **build)
    assert not (tmp_path / "out").exists()
    build_token_records(max_document_bytes=200_000, **build)
    assert texts_of(tmp_path / "out") == ["x" * 100_000]
