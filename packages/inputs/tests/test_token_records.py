"""TokenRecords: the rows of LocalText from files of any size, and damage told by its place."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from layerkit.errors import ConfigError
from layerkit_inputs import LocalText
from layerkit_inputs.bad_records import BadRecordError
from layerkit_inputs.mixing.mixture import Mixture
from layerkit_inputs.testing import laws
from layerkit_inputs.token_records import TokenRecords
from layerkit_inputs.token_store import About, TokenStore
from layerkit_inputs.tokenizers import ByteTokenizer
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
    """Those that LocalText trains on."""
    return [file.path for file in LocalText(batch_size=1, paths=[str(texts)])._files("train")]


@pytest.fixture(scope="module")
def folder(train_files, tmp_path_factory):
    """Small blocks, so that rows cross blocks, documents cross rows and shards are several."""
    output = tmp_path_factory.mktemp("built") / "tokens"
    paths = [str(path) for path in train_files]
    build_token_records(paths, output, tokenizer="bytes", num_shards=3, block_length=32)
    return output


@pytest.fixture
def copied(folder, tmp_path):
    """A copy to be damaged."""
    for path in folder.rglob("*.*"):
        target = tmp_path / "copy" / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    return tmp_path / "copy"


def reader(folder, **fields):
    return TokenRecords(**{"batch_size": 24, "path": str(folder), "seq_length": 24, **fields})


def documents_of(train_files):
    """The ids of each document."""
    return [[1, *(byte + 3 for byte in path.read_bytes()), 2] for path in train_files]


@pytest.mark.parametrize("seq_length", [3, 31, 1000])
def test_rows_are_those_of_local_text(folder, texts, seq_length):
    expected = LocalText(batch_size=5, paths=[str(texts)], seq_length=seq_length)
    source = reader(folder, batch_size=5, seq_length=seq_length)
    assert len(source._store.split.shards) == 3
    laws.assert_same_batches(list(source.eval_batches()), list(expected.eval_batches()))


def test_first_fit_keeps_documents_whole_and_loses_nothing(folder, train_files):
    source = reader(folder, batch_size=4, seq_length=200, packing="first_fit")
    found = []
    for batch in source.eval_batches():
        for row in range(4):
            for segment in range(1, batch.segment_ids[row].max() + 1):
                here = batch.segment_ids[row] == segment
                positions = np.flatnonzero(here)
                assert (np.diff(positions) == 1).all()
                assert batch.segment_pos[row, here].tolist() == list(range(len(positions)))
                found.append([*batch.ids[row, here].tolist(), int(batch.labels[row, here][-1])])
        padded = batch.segment_ids == 0
        assert (batch.weights == ~padded).all() and (batch.paddings == padded).all()
        assert not batch.ids[padded].any() and not batch.labels[padded].any()
    expected = []
    for ids in documents_of(train_files):
        expected += [ids[at : at + 201] for at in range(0, len(ids) - 1, 200)]
    assert sorted(found) == sorted(expected)
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
def test_laws(law, fields, folder):
    law(lambda **more: reader(folder, **{"batch_size": 4, **fields, **more}))


@pytest.mark.parametrize("packing", ["stream", "first_fit"])
def test_training_goes_on_through_changing_numbers_of_hosts(folder, packing):
    fields = {"is_training": True, "packing": packing, "input_random_seed": 7}
    expected = laws.take(reader(folder, **fields), 10)
    found, state = [], None
    for count in (1, 2, 4, 8, 3):
        hosts = [
            reader(
                folder, **fields, infeed_host_index=host, num_infeed_hosts=count,
                batch_size=24 // count,
            )
            for host in range(count)
        ]  # fmt: skip
        if state is not None:
            for host in hosts:
                host.set_state(json.loads(json.dumps(state)))
        for _ in range(2):
            parts = [host.get_next() for host in hosts]
            found.append(
                parts[0].__class__({k: np.concatenate([p[k] for p in parts]) for k in parts[0]})
            )
        state = hosts[-1].get_state()
        assert len(json.dumps(state)) < 4096
    laws.assert_same_batches(found, expected)


_RESUME = """
import hashlib, json, sys
from layerkit_inputs.token_records import TokenRecords
fields, state, count = json.loads(sys.argv[1])
source = TokenRecords(**fields)
if state:
    source.set_state(state)
for _ in range(count):
    batch = source.get_next()
    print(hashlib.sha256(b"".join(value.tobytes() for value in batch.values())).hexdigest())
"""


@pytest.mark.parametrize("packing", ["stream", "first_fit"])
def test_a_fresh_process_goes_on_in_the_middle_of_an_epoch(folder, packing):
    fields = {
        "batch_size": 8, "path": str(folder), "seq_length": 24, "packing": packing,
        "is_training": True,
    }  # fmt: skip
    source = TokenRecords(**fields)
    laws.take(source, 5)
    state = source.get_state()
    expected = [
        hashlib.sha256(b"".join(value.tobytes() for value in batch.values())).hexdigest()
        for batch in laws.take(source, 20)
    ]
    argument = json.dumps([fields, state, 20])
    done = subprocess.run(
        [sys.executable, "-c", _RESUME, argument], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == expected


def test_what_a_batch_takes_in_memory_does_not_grow_with_the_data(tmp_path):
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


def test_ids_become_text_by_the_tokenizer(folder, train_files):
    source = reader(folder, batch_size=1, seq_length=20, tokenizer=ByteTokenizer())
    batch = source.get_next()
    assert source.ids_to_strings(batch.labels, [12]) == [train_files[0].read_text()[:12]]
    assert source.token_unit == "byte"
    with pytest.raises(ValueError, match=r"^TokenRecords: tokenizer is not set"):
        reader(folder).ids_to_strings(batch.labels, [20])


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 0xFF
    path.write_bytes(content)


def shard_of(copied, number=1):
    return copied / "train" / f"tokens-{number:05d}.array_record"


def damage_a_block(copied):
    """Damages the second shard; returns the number of the damaged record."""
    flip(shard_of(copied), 1000)
    with pytest.raises(BadRecordError) as caught:
        list(reader(copied).eval_batches())
    prefix = re.escape(f"{shard_of(copied)}, record ")
    return int(re.match(prefix + r"(\d+): the record is damaged ", str(caught.value))[1])


def test_rows_of_a_damaged_block_are_refused_or_skipped_and_counted(copied, folder):
    record = damage_a_block(copied)
    source = reader(copied, on_bad_record="skip", batch_size=8)
    found, whole = list(source.eval_batches()), list(reader(folder, batch_size=8).eval_batches())
    assert source.num_skipped >= 1
    assert f"tokens-00001.array_record, record {record}:" in source._bad.first[0]
    skipped = 0
    for one, other in zip(found, whole, strict=True):
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


def damage_index(copied):
    flip(copied / "train" / "document_ends.int64", 9)
    return "document_ends.int64: the index is damaged."


def truncate_index(copied):
    path = copied / "train" / "document_ends.int64"
    path.write_bytes(path.read_bytes()[:-3])
    return "document_ends.int64: 309 bytes, but 312 were written; the index is truncated or another"


def remove_index(copied):
    (copied / "train" / "document_ends.int64").unlink()
    return "document_ends.int64: the index is missing."


def truncate_shard(copied):
    path = shard_of(copied)
    path.write_bytes(path.read_bytes()[:-1000])
    return (
        "tokens-00001.array_record: 130072 bytes, but 131072 were written; the shard is truncated"
    )


def remove_shard(copied):
    shard_of(copied).unlink()
    return "tokens-00001.array_record: the shard is missing."


def swap_shard(copied):
    """With another one of the same size."""
    shard_of(copied).write_bytes(shard_of(copied, 2).read_bytes())
    return "tokens-00001.array_record: not the shard that about.json describes; files of two builds"


def damage_about(copied):
    path = copied / "about.json"
    path.write_text(path.read_text()[:-30])
    return "about.json: damaged"


def lose_a_field_of_about(copied):
    path = copied / "about.json"
    path.write_text(path.read_text().replace("num_ids", "num_idx"))
    return "about.json: damaged .*num_idx"


def change_version(copied):
    path = copied / "about.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    return "about.json: 'layerkit token store' of version 2; this reader knows"


def remove_about(copied):
    (copied / "about.json").unlink()
    return "no about.json there, so this is no folder of token records, or its build was not fin"


@pytest.mark.parametrize(
    "damage",
    [
        damage_index,
        truncate_index,
        remove_index,
        truncate_shard,
        remove_shard,
        swap_shard,
        damage_about,
        lose_a_field_of_about,
        change_version,
        remove_about,
    ],
    ids=lambda damage: damage.__name__,
)
@pytest.mark.parametrize("policy", ["refuse", "skip"])
def test_files_that_are_not_whole_are_refused(copied, damage, policy):
    text = damage(copied)
    with pytest.raises((ValueError, OSError), match=text):
        list(reader(copied, on_bad_record=policy).eval_batches())


def test_fields_that_cannot_work(folder):
    class OtherTokenizer(ByteTokenizer):
        def fingerprint(self):
            return "other"

    for fields, text in (
        ({"path": None}, "path is not set; give the folder of token records."),
        ({"seq_length": 0}, "seq_length=0; expected at least 1."),
        (
            {"packing": "streams"},
            "packing='streams'; did you mean 'stream'? Expected one of ('stre",
        ),
        ({"on_bad_record": "drop"}, "on_bad_record='drop'. Expected one of ('refuse', 'skip')."),
    ):
        with pytest.raises(ValueError, match="^" + re.escape(f"TokenRecords: {text}")):
            reader(folder, **fields)
    with pytest.raises(ValueError, match=r"split='trian' is none of .*; did you mean 'train'\?"):
        reader(folder, split="trian").get_next()
    with pytest.raises(ValueError, match="fingerprint 'other', but .* was made with 'bytes'"):
        reader(folder, tokenizer=OtherTokenizer()).get_next()
    text = "vocab_size=258, but .* was made with a tokenizer of 259 ids: the loss of the others"
    with pytest.raises(ValueError, match=text):
        reader(folder, vocab_size=258).get_next()
    reader(folder, vocab_size=259).get_next()
    with pytest.raises(FileNotFoundError, match=r"no about.json there"):
        reader(folder / "train").get_next()


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
    with raises(ConfigError, field="components['b'] tokenizer fingerprint", value="other"):
        mixed(copied.parent / "0", copied.parent / "1")


def test_a_state_fits_the_same_tokens_wherever_they_lie(folder, copied, texts, tmp_path):
    source = reader(folder)
    source.get_next()
    reader(copied).set_state(source.get_state())
    build_token_records([str(texts)], tmp_path / "more", tokenizer="bytes")
    for other in (reader(tmp_path / "more"), reader(folder, packing="first_fit")):
        with pytest.raises(ValueError, match="the state does not fit this data"):
            other.set_state(source.get_state())


def test_the_store_tells_what_it_holds(folder, train_files):
    ids = documents_of(train_files)
    split = About.read(folder).splits["train"]
    assert split.num_documents == len(ids)
    assert split.num_predictions == sum(len(one) - 1 for one in ids)
    store = TokenStore(folder, "train")
    np.testing.assert_array_equal(store.document_ends, np.cumsum([len(one) - 1 for one in ids]))


def test_a_blank_batch_has_the_arrays_of_one_that_is_read(folder):
    config = TokenRecords.HParams.config(path="not_here", seq_length=24, is_training=True)
    blank = TokenRecords.blank_batch(config, 4)
    batch = TokenRecords(path=str(folder), seq_length=24, is_training=True, batch_size=4).get_next()
    assert {name: (a.shape, a.dtype) for name, a in blank.items()} == {
        name: (a.shape, a.dtype) for name, a in batch.items()
    }
    assert blank.paddings.all()
