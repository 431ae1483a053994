"""Tests of TokenRecords: equality with LocalText, resumption and damaged files."""

from __future__ import annotations

import json
import re
import shutil
import tracemalloc

import numpy as np
import pytest

from layerkit.errors import ConfigError
from layerkit_inputs import LocalText
from layerkit_inputs.base.errors import BadRecordError, MissingFileError
from layerkit_inputs.base.host_batches import spec_of
from layerkit_inputs.mixing.mixture import Mixture
from layerkit_inputs.testing import laws
from layerkit_inputs.text.token_records import TokenRecords
from layerkit_inputs.text.tokenizers import ByteTokenizer
from layerkit_inputs.tools.build_token_records import build_token_records

pytest.importorskip("array_record")

DOCUMENTS = [
    *(f"Document {number}: {'word ' * (number * 7 % 23)}end." for number in range(40)),
    "",
    "a long one, " * 60,
]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for number, text in enumerate(DOCUMENTS):
        (folder / f"{number:03d}.txt").write_text(text)
    return folder


@pytest.fixture(scope="module")
def train_files(texts):
    """Return the training files of LocalText."""
    source = LocalText(batch_size=1, paths=[str(texts)])
    return [piece.file.path for piece in source._pieces("train")]


@pytest.fixture(scope="module")
def folder(train_files, tmp_path_factory):
    """Build records of small blocks in several shards, so that rows span blocks."""
    output = tmp_path_factory.mktemp("built") / "tokens"
    paths = [str(path) for path in train_files]
    build_token_records(paths, output, tokenizer="bytes", num_shards=3, block_length=32)
    return output


@pytest.fixture
def copied(folder, tmp_path):
    """Copy the records, so that a test can damage them."""
    for path in folder.rglob("*.*"):
        target = tmp_path / "copy" / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    return tmp_path / "copy"


def reader(folder, **fields):
    return TokenRecords(**{"batch_size": 24, "path": str(folder), "seq_length": 24, **fields})


def documents_of(train_files):
    """Return the ids of each document."""
    return [[1, *(byte + 3 for byte in path.read_bytes()), 2] for path in train_files]


@pytest.mark.parametrize("seq_length", [3, 31, 1000])
def test_rows_are_those_of_local_text(folder, texts, seq_length):
    expected = LocalText(batch_size=5, paths=[str(texts)], seq_length=seq_length)
    source = reader(folder, batch_size=5, seq_length=seq_length)
    assert len(source._store.split.shards) == 3
    laws.assert_same_batches(list(source.eval_batches()), list(expected.eval_batches()))


def test_first_fit_keeps_documents_whole_and_loses_nothing(folder, train_files):
    source = reader(folder, batch_size=4, seq_length=200, packing="first_fit")
    result = []
    for batch in source.eval_batches():
        for row in range(4):
            for segment in range(1, batch.segment_ids[row].max() + 1):
                here = batch.segment_ids[row] == segment
                positions = np.flatnonzero(here)
                assert (np.diff(positions) == 1).all()
                assert batch.segment_pos[row, here].tolist() == list(range(len(positions)))
                result.append([*batch.ids[row, here].tolist(), int(batch.labels[row, here][-1])])
        padded = batch.segment_ids == 0
        assert (batch.weights == ~padded).all() and (batch.paddings == padded).all()
        assert not batch.ids[padded].any() and not batch.labels[padded].any()
    expected = []
    for ids in documents_of(train_files):
        expected += [ids[at : at + 201] for at in range(0, len(ids) - 1, 200)]
    assert sorted(result) == sorted(expected)
    assert source._num_rows() < len(expected)


@pytest.mark.parametrize(
    "fields",
    [
        {"seq_length": 64},
        {"packing": "first_fit", "seq_length": 100, "batch_padding_size": 1},
        {"is_training": True, "input_random_seed": 3},
        {"is_training": True, "packing": "first_fit", "batch_size": 6},
        {"eval_loop_num_batches": 2, "shuffle": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_reader_obeys_the_laws_of_inputs(law, fields, folder):
    law(lambda **more: reader(folder, **{"batch_size": 4, **fields, **more}))


def test_memory_of_a_batch_does_not_grow_with_the_data(tmp_path):
    text = tmp_path / "large.txt"
    text.write_bytes(bytes(range(256)) * (1 << 13))
    build_token_records([str(text)], tmp_path / "tokens", tokenizer="bytes")
    source = reader(tmp_path / "tokens", batch_size=4, seq_length=64, is_training=True)
    num_rows = source._num_rows()
    assert num_rows == (1 << 15) + 1
    tracemalloc.start()
    rows = np.array([0, num_rows // 2, num_rows - 2, 7])
    batch = source._read_rows(rows)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    np.testing.assert_array_equal(
        batch.labels[:, :5], (rows[:, None] * 64 + np.arange(5)) % 256 + 3
    )
    assert most < 1 << 19 < 2 * text.stat().st_size


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 0xFF
    path.write_bytes(content)


def shard_of(copied, number=1):
    return copied / "train" / f"tokens-{number:05d}.array_record"


def damage_a_block(copied):
    """Damage the second shard and return the number of the damaged record."""
    flip(shard_of(copied), 1000)
    with pytest.raises(BadRecordError) as caught:
        list(reader(copied).eval_batches())
    prefix = re.escape(f"{shard_of(copied)}, record ")
    return int(re.match(prefix + r"(\d+): the record is damaged ", str(caught.value))[1])


def test_damaged_block_raises_or_its_rows_are_counted(copied, folder):
    record = damage_a_block(copied)
    source = reader(copied, on_bad_record="skip", batch_size=8)
    result, whole = list(source.eval_batches()), list(reader(folder, batch_size=8).eval_batches())
    assert source.num_skipped >= 1
    assert f"tokens-00001.array_record, record {record}:" in source._bad.first[0]
    skipped = 0
    for one, other in zip(result, whole, strict=True):
        for row in range(8):
            if one.provenance[row] == other.provenance[row]:
                for name in one:
                    np.testing.assert_array_equal(one[name][row], other[name][row])
            else:
                skipped += 1
                assert one.provenance[row] == -1 and one.eval_sample_weights[row] == 0
                assert not one.weights[row].any() and one.paddings[row].all()
                assert not one.ids[row].any() and not one.segment_ids[row].any()
    assert 1 <= skipped <= 3
    # While training, such rows weigh nothing, and the order of the others does not change.
    training = reader(copied, on_bad_record="skip", is_training=True, batch_size=8)
    laws.take(training, 20)
    assert training.num_skipped >= 1


def change_about(copied, old, new):
    path = copied / "about.json"
    path.write_text(path.read_text().replace(old, new))


DAMAGES = {
    "damaged index": lambda copied: flip(copied / INDEX, 9),
    "truncated index": lambda copied: truncate(copied / INDEX, 3),
    "missing index": lambda copied: (copied / INDEX).unlink(),
    "truncated shard": lambda copied: truncate(shard_of(copied), 1000),
    "missing shard": lambda copied: shard_of(copied).unlink(),
    "shard of another build": lambda copied: shutil.copy(shard_of(copied, 2), shard_of(copied)),
    "damaged about.json": lambda copied: truncate(copied / "about.json", 30),
    "renamed field": lambda copied: change_about(copied, "num_ids", "num_idx"),
    "other version": lambda copied: change_about(copied, '"version": 1', '"version": 2'),
    "missing about.json": lambda copied: (copied / "about.json").unlink(),
}
INDEX = "train/document_ends.int64"


def truncate(path, num_bytes):
    path.write_bytes(path.read_bytes()[:-num_bytes])


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("policy", ["refuse", "skip"])
def test_damaged_or_missing_files_raise(raises, copied, damage, policy):
    DAMAGES[damage](copied)
    with raises(MissingFileError if damage == "missing about.json" else BadRecordError):
        list(reader(copied, on_bad_record=policy).eval_batches())


def test_wrong_fields_raise(raises, copied):
    class OtherTokenizer(ByteTokenizer):
        def fingerprint(self):
            return "other"

    wrong = {"path": None, "seq_length": 0, "packing": "streams", "on_bad_record": "drop"}
    for field, value in wrong.items():
        with raises(ConfigError, owner="TokenRecords", field=field, value=value):
            reader(copied, **{field: value})
    for fields, field, value in (
        ({"split": "trian"}, "split", "trian"),
        ({"tokenizer": OtherTokenizer()}, "fingerprint of tokenizer", "other"),
        ({"vocab_size": 258}, "vocab_size", 258),
    ):
        with raises(ConfigError, field=field, value=value):
            reader(copied, **fields).get_next()
    reader(copied, vocab_size=259).get_next()


def mixed(*folders, **fields):
    config = TokenRecords.HParams.config(seq_length=24, **fields)
    components = {
        name: config.clone(path=str(path)) for name, path in zip("ab", folders, strict=True)
    }
    return Mixture(batch_size=8, is_training=True, components=components)


def test_rows_of_a_damaged_block_weigh_nothing_in_a_mixture(copied, folder):
    damage_a_block(copied)
    source = mixed(copied, folder, on_bad_record="skip")
    batches = laws.take(source, 40)
    assert source.num_skipped >= 1
    is_blank = np.concatenate([(batch.ids == 0).all(axis=1) for batch in batches])
    weighs_nothing = np.concatenate([~batch.weights.any(axis=1) for batch in batches])
    assert is_blank.any()
    np.testing.assert_array_equal(weighs_nothing, is_blank)


def test_mixture_raises_if_records_have_different_tokenizers(raises, folder, copied):
    mixed(folder, copied).get_next()
    about = json.loads((copied / "about.json").read_text())
    for number, fingerprint in enumerate(("one", "other")):
        shutil.copytree(copied, copied.parent / str(number))
        about["tokenizer"]["fingerprint"] = fingerprint
        (copied.parent / str(number) / "about.json").write_text(json.dumps(about))
    with raises(ConfigError, field="components['b'] tokenizer", value="other"):
        mixed(copied.parent / "0", copied.parent / "1")


def test_state_fits_the_same_tokens_in_another_folder(folder, copied, texts, tmp_path):
    source = reader(folder)
    source.get_next()
    reader(copied).set_state(source.get_state())
    build_token_records([str(texts)], tmp_path / "more", tokenizer="bytes")
    for other in (reader(tmp_path / "more"), reader(folder, packing="first_fit")):
        with pytest.raises(ConfigError) as caught:
            other.set_state(source.get_state())
        assert caught.value.field == "state.data"


def test_blank_batch_has_the_spec_of_a_read_batch(folder):
    config = TokenRecords.HParams.config(path="not_here", seq_length=24, is_training=True)
    blank = TokenRecords.blank_batch(config, 4)
    assert spec_of(blank) == spec_of(reader(folder, is_training=True, batch_size=4).get_next())
    assert blank.paddings.all()
