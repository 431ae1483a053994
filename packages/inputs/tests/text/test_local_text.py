"""Tests of LocalText and LocalTextPrompts."""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import json
import re
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerkit.errors import ConfigError
from layerkit_inputs import LocalText, LocalTextPrompts
from layerkit_inputs.base.bad_records import BadRecordError, UnfitFieldError
from layerkit_inputs.base.batch_specs import spec_of
from layerkit_inputs.testing import laws
from layerkit_inputs.text.byte_vocabulary import BOS_ID, EOS_ID, FIRST_BYTE_ID, VOCAB_SIZE, decode
from layerkit_inputs.text.local_text import _first_bytes
from layerkit_inputs.text.tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer
from layerkit_inputs.text.trigram_baseline import trigram_loss

DOCUMENTS = {
    "a.txt": b"hello\nworld\n",
    "b.txt": b"",
    "val-c.txt": "Grüße, 世界".encode(),
    "dev/d.txt": bytes(range(256)),
    "e.txt": b"x" * 37,
    "f.txt": b"\xff\xfe broken",
}


def write(folder, documents=DOCUMENTS):
    folder.mkdir(exist_ok=True)
    for name, data in documents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return [str(folder)]


@pytest.fixture
def paths(tmp_path):
    return write(tmp_path / "text")


def split_of(paths):
    """Return the documents of each split, by the files that the reader opens."""
    source = LocalText(batch_size=1, paths=paths)
    return {
        split: [file.path.read_bytes() for file in source._files(split)]
        for split in ("train", "heldout")
    }


def events(documents):
    """Return all predictions of documents as pairs (previous id, id)."""
    pairs = []
    for data in documents:
        ids = [BOS_ID, *(byte + FIRST_BYTE_ID for byte in data), EOS_ID]
        pairs += itertools.pairwise(ids)
    return sorted(pairs)


def predictions(batches):
    """Return the predictions of batches that have weight, as sorted pairs (previous id, id)."""
    pairs = []
    for batch in batches:
        counts = batch.weights > 0
        pairs += zip(batch.ids[counts].tolist(), batch.labels[counts].tolist(), strict=True)
    return sorted(pairs)


def epoch(source):
    return list(source.eval_batches())


def texts_of_splits(paths, **fields):
    """Return the documents of each split as text."""
    found = {}
    for split in ("train", "heldout", "all"):
        source = LocalTextPrompts(
            batch_size=1, paths=paths, split=split, prompt_length=10_000, **fields
        )
        found[split] = [
            source.ids_to_strings(batch.ids, batch.prompt_lengths)[0] for batch in epoch(source)
        ]
    return found


@pytest.mark.parametrize("seq_length", [1, 5, 8, 64, 1000])
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_an_epoch_predicts_every_byte_and_every_end_once(paths, seq_length, split):
    batches = epoch(LocalText(batch_size=3, paths=paths, split=split, seq_length=seq_length))
    documents = split_of(paths)[split]
    assert predictions(batches) == events(documents)
    assert sum(batch.weights.sum() for batch in batches) == sum(len(d) + 1 for d in documents)


def test_an_epoch_of_training_predicts_every_byte_once_too(paths):
    source = LocalText(batch_size=1, paths=paths, seq_length=8, is_training=True)
    documents = split_of(paths)["train"]
    num_rows = -(-sum(len(d) + 1 for d in documents) // 8)
    for _ in range(2):
        assert predictions(laws.take(source, num_rows)) == events(documents)


def test_batch_has_the_documented_fields_shapes_and_dtypes(paths):
    source = LocalText(batch_size=2, paths=paths, seq_length=16)
    batch = source.get_next()
    for field in ("ids", "labels", "segment_ids", "segment_pos"):
        assert batch[field].shape == (2, 16) and batch[field].dtype == np.int32
    for field in ("weights", "paddings"):
        assert batch[field].shape == (2, 16) and batch[field].dtype == np.float32
    assert batch.provenance.tolist() == [0, 1] and batch.eval_sample_weights.tolist() == [1, 1]
    training = LocalText(batch_size=2, paths=paths, seq_length=16, is_training=True).get_next()
    assert set(batch) - set(training) == {"provenance", "eval_sample_weights"}


def test_segments_begin_with_bos_or_at_the_left_edge_and_context_is_true_text(paths):
    for batch in epoch(LocalText(batch_size=4, paths=paths, seq_length=7)):
        for ids, labels, segments, positions, paddings in zip(
            batch.ids,
            batch.labels,
            batch.segment_ids,
            batch.segment_pos,
            batch.paddings,
            strict=True,
        ):
            np.testing.assert_array_equal(paddings, segments == 0)
            for column in np.flatnonzero(segments):
                begins = column == 0 or segments[column] != segments[column - 1]
                assert (positions[column] == 0) == begins
                if begins:
                    assert column == 0 or ids[column] == BOS_ID
                else:
                    assert ids[column] == labels[column - 1]
            assert not ids[segments == 0].any() and not labels[segments == 0].any()


def test_row_cut_inside_a_document_begins_with_the_preceding_byte(tmp_path):
    paths = write(tmp_path / "text", {"a.txt": b"abcdefg", "val.txt": b"abcdefg"})
    batch = LocalText(batch_size=2, paths=paths, seq_length=5).get_next()
    first, second = batch.transform(lambda x: x[0]), batch.transform(lambda x: x[1])
    a = FIRST_BYTE_ID + ord("a")
    assert first.ids.tolist() == [BOS_ID, a, a + 1, a + 2, a + 3]
    assert first.labels.tolist() == [a, a + 1, a + 2, a + 3, a + 4]
    assert second.ids.tolist() == [a + 4, a + 5, a + 6, 0, 0]
    assert second.labels.tolist() == [a + 5, a + 6, EOS_ID, 0, 0]
    assert second.segment_pos.tolist() == [0, 1, 2, 0, 0]
    assert second.weights.tolist() == [1, 1, 1, 0, 0]


@settings(max_examples=15, deadline=None)
@given(
    contents=st.lists(st.binary(min_size=1, max_size=40), min_size=2, max_size=6),
    seq_length=st.integers(1, 20),
    num_hosts=st.sampled_from([1, 2, 3, 4, 8]),
)
def test_any_text_on_any_hosts_is_read_once(tmp_path_factory, contents, seq_length, num_hosts):
    documents = {f"{number}.bin": data for number, data in enumerate(contents)}
    documents["val.bin"] = documents.pop("0.bin")
    paths = write(tmp_path_factory.mktemp("any"), documents)
    fields = {"batch_size": 24 // num_hosts, "paths": paths, "seq_length": seq_length}
    batches = []
    for host in range(num_hosts):
        batches += epoch(LocalText(infeed_host_index=host, num_infeed_hosts=num_hosts, **fields))
    assert predictions(batches) == events(split_of(paths)["train"])


def test_state_of_another_text_or_length_raises(raises, tmp_path):
    fields = {"batch_size": 2, "seq_length": 4, "is_training": True}
    source = LocalText(paths=write(tmp_path / "one"), **fields)
    state = source.get_state()
    elsewhere = LocalText(paths=write(tmp_path / "two"), **fields)
    elsewhere.set_state(state)
    with raises(ConfigError, field="state.data", value={"num_rows": 16, "seq_length": 4}):
        LocalText(paths=write(tmp_path / "one"), **{**fields, "seq_length": 8}).set_state(state)
    altered = {name: data.replace(b"x", b"y") for name, data in DOCUMENTS.items()}
    with pytest.raises(ConfigError) as caught:
        LocalText(paths=write(tmp_path / "three", altered), **fields).set_state(state)
    assert [*caught.value.value] == ["documents_crc32"]


def test_nothing_is_read_before_it_is_needed(tmp_path):
    source = LocalText(batch_size=1, paths=[str(tmp_path / "later")])
    write(tmp_path / "later")
    assert source.get_next().ids[0, 0] == BOS_ID


def test_ids_become_text_again(paths):
    source = LocalText(batch_size=1, paths=paths, seq_length=1000)
    batch = source.get_next()
    text = b"".join(split_of(paths)["train"]).decode("utf-8", "replace")
    length = int(batch.weights.sum())
    assert source.ids_to_strings(batch.labels, [length]) == [text]
    assert source.ids_to_strings(batch.labels, [3]) == [text[:3]]
    assert decode(np.array([BOS_ID, ord("h") + 3, 0, EOS_ID, VOCAB_SIZE, 0xFF + 3])) == "h\ufffd"


def test_the_baseline_is_the_trigram_table_of_the_training_files(paths):
    splits = split_of(paths)
    expected = {"trigram table": trigram_loss(splits["train"], splits["heldout"])}
    for max_bytes in (1, 1 << 20):
        heldout = LocalText(batch_size=1, paths=paths, split="heldout", max_bytes=max_bytes)
        assert heldout.baselines() == expected
    assert LocalText(batch_size=1, paths=paths).baselines() == {}


def test_the_default_text_is_real_and_large_and_its_splits_are_apart():
    train = LocalText(batch_size=8, is_training=True)
    heldout = LocalText(batch_size=8, split="heldout")
    sizes = [int(source._corpus().ends[-1]) for source in (train, heldout)]
    assert sizes[0] > 2_000_000 and 20_000 < sizes[1] < sizes[0] / 5
    names = [{piece.file.name for piece in train._pieces(split)} for split in ("train", "heldout")]
    assert not names[0] & names[1] and "pydoc_data/topics.py" in names[0] | names[1]
    text = "".join(train.ids_to_strings(train.get_next().ids, [256] * 8))
    assert text.isprintable() or "\n" in text


def test_prompts_are_the_beginnings_of_held_out_documents(tmp_path):
    paths = write(
        tmp_path / "text", {f"val{number}.txt": b"%d" % number * number for number in range(9)}
    )
    source = LocalTextPrompts(batch_size=4, paths=paths, prompt_length=4)
    documents = [file.path.read_bytes() for file in source._files("heldout")]
    rows = []
    for batch in epoch(source):
        assert batch.ids.shape == (4, 4) and batch.ids.dtype == np.int32
        for ids, length, paddings, row in zip(
            batch.ids, batch.prompt_lengths, batch.paddings, batch.provenance, strict=True
        ):
            assert paddings.tolist() == [0.0] * length + [1.0] * (4 - length)
            if row < 0:
                assert length == 0 and not ids.any()
                continue
            start = documents[row][:3]
            assert ids.tolist() == [BOS_ID, *(b + FIRST_BYTE_ID for b in start)] + [0] * (
                3 - len(start)
            )
            rows.append(row)
    assert rows == list(range(len(documents)))


def test_num_prompts_limits_the_prompts(paths):
    source = LocalTextPrompts(batch_size=2, paths=paths, split="train", num_prompts=3)
    assert [batch.provenance.tolist() for batch in epoch(source)] == [[0, 1], [2, -1]]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("split", "held_out"),
        ("heldout_fraction", 1.0),
        ("paths", "notes"),
        ("paths", []),
        ("seq_length", 0),
        ("on_bad_record", "skp"),
    ],
)
def test_wrong_fields_raise_when_built(raises, field, value):
    with raises(ConfigError, owner="LocalText", field=field, value=value):
        LocalText(batch_size=1, **{field: value})


def test_files_larger_than_max_bytes_raise_before_reading(raises, paths):
    source = LocalText(batch_size=1, paths=paths, max_bytes=10)
    total = sum(map(len, split_of(paths)["train"]))
    remedies = {"max_bytes": total}
    with raises(UnfitFieldError, field="max_bytes", value=10, remedies=remedies):
        source.get_next()
    LocalText(batch_size=1, paths=paths, max_bytes=total).get_next()


def test_the_baseline_counts_the_first_bytes_of_the_training_text(paths, monkeypatch):
    train = split_of(paths)["train"]
    total = sum(map(len, train)) - 3
    monkeypatch.setattr("layerkit_inputs.text.local_text._TABLE_BYTES", total)
    source = LocalText(batch_size=1, paths=paths, split="heldout")
    kept = list(_first_bytes(source._pieces("train"), total))
    assert b"".join(kept) == b"".join(train)[:total]
    heldout = split_of(paths)["heldout"]
    assert source.baselines() == {"trigram table": trigram_loss(kept, heldout)}
    assert list(_first_bytes(source._pieces("train"), 0)) == []


# With a tokenizer, and with a document a line.


TEXTS = {f"{number}.txt": b"line %d of some text\n" % number * number for number in range(9)}
TEXTS["heldout.txt"] = b"some more of the text\n"


def test_an_epoch_with_a_tokenizer_predicts_every_token_and_every_end_once(
    tmp_path, sentencepiece_file
):
    paths = write(tmp_path / "text", TEXTS)
    tokenizer = SentencePieceTokenizer.HParams.config(path=sentencepiece_file)
    config = LocalText.HParams.config(batch_size=3, paths=paths, seq_length=8, tokenizer=tokenizer)
    source, tokenizer = config.Instantiate(), tokenizer.Instantiate()
    expected = []
    for data in split_of(paths)["train"]:
        expected += itertools.pairwise([0, *tokenizer.encode(data).tolist(), 1])
    assert predictions(epoch(source)) == sorted(expected)
    assert source.token_unit == "token" and source.baselines() == {}
    assert LocalText(batch_size=1).token_unit == "byte"
    heldout = config.clone(split="heldout").Instantiate()
    assert heldout.baselines() == {}


def test_ids_of_a_tokenizer_become_text_again(tmp_path, tokenizer_json):
    paths = write(tmp_path / "text", TEXTS)
    end = "<|endoftext|>"
    tokenizer = HuggingFaceTokenizer(
        path=tokenizer_json, bos_token=end, eos_token=end, add_bos_token=True
    )
    source = LocalText(batch_size=1, paths=paths, seq_length=4000, tokenizer=tokenizer)
    batch = source.get_next()
    text = source.ids_to_strings(batch.labels, [int(batch.weights.sum())])
    assert text == [b"".join(split_of(paths)["train"]).decode()]
    prompts = LocalTextPrompts(batch_size=1, paths=paths, prompt_length=5, tokenizer=tokenizer)
    batch = prompts.get_next()
    start = split_of(paths)["heldout"][0]
    assert batch.ids[0, : batch.prompt_lengths[0]].tolist() == [
        tokenizer.start_id,
        *tokenizer.encode(start)[:4].tolist(),
    ]


def test_state_of_another_tokenizer_raises(tmp_path, sentencepiece_file, tokenizer_json):
    paths = write(tmp_path / "text", TEXTS)
    fields = {"batch_size": 2, "seq_length": 4, "paths": paths, "is_training": True}
    one = LocalText(tokenizer=SentencePieceTokenizer(path=sentencepiece_file), **fields)
    other = LocalText(tokenizer=HuggingFaceTokenizer(path=tokenizer_json), **fields)
    for source in (other, LocalText(**fields)):
        with pytest.raises(ConfigError) as caught:
            source.set_state(one.get_state())
        assert re.fullmatch("[0-9a-f]{64}", caught.value.value["tokenizer"])


def test_invalid_utf_8_raises_with_file_and_byte_or_is_skipped(
    raises, tmp_path, sentencepiece_file
):
    tokenizer = SentencePieceTokenizer(path=sentencepiece_file)
    folder = tmp_path / "text"
    paths = write(folder, {"a.txt": b"abc\xff", "val.txt": b"fine", "c.txt": b"fine"})
    fields = {"batch_size": 1, "paths": paths, "tokenizer": tokenizer, "seq_length": 50}
    with raises(BadRecordError, owner=f"{folder}/a.txt", remedies={"on_bad_record": "skip"}):
        LocalText(**fields).get_next()
    # The same bytes are fine where bytes are the tokens.
    LocalText(batch_size=1, paths=paths).get_next()
    source = LocalText(on_bad_record="skip", **fields)
    batch = source.get_next()
    assert source.ids_to_strings(batch.labels, [50]) == ["fine"]
    assert source.num_skipped == 1


def test_split_without_readable_documents_raises(raises, tmp_path, sentencepiece_file):
    paths = write(tmp_path / "text", {"a.txt": b"\xff", "b.txt": b"\xfe"})
    tokenizer = SentencePieceTokenizer(path=sentencepiece_file)
    source = LocalText(batch_size=1, paths=paths, tokenizer=tokenizer, on_bad_record="skip")
    with raises(ConfigError, owner="LocalText"):
        source.get_next()


def test_lines_of_json_are_documents(tmp_path):
    lines = {
        "a.jsonl": b'{"text": "one"}\n{"text": "two", "more": 1}\n',
        "b.jsonl": b'{"text": "three"}\n\n{"text": ""}\n',
    }
    found = texts_of_splits(write(tmp_path / "text", lines), text_field="text")
    assert sorted(found["train"] + found["heldout"]) == ["", "one", "three", "two"]


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
    found = texts_of_splits(write(tmp_path / "text", files), text_field="text")
    train, heldout = (other, one) if "valid" in one else (one, other)
    assert found["train"] == texts[train] and found["heldout"] == texts[heldout]
    assert sorted(found["all"]) == sorted(texts[one] + texts[other])


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
    found = texts_of_splits(paths, text_field="text", heldout_fraction=0.1)
    hashes = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts]
    is_held_out = [int.from_bytes(digest, "big") < 0.1 * 2**64 for digest in hashes]
    assert set(found["heldout"]) == {t for t, held in zip(texts, is_held_out, strict=True) if held}
    assert sorted(found["train"] + found["heldout"]) == sorted(texts)
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
    with raises(ConfigError, field="bytes of text", value=0):
        LocalText(batch_size=1, **empty).get_next()
    only = {"paths": write(tmp_path / "more", {"a.txt": b"a\n"}), "split": "test"}
    with raises(ConfigError, owner="LocalText"):
        LocalText(batch_size=1, **only).get_next()


def test_held_out_files_can_be_declared_against_their_names(tmp_path):
    (paths,) = write(tmp_path / "text", {"test_a.txt": b"a", "test_b.txt": b"b", "train.txt": b"c"})
    found = texts_of_splits([paths], heldout_paths=[f"{paths}/train.txt"])
    assert found == {"train": ["a", "b"], "heldout": ["c"], "all": ["a", "b", "c"]}


def test_states_differ_if_documents_begin_elsewhere(tmp_path):
    states = []
    for texts in (["ab", "c"], ["a", "bc"]):
        paths = write(tmp_path / "text", {"a.jsonl": lines_of(texts)})
        source = LocalText(batch_size=1, paths=paths, text_field="text", split="all")
        states.append(source.get_state())
    with pytest.raises(ConfigError) as caught:
        source.set_state(states[0])
    assert [*caught.value.value] == ["documents_crc32"]


def test_the_report_counts_the_documents_and_bytes_of_a_split(tmp_path):
    paths = write(tmp_path / "text", {"train.txt": b"abc", "a.txt": b"de", "val.txt": b"f"})
    for split, counts in (
        ("train", "2 files, 2 documents, 5"),
        ("heldout", "1 file, 1 document, 1"),
    ):
        (line,) = LocalText(batch_size=1, paths=paths, split=split).describe_data()
        assert line.startswith(f"LocalText, {paths[0]}: {counts} byte")
        assert f"split by the names of files: {'a.txt' if split == 'train' else 'val.txt'}" in line


def test_end_of_a_single_text_is_held_out(raises, tmp_path):
    text = b"".join(b"line %d of a play\n" % number for number in range(100))
    paths = write(tmp_path / "text", {"play.txt": text})
    found = {split: one[0].encode() for split, one in texts_of_splits(paths).items()}
    assert found["all"] == text == found["train"] + found["heldout"]
    assert found["heldout"].startswith(b"line 95 ")
    heldout = LocalText(batch_size=1, paths=paths, split="heldout")
    assert heldout.baselines() == {
        "trigram table": trigram_loss([found["train"]], [found["heldout"]])
    }
    (tmp_path / "text" / "play.txt").write_bytes(b"all in one line")
    with raises(ConfigError, owner=f"{tmp_path}/text/play.txt"):
        LocalText(batch_size=1, paths=paths).get_next()
    (tmp_path / "text" / "play.txt").rename(tmp_path / "text" / "play.txt.gz")
    with raises(ConfigError, owner="LocalText", field="text_field", value=None):
        LocalText(batch_size=1, paths=paths).get_next()


def test_problems_of_a_single_file_are_reported_for_both_splits(raises, tmp_path):
    paths = write(tmp_path / "text", {"all.jsonl": b'{"txt": "one"}\n{"txt": "two"}\n'})
    for split in ("train", "heldout"):
        fields = {"split": split, "text_field": "text", "on_bad_record": "skip"}
        with raises(ConfigError, field="number of skipped documents", value=2):
            LocalText(batch_size=1, paths=paths, **fields).get_next()


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


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_unknown_text_field_raises_with_the_fields_of_the_file(raises, tmp_path, name):
    lines = b'{"text": "one", "id": 1}\n{"text": "two", "id": 2}\n'
    data = gzip.compress(lines) if name.endswith(".gz") else lines
    paths = write(tmp_path / "text", {name: data, "b" + name: data})
    data = {"field": "text_field", "value": "txt", "choices": ("text",)}
    with raises(UnfitFieldError, **data, remedies={"text_field": "text"}):
        LocalText(batch_size=1, paths=paths, text_field="txt").get_next()


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_local_text_with_a_tokenizer_obeys(law, tmp_path, sentencepiece_file):
    fields = {"batch_size": 8, "paths": write(tmp_path / "text", TEXTS), "seq_length": 6}
    fields["tokenizer"] = SentencePieceTokenizer(path=sentencepiece_file)
    law(lambda **more: LocalText(**{**fields, **more}))


def test_blank_batch_needs_no_files(paths):
    config = LocalText.HParams.config(paths=["nowhere"], seq_length=7, is_training=True)
    batch = LocalText(batch_size=3, paths=paths, seq_length=7, is_training=True).get_next()
    assert spec_of(LocalText.blank_batch(config, 3)) == spec_of(batch)


# What is text, and how much of it.


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
            remedies = {"text_field": "text", "json_as_text": True}
            with raises(UnfitFieldError, **data, remedies=remedies):
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
    [
        ("jsonl", None),
        ("jsonl", "messages"),
        ("jsonl.gz", "messages"),
        ("parquet", "messages"),
        ("parquet", "text"),
    ],
)
def test_conversations_raise_without_advice_to_skip_them(raises, tmp_path, kind, text_field):
    fields = chat_file(tmp_path, kind, id=1)
    with raises(BadRecordError if kind == "parquet" else UnfitFieldError, remedies={}):
        LocalText(text_field=text_field, **fields).get_next()


@pytest.mark.parametrize("text_field", ["text", "messages"])
def test_conversations_after_an_empty_one_or_in_an_array_raise_alike(raises, tmp_path, text_field):
    rows = [{"messages": []}, {"messages": TURNS}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    for name, text in (("a.jsonl", lines), ("b.json", json.dumps(rows, indent=1))):
        (tmp_path / name).write_text(text)
        fields = {"batch_size": 1, "paths": [str(tmp_path / name)], "split": "all"}
        with raises(UnfitFieldError, field="text_field", value=text_field, remedies={}):
            LocalText(text_field=text_field, **fields).get_next()


def test_conversations_beside_texts_are_an_error_that_lists_the_texts(raises, tmp_path):
    fields = chat_file(tmp_path, "jsonl", prompt="words")
    for text_field in (None, "txt"):
        data = {"value": text_field, "choices": ("prompt",), "remedies": {}}
        with raises(UnfitFieldError, **data):
            LocalText(text_field=text_field, **fields).get_next()
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


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.gz", "a.txt.zst"])
def test_compressed_files_without_text_field_raise(raises, tmp_path, name):
    paths = write(tmp_path / "text", {name: b"\x00\x01\n" * 99, "b.txt": b"words\n"})
    with raises(ConfigError, field="text_field", value=None):
        LocalText(batch_size=1, paths=paths, split="all").get_next()


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
    with raises(UnfitFieldError, field="max_bytes", value=50_000):
        LocalText(max_bytes=50_000, on_bad_record="skip", **fields).get_next()
    whole = LocalText(max_bytes=200_000, **fields)
    assert whole._corpus().num_predictions.sum() > 99_000


def test_max_bytes_counts_rows_of_parquet_before_reading(raises, tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for text, count in (("", 9000), ("x" * 1000, 20)):
        parquet.write_table(arrow.table({"text": ["x", *[text] * count]}), tmp_path / "a.parquet")
        assert (tmp_path / "a.parquet").stat().st_size < 6000
        fields = {"batch_size": 1, "paths": [str(tmp_path)], "split": "all", "text_field": "text"}
        with raises(UnfitFieldError, field="max_bytes", value=8000):
            LocalText(max_bytes=8000, **fields).get_next()
        LocalText(max_bytes=30_000, **fields).get_next()


@pytest.mark.parametrize("text_field", [None, "text"])
def test_reading_takes_little_more_than_the_ids(tmp_path, text_field):
    words = "".join(f"line {number} of a long text\n" for number in range(400))
    if text_field is None:
        data = (words * 512).encode()
    else:
        data = "".join(json.dumps({"text": f"{n} {words}"}) + "\n" for n in range(512)).encode()
    name = "a.jsonl" if text_field else "a.txt"
    paths = write(tmp_path / "text", {name: data})
    source = LocalText(batch_size=1, paths=paths, text_field=text_field)
    warm = write(tmp_path / "warm", {name: data[:100_000] + b"\n"})
    LocalText(batch_size=1, paths=warm, json_as_text=True).get_next()  # imports
    tracemalloc.start()
    try:
        corpus = source._corpus()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert corpus.num_predictions.sum() > 0.9 * 512 * len(words)
    assert peak < 2.0 * len(data) + (10 << 20)  # 2 bytes an id of 95%, 1/8 of room, a part


def test_ids_and_states_do_not_depend_on_how_a_file_is_read(tmp_path):
    data = np.random.default_rng(0).integers(0, 256, (5 << 20) + 7, np.uint8).tobytes()
    paths = write(tmp_path / "text", {"a.bin": data})
    source = LocalText(batch_size=1, paths=paths, split="all")
    expected = [BOS_ID, *(np.frombuffer(data, np.uint8).astype(int) + FIRST_BYTE_ID), EOS_ID]
    np.testing.assert_array_equal(source._corpus().ids[0:None], expected)
    assert source._corpus().ids[0:None].dtype == np.uint16
    checksum = source.get_state()["position"]["data"]["documents_crc32"]
    ends = np.array([len(data) + 1], "<i8").tobytes()
    assert checksum == zlib.crc32(b"a.bin" + data + ends)
