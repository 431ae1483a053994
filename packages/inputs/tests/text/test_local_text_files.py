"""What LocalText reads: splits, formats of files, fields of JSON lines, and bounds on sizes."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re

import pytest

from layerkit.errors import ConfigError
from layerkit_inputs import LocalText, LocalTextPrompts
from layerkit_inputs.base.errors import BadRecordError
from layerkit_inputs.text.trigram_baseline import trigram_loss


def write(folder, documents):
    folder.mkdir(exist_ok=True)
    for name, data in documents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return [str(folder)]


def texts_of_splits(paths, **fields):
    """Return the documents of each split as text."""
    result = {}
    for split in ("train", "heldout", "all"):
        source = LocalTextPrompts(
            batch_size=1, paths=paths, split=split, prompt_length=10_000, **fields
        )
        result[split] = [
            source.ids_to_strings(batch.ids, batch.prompt_lengths)[0]
            for batch in source.eval_batches()
        ]
    return result


def test_lines_of_json_are_documents(tmp_path):
    lines = {
        "a.jsonl": b'{"text": "one"}\n{"text": "two", "more": 1}\n',
        "b.jsonl": b'{"text": "three"}\n\n{"text": ""}\n',
    }
    result = texts_of_splits(write(tmp_path / "text", lines), text_field="text")
    assert sorted(result["train"] + result["heldout"]) == ["", "one", "three", "two"]


def test_documents_of_a_single_file_are_split_by_their_text(raises, tmp_path):
    def splits(texts, *, fraction=0.1):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        paths = write(tmp_path / "text", {"all.jsonl": lines.encode()})
        return texts_of_splits(paths, text_field="text", heldout_fraction=fraction)

    texts = [f"document {number}" for number in range(300)]
    before = splits(texts)
    assert before["all"] == texts
    assert sorted(before["train"] + before["heldout"]) == sorted(texts)
    assert 9 <= len(before["heldout"]) <= 51  # binomial(300, .1): 30 +- 4 standard deviations
    # More of them, twice the same and in another order: none goes to the other side.
    after = splits([f"more {number}" for number in range(9)] + texts[::-1] + texts[:50])
    assert set(before["train"]) <= set(after["train"])
    assert set(before["heldout"]) <= set(after["heldout"])
    assert not set(after["train"]) & set(after["heldout"])
    few = splits(["one", "two", "one"], fraction=1e-9)
    assert sorted(map(len, few.values())) in ([1, 2, 3], [2, 2, 3])
    assert not set(few["train"]) & set(few["heldout"])
    with raises(ConfigError, owner="LocalTextPrompts"):
        splits(["one", "one"])


def lines_of(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def parquet_of(texts):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    stream = io.BytesIO()
    parquet.write_table(arrow.table({"text": texts}), stream)
    return stream.getvalue()


FORMATS = {
    "jsonl": lines_of,
    "jsonl.gz": lambda t: gzip.compress(lines_of(t)),
    "parquet": parquet_of,
}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("train", "val"),
        ("data/training", "data/test"),
        ("part/a", "dev/a"),
        ("validation-00000-of-00001", "train-00000-of-00001"),
    ],
)
def test_named_splits_of_any_format_are_obeyed(tmp_path, kind, one, other):
    texts = {name: [f"{name} {n}" for n in range(count)] for name, count in ((one, 19), (other, 3))}
    files = {f"{name}.{kind}": FORMATS[kind](of) for name, of in texts.items()}
    result = texts_of_splits(write(tmp_path / "text", files), text_field="text")
    train, heldout = (other, one) if "valid" in one else (one, other)
    assert result["train"] == texts[train] and result["heldout"] == texts[heldout]
    assert sorted(result["all"]) == sorted(texts[one] + texts[other])


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("num_files", [1, 2, 5])
def test_documents_of_files_without_names_are_split_whatever_their_number(
    tmp_path, kind, num_files
):
    texts = [f"document {number}" for number in range(300)]
    files = {
        f"train-{n:05}-of-{num_files:05}.{kind}": FORMATS[kind](texts[n::num_files])
        for n in range(num_files)
    }
    paths = write(tmp_path / "text", files)
    result = texts_of_splits(paths, text_field="text", heldout_fraction=0.1)
    hashes = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts]
    is_held_out = [int.from_bytes(digest, "big") < 0.1 * 2**64 for digest in hashes]
    assert set(result["heldout"]) == {t for t, held in zip(texts, is_held_out, strict=True) if held}
    assert sorted(result["train"] + result["heldout"]) == sorted(texts)
    (line,) = LocalText(batch_size=1, paths=paths, text_field="text").describe_data()
    num_train = len(texts_of_splits(paths, text_field="text")["train"])
    assert re.search(rf": {num_files} files?, {num_train} documents, ", line)


def test_a_split_without_a_file_raises(raises, tmp_path):
    paths = write(tmp_path / "text", {"val.txt": b"abc\n", "test.txt": b"abc\n"})
    with raises(ConfigError, field="paths", value=["test.txt", "val.txt"]):
        LocalText(batch_size=1, paths=paths, split="train").get_next()
    empty = {
        "paths": write(tmp_path / "empty", {"a.txt": b"a", "val.txt": b""}),
        "split": "heldout",
    }
    with raises(ConfigError, field="number of skipped documents", value=0):
        LocalText(batch_size=1, **empty).get_next()
    only = {"paths": write(tmp_path / "more", {"a.txt": b"a\n"}), "split": "test"}
    with raises(ConfigError, owner="LocalText"):
        LocalText(batch_size=1, **only).get_next()


def test_held_out_files_can_be_declared_against_their_names(tmp_path):
    (paths,) = write(tmp_path / "text", {"test_a.txt": b"a", "test_b.txt": b"b", "train.txt": b"c"})
    result = texts_of_splits([paths], heldout_paths=[f"{paths}/train.txt"])
    assert result == {"train": ["a", "b"], "heldout": ["c"], "all": ["a", "b", "c"]}


def test_states_differ_if_documents_begin_elsewhere(tmp_path):
    states = []
    for texts in (["ab", "c"], ["a", "bc"]):
        paths = write(tmp_path / "text", {"a.jsonl": lines_of(texts)})
        source = LocalText(batch_size=1, paths=paths, text_field="text", split="all")
        states.append(source.get_state())
    with pytest.raises(ConfigError) as caught:
        source.set_state(states[0])
    assert [*caught.value.value] == ["documents_crc32"]


def test_end_of_a_single_text_is_held_out(raises, tmp_path):
    text = b"".join(b"line %d of a play\n" % number for number in range(100))
    paths = write(tmp_path / "text", {"play.txt": text})
    result = {split: one[0].encode() for split, one in texts_of_splits(paths).items()}
    assert result["all"] == text == result["train"] + result["heldout"]
    assert result["heldout"].startswith(b"line 95 ")
    heldout = LocalText(batch_size=1, paths=paths, split="heldout")
    assert heldout.baselines() == {
        "trigram table": trigram_loss([result["train"]], [result["heldout"]])
    }
    (tmp_path / "text" / "play.txt").write_bytes(b"all in one line")
    with raises(ConfigError, owner=f"{tmp_path}/text/play.txt"):
        LocalText(batch_size=1, paths=paths).get_next()
    (tmp_path / "text" / "play.txt").rename(tmp_path / "text" / "play.txt.gz")
    with raises(ConfigError, owner="LocalText", field="text_field", value=None):
        LocalText(batch_size=1, paths=paths).get_next()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"text": 3}', "field 'text' is 3, expected a string."),
        (b'{"txt": "x"}', "no such field: field='text'. Did you mean 'txt'?"),
        (b'{"text": "x', "not a line of JSON (Unterminated string"),
        (b'["x"]', "a JSON list, expected an object."),
        (b'{"text": ' + b"[" * 200_000, "not a line of JSON ("),
    ],
)
def test_invalid_line_of_json_raises_or_is_skipped(tmp_path, line, problem):
    good = b'{"text": "one"}\n'
    folder = tmp_path / "text"
    paths = write(folder, dict.fromkeys(("a.jsonl", "val.jsonl"), good + line + b"\n" + good))
    fields = {"batch_size": 1, "paths": paths, "text_field": "text", "seq_length": 50}
    with pytest.raises(BadRecordError) as caught:
        LocalText(**fields).get_next()
    assert caught.value.owner.endswith(".jsonl, line 2")
    assert caught.value.problem.startswith(problem)
    source = LocalText(on_bad_record="skip", **fields)
    assert source.get_next().weights.sum() == 2 * len("one.")
    assert source.num_skipped == 1


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt"])
@pytest.mark.parametrize("alone", [True, False])
def test_json_lines_without_text_field_raise_with_their_fields(raises, tmp_path, name, alone):
    lines = b'\n{"text": "one", "id": 1}\n{"text": "two", "source": "web"}\n'
    others = {} if alone else {"val.txt": b"plain text\n", "b.txt": b"plain text\n"}
    paths = write(tmp_path / "text", {name: lines, **others})
    fields = {"batch_size": 1, "paths": paths, "seq_length": 64}
    for split in ("train", "heldout", "all"):
        if name not in [file.name for file in LocalText(split=split, **fields)._files(split)]:
            continue
        for source in (LocalText, LocalTextPrompts):
            kept = {key: value for key, value in fields.items() if key != "seq_length"}
            data = {"field": "text_field", "value": None, "choices": ("text", "source")}
            with raises(ConfigError, **data):
                source(split=split, **kept).get_next()
    raw = LocalText(split="all", json_as_text=True, **fields)
    assert '{"text": "one"' in raw.ids_to_strings(raw.get_next().ids, [64])[0]


TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def chat_file(folder, kind, **more):
    """Write a file of two conversations of TURNS."""
    rows = [{"messages": TURNS, **more} for _ in range(2)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if kind == "parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(rows), folder / "a.parquet")
    else:
        (folder / f"a.{kind}").write_bytes(gzip.compress(lines) if kind == "jsonl.gz" else lines)
    return {"batch_size": 1, "paths": [str(folder / f"a.{kind}")], "split": "all"}


@pytest.mark.parametrize(
    ("kind", "text_field"),
    [("jsonl", None), ("jsonl.gz", "messages"), ("parquet", "messages"), ("parquet", "text")],
)
def test_conversations_raise_with_the_way_to_write_them(tmp_path, kind, text_field):
    fields = chat_file(tmp_path, kind, id=1)
    with pytest.raises(ConfigError, match="ChatInput"):
        LocalText(text_field=text_field, **fields).get_next()


def test_text_beside_conversations_is_read(tmp_path):
    fields = chat_file(tmp_path, "jsonl", prompt="words")
    assert LocalText(text_field="prompt", **fields).get_next().weights.sum() == 2 * len("words.")


@pytest.mark.parametrize(
    "text",
    [
        b'{\n  "pretty": "printed"\n}\n',
        b'{"a": 1}\nbut then words\n',
        b"[1, 2]\n[3]\n",
        b"{% template %}\n",
        b"{" * 5000 + b"\n",
        b"words\nand more\n",
    ],
)
def test_text_that_is_no_json_lines_is_read(tmp_path, text):
    paths = write(tmp_path / "text", {"a.txt": text, "b.txt": b"words\n"})
    batch = LocalText(batch_size=1, paths=paths, split="all").get_next()
    assert batch.weights.sum() > 0


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("kind", ["lines", "one line", "text"])
def test_max_bytes_counts_decompressed_text(raises, tmp_path, kind, alone):
    line = json.dumps({"text": "x" * 1000, "n": 0}).encode() + b"\n"
    data = {
        "lines": line * 99 + line.replace(b"xx", b"yy"),
        "one line": json.dumps({"text": "x" * 100_000}).encode(),
        "text": b"x" * 100_000,
    }[kind]
    name = "a.txt.gz" if kind == "text" else "a.jsonl.gz"
    files = {name: gzip.compress(data), **({} if alone else {"b.jsonl": line})}
    paths = write(tmp_path / "text", files)
    fields = {"batch_size": 1, "paths": paths, "split": "all", "text_field": "text"}
    with raises(ConfigError, field="max_bytes", value=50_000):
        LocalText(max_bytes=50_000, on_bad_record="skip", **fields).get_next()
    whole = LocalText(max_bytes=200_000, **fields)
    assert whole._documents.num_predictions.sum() > 99_000


def test_max_bytes_counts_rows_of_parquet(raises, tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for text, count in (("", 9000), ("x" * 1000, 20)):
        parquet.write_table(arrow.table({"text": ["x", *[text] * count]}), tmp_path / "a.parquet")
        assert (tmp_path / "a.parquet").stat().st_size < 6000
        fields = {"batch_size": 1, "paths": [str(tmp_path)], "split": "all", "text_field": "text"}
        with raises(ConfigError, field="max_bytes", value=8000):
            LocalText(max_bytes=8000, **fields).get_next()
        LocalText(max_bytes=30_000, **fields).get_next()
