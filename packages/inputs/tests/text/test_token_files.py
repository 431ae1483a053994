"""TokenFiles: files written here by the published formats, and rows by their definitions."""

from __future__ import annotations

import itertools
import struct

import numpy as np
import pytest

from layerkit.errors import ConfigError
from layerkit_inputs import ByteTokenizer, TokenFiles
from layerkit_inputs.base.errors import BadRecordError, MissingFileError
from layerkit_inputs.base.host_batches import spec_of
from layerkit_inputs.testing import laws

LENGTH, EOS, BOS = 6, 2, 1
DRAW = np.random.default_rng(0)
# Documents of ids from 3 on, with an id that begins and one that ends each.
DOCUMENTS = [[BOS, *DRAW.integers(3, 60, size).tolist(), EOS] for size in DRAW.integers(0, 14, 30)]
NUM_SEQUENCES = sum(-(-len(document) // 5) for document in DOCUMENTS)


def write_megatron(path, documents, dtype=np.uint16, **changes):
    """Write `_IndexWriter` of Megatron-LM: each document as sequences of at most five ids."""
    sequences, bounds = [], [0]
    for document in documents:
        sequences += [document[at : at + 5] for at in range(0, len(document), 5)]
        bounds.append(len(sequences))
    lengths = np.array([len(sequence) for sequence in sequences], np.int32)
    code = {np.uint8: 1, np.int32: 4, np.int64: 5, np.float32: 7, np.uint16: 8}[dtype]
    pointers = (np.cumsum(lengths) - lengths).astype(np.int64) * np.dtype(dtype).itemsize
    parts = {
        "magic": b"MMIDIDX\0\0",
        "version": struct.pack("<Q", 1),
        "code": struct.pack("<B", code),
        "counts": struct.pack("<QQ", len(lengths), len(bounds)),
        "lengths": lengths.tobytes(),
        "pointers": pointers.tobytes(),
        "bounds": np.array(bounds, np.int64).tobytes(),
        "modes": b"",
    }
    path.with_suffix(".idx").write_bytes(b"".join({**parts, **changes}.values()))
    path.write_bytes(np.array([*itertools.chain(*documents)], dtype).tobytes())


def write_raw(path, documents, dtype=np.uint16):
    path.write_bytes(np.array([*itertools.chain(*documents)], dtype).tobytes())


def write_llm_c(path, documents, dtype=np.uint16, **changes):
    """Write `write_datafile` of llm.c."""
    ids = np.array([*itertools.chain(*documents)], dtype)
    magic, version = {np.uint16: (20240520, 1), np.uint32: (20240801, 7)}[dtype]
    header = np.zeros(256, np.int32)
    header[:3] = list({"magic": magic, "version": version, "count": len(ids), **changes}.values())
    path.write_bytes(header.tobytes() + ids.tobytes())


def write_numpy(path, documents, dtype=np.uint16):
    with path.open("wb") as file:
        np.save(file, np.array([*itertools.chain(*documents)], dtype))


# How a file is written, its suffix, and fields of the reader.
FORMATS = {
    "megatron": (write_megatron, ".bin", {}),
    "megatron int32": (lambda *args: write_megatron(*args, np.int32), ".bin", {}),
    "megatron int64": (lambda *args: write_megatron(*args, np.int64), ".bin", {}),
    "megatron uint8": (lambda *args: write_megatron(*args, np.uint8), ".bin", {}),
    "nanogpt": (write_raw, ".bin", {}),
    "olmo": (write_raw, ".npy", {"dtype": "uint16"}),
    "olmo uint32": (lambda *args: write_raw(*args, np.uint32), ".npy", {"vocab_size": 100278}),
    "llm.c": (write_llm_c, ".bin", {"vocab_size": 60}),
    "llm.c uint32": (lambda *args: write_llm_c(*args, np.uint32), ".bin", {}),
    "numpy": (write_numpy, ".npy", {}),
    "numpy int64": (lambda *args: write_numpy(*args, np.int64), ".npy", {}),
}


@pytest.fixture
def make(tmp_path):
    """Returns a reader of two files of a format, found by a pattern."""

    def build(kind, **fields):
        write, suffix, options = FORMATS[kind]
        if not any(tmp_path.iterdir()):
            for number, documents in enumerate((DOCUMENTS[:17], DOCUMENTS[17:])):
                write(tmp_path / f"part-{number}{suffix}", documents)
        base = {"paths": [f"{tmp_path}/part-*"], "batch_size": 4, "seq_length": LENGTH}
        return TokenFiles(**{**base, **options, **fields})

    return build


def rows_of(source):
    """Return all rows: lists of (id, label, weight, segment, position), without padding."""
    rows = []
    for batch in source.eval_batches():
        names = ("ids", "labels", "weights", "segment_ids", "segment_pos")
        arrays = [batch[name].astype(int) for name in names]
        for row, number in enumerate(batch.provenance):
            valid = batch.paddings[row] == 0
            if number >= 0:
                rows.append(
                    list(zip(*(array[row][valid].tolist() for array in arrays), strict=True))
                )
    return rows


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("megatron", {"packing": "first_fit", "is_training": True}),
        ("nanogpt", {"is_training": True, "input_random_seed": 3}),
        ("olmo uint32", {"eos_id": EOS}),
        ("llm.c", {"packing": "first_fit", "bos_id": BOS}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_reader_obeys_the_laws_of_inputs(law, kind, fields, make):
    law(lambda **more: make(kind, **fields, **more))


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_are_consecutive_windows_of_each_file(kind, make):
    expected = []
    for documents in (DOCUMENTS[:17], DOCUMENTS[17:]):
        ids = list(itertools.chain(*documents))
        for begin in range(0, len(ids) - 1, LENGTH):
            pairs = itertools.pairwise(ids[begin : begin + LENGTH + 1])
            expected.append([(a, b, 1, 1, place) for place, (a, b) in enumerate(pairs)])
    assert rows_of(make(kind)) == expected


@pytest.mark.parametrize(
    "markers", [{"eos_id": EOS}, {"bos_id": BOS}, {"eos_id": EOS, "bos_id": BOS}]
)
def test_documents_in_windows_are_segments(markers, make):
    joined, split = rows_of(make("nanogpt")), rows_of(make("nanogpt", **markers))
    for before, row in zip(joined, split, strict=True):
        segment, position, expected = 1, 0, []
        for token, label, *_ in before:
            is_last = (token, label) == (EOS, BOS)
            expected.append((token, label, int(not is_last), segment, position))
            segment, position = (segment + 1, 0) if is_last else (segment, position + 1)
        assert row == expected


@pytest.mark.parametrize(
    ("kind", "markers"),
    [("megatron", {}), ("olmo", {"eos_id": EOS}), ("numpy", {"bos_id": BOS})],
)
def test_first_fit_keeps_documents_whole(kind, markers, make, monkeypatch):
    monkeypatch.setattr("layerkit_inputs.text.token_files._SCANNED", 7)
    rows = rows_of(make(kind, packing="first_fit", seq_length=16, **markers))
    pieces = []
    for row in rows:
        for segment in sorted({cell[3] for cell in row}):
            cells = [cell for cell in row if cell[3] == segment]
            assert [cell[4] for cell in cells] == list(range(len(cells)))
            pieces.append([cells[0][0], *(cell[1] for cell in cells)])
    assert sorted(pieces) == sorted(DOCUMENTS)
    assert max(len(row) for row in rows) <= 16 and len(rows) < len(DOCUMENTS)


def test_files_of_several_formats_are_read_together(tmp_path):
    for number, kind in enumerate(("megatron int64", "nanogpt", "llm.c uint32", "numpy")):
        write, suffix, _ = FORMATS[kind]
        write(tmp_path / f"{number}{suffix}", DOCUMENTS[number : number + 1])
    (tmp_path / "0.csv.gz").write_bytes(b"metadata of OLMo")
    (tmp_path / "empty.bin").write_bytes(b"")
    rows = rows_of(TokenFiles(paths=[str(tmp_path)], batch_size=4, seq_length=20))
    assert [[BOS, *(cell[1] for cell in row)] for row in rows] == DOCUMENTS[:4]


DAMAGED = {
    "magic": (write_megatron, {"magic": b"TNTIDX\0\0\0"}),
    "index version": (write_megatron, {"version": struct.pack("<Q", 2)}),
    "floats": (write_megatron, {"code": b"\x07"}),
    "counts": (write_megatron, {"counts": struct.pack("<QQ", 2**62, 2**62)}),
    "too few": (write_megatron, {"counts": struct.pack("<QQ", 1, 2)}),
    "longer": (write_megatron, {"modes": b"0123"}),
    "no header": (write_megatron, dict.fromkeys(["code", "counts", "lengths", "pointers"], b"")),
    "pointers": (write_megatron, {"pointers": np.full(NUM_SEQUENCES, 2**40).tobytes()}),
    "bounds": (write_megatron, {"bounds": np.full(31, NUM_SEQUENCES).tobytes()}),
    "lengths": (write_megatron, {"lengths": np.full(NUM_SEQUENCES, -1, "<i4").tobytes()}),
    "llm.c version": (write_llm_c, {"version": 9}),
    "llm.c count": (write_llm_c, {"count": -1}),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_headers_are_one_sentence(name, tmp_path, raises):
    write, changes = DAMAGED[name]
    path = tmp_path / "x.bin"
    write(path, DOCUMENTS, **changes)
    damaged = path.with_suffix(".idx") if write is write_megatron else path
    with raises(BadRecordError, owner=str(damaged)):
        TokenFiles(paths=[str(path)], batch_size=4).get_next()


@pytest.mark.parametrize("kind", ["megatron", "nanogpt", "llm.c", "numpy"])
def test_truncated_files_raise(kind, tmp_path, raises):
    write, suffix, _ = FORMATS[kind]
    path = tmp_path / f"x{suffix}"
    write(path, DOCUMENTS)
    path.write_bytes(path.read_bytes()[:-1])
    with raises(BadRecordError, owner=str(path)):
        TokenFiles(paths=[str(path)], batch_size=4).get_next()


@pytest.mark.parametrize("array", [np.zeros((2, 3), np.uint16), np.zeros(3), np.array([{}]), "("])
def test_arrays_of_other_kinds_raise(array, tmp_path, raises):
    np.save(tmp_path / "x.npy", array)
    if isinstance(array, str):  # an unclosed bracket in the header
        path = tmp_path / "x.npy"
        path.write_bytes(path.read_bytes().replace(b"()", b"(("))
    with raises(BadRecordError, owner=str(tmp_path / "x.npy")):
        TokenFiles(paths=[str(tmp_path)], batch_size=4).get_next()


def test_id_beyond_the_vocabulary_names_file_and_place(tmp_path, raises):
    np.save(tmp_path / "x.npy", np.array([5] * 20 + [2**32 + 5]))
    source = TokenFiles(paths=[str(tmp_path)], batch_size=1, seq_length=20)
    with raises(BadRecordError, owner=str(tmp_path / "x.npy"), value=2**32 + 5):
        source.get_next()


def test_ids_of_four_bytes_are_not_read_as_two(tmp_path, raises):
    write_raw(tmp_path / "x.bin", DOCUMENTS, np.uint32)
    fields = {"paths": [str(tmp_path)], "batch_size": 1, "seq_length": 4, "vocab_size": 60}
    with raises(BadRecordError, field="dtype", value="uint16"):
        TokenFiles(**fields).get_next()
    TokenFiles(**fields, dtype="uint16").get_next()


def test_wrong_fields_raise(make, tmp_path, raises):
    with raises(ConfigError, field="eos_id", value=None):
        make("nanogpt", packing="first_fit").get_next()
    (tmp_path / "x.csv").write_text("1,2")
    with raises(MissingFileError, field="paths"):
        TokenFiles(paths=[str(tmp_path / "x.csv")], batch_size=4).get_next()


def test_state_of_other_files_or_markers_is_rejected(make, tmp_path, raises):
    state = make("nanogpt").get_state()
    with raises(ConfigError, field="state.data"):
        make("nanogpt", eos_id=EOS).set_state(state)
    write_raw(tmp_path / "part-0.bin", DOCUMENTS[1:18])
    with raises(ConfigError, field="state.data"):
        make("nanogpt").set_state(state)


def test_state_of_another_index_is_rejected(tmp_path, raises):
    write_megatron(tmp_path / "x.bin", [[4, 5], [6], [7, 8, 9]])
    fields = {"paths": [str(tmp_path)], "batch_size": 1, "seq_length": 4}
    joined, packed = ({**fields, "packing": name} for name in ("stream", "first_fit"))
    states = [TokenFiles(**one).get_state() for one in (joined, packed)]
    write_megatron(tmp_path / "x.bin", [[4, 5, 6], [7], [8, 9]])
    TokenFiles(**joined).set_state(states[0])
    with raises(ConfigError, field="state.data"):
        TokenFiles(**packed).set_state(states[1])


def test_blank_batch_and_texts(make):
    source = make("nanogpt", is_training=True, tokenizer=ByteTokenizer())
    batch = source.get_next()
    config = TokenFiles.HParams.config(paths=source.paths, seq_length=LENGTH)
    assert spec_of(TokenFiles.blank_batch(config, 4)) == spec_of(batch)
    assert len(source.ids_to_strings(batch.ids, [LENGTH] * 4)) == 4
    num_ids = sum(map(len, DOCUMENTS))
    assert source.describe_data()[0].endswith(f"2 files, {num_ids} tokens")
