"""Tests of LocalText and LocalTextPrompts."""

from __future__ import annotations

import itertools
import json
import re
import tracemalloc
import zlib

import numpy as np
import pytest

from layerkit.errors import ConfigError
from layerkit_inputs import LocalText, LocalTextPrompts
from layerkit_inputs.base.errors import BadRecordError
from layerkit_inputs.base.host_batches import spec_of
from layerkit_inputs.testing import laws
from layerkit_inputs.text.tokenizers import (
    BOS_ID,
    EOS_ID,
    FIRST_BYTE_ID,
    VOCAB_SIZE,
    ByteTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
)
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


@pytest.mark.parametrize("seq_length", [1, 5, 8, 64, 1000])
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_an_epoch_predicts_every_byte_and_every_end_once(paths, seq_length, split):
    batches = epoch(LocalText(batch_size=3, paths=paths, split=split, seq_length=seq_length))
    documents = split_of(paths)[split]
    assert predictions(batches) == events(documents)
    assert sum(batch.weights.sum() for batch in batches) == sum(len(d) + 1 for d in documents)


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


def test_ids_become_text_again(paths):
    source = LocalText(batch_size=1, paths=paths, seq_length=1000)
    batch = source.get_next()
    text = b"".join(split_of(paths)["train"]).decode("utf-8", "replace")
    length = int(batch.weights.sum())
    assert source.ids_to_strings(batch.labels, [length]) == [text]
    assert source.ids_to_strings(batch.labels, [3]) == [text[:3]]
    assert (
        ByteTokenizer().decode(np.array([BOS_ID, ord("h") + 3, 0, EOS_ID, VOCAB_SIZE, 0xFF + 3]))
        == "h\ufffd"
    )


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
    sizes = [int(source._documents.ends[-1]) for source in (train, heldout)]
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


def test_files_larger_than_max_bytes_raise_before_reading(raises, paths):
    source = LocalText(batch_size=1, paths=paths, max_bytes=10)
    total = sum(map(len, split_of(paths)["train"]))
    with raises(ConfigError, field="max_bytes", value=10):
        source.get_next()
    LocalText(batch_size=1, paths=paths, max_bytes=total).get_next()


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
    with raises(BadRecordError, owner=f"{folder}/a.txt"):
        LocalText(**fields).get_next()
    # The same bytes are fine where bytes are the tokens.
    LocalText(batch_size=1, paths=paths).get_next()
    source = LocalText(on_bad_record="skip", **fields)
    batch = source.get_next()
    assert source.ids_to_strings(batch.labels, [50]) == ["fine"]
    assert source.num_skipped == 1


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_local_text_with_a_tokenizer_obeys(law, tmp_path, sentencepiece_file):
    fields = {"batch_size": 8, "paths": write(tmp_path / "text", TEXTS), "seq_length": 6}
    fields["tokenizer"] = SentencePieceTokenizer(path=sentencepiece_file)
    law(lambda **more: LocalText(**{**fields, **more}))


def test_blank_batch_needs_no_files(paths):
    config = LocalText.HParams.config(paths=["nowhere"], seq_length=7, is_training=True)
    batch = LocalText(batch_size=3, paths=paths, seq_length=7, is_training=True).get_next()
    assert spec_of(LocalText.blank_batch(config, 3)) == spec_of(batch)


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
        corpus = source._documents
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
    np.testing.assert_array_equal(source._documents.ids[0:None], expected)
    assert source._documents.ids[0:None].dtype == np.uint16
    checksum = source.get_state()["position"]["data"]["documents_crc32"]
    ends = np.array([len(data) + 1], "<i8").tobytes()
    assert checksum == zlib.crc32(b"a.bin" + data + ends)
