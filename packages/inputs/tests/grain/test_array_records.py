from __future__ import annotations

import pickle
import re

import pytest

from layerkit.errors import ConfigError
from layerkit_inputs.base.errors import BadRecordError, BadRecords
from layerkit_inputs.grain.array_records import (
    WRITER_OPTIONS,
    ArrayRecordFiles,
    open_array_record,
)

array_record = pytest.importorskip("array_record.python.array_record_module")


def write(path, records):
    writer = array_record.ArrayRecordWriter(str(path), WRITER_OPTIONS)
    for record in records:
        writer.write(record)
    writer.close()
    return path


def damage(path, data):
    """Flips the bits of a byte of `data`, which the file holds in the clear."""
    content = path.read_bytes()
    at = content.index(data) + len(data) // 2
    path.write_bytes(content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :])


@pytest.fixture
def files(tmp_path):
    """Three files of 3, 0 and 2 records."""
    return [
        write(tmp_path / "a.array_record", [b"zero zero", b"one one", b"two two"]),
        write(tmp_path / "b.array_record", []),
        write(tmp_path / "c.array_record", [b"three three", b"four four"]),
    ]


def test_records_are_numbered_through_all_files(files):
    records = ArrayRecordFiles(files)
    assert len(records) == 5
    assert [records[number].split()[0] for number in range(5)] == [
        b"zero", b"one", b"two", b"three", b"four",
    ]  # fmt: skip
    assert records.read([4, 0, 3, 0], BadRecords()) == [
        b"four four", b"zero zero", b"three three", b"zero zero",
    ]  # fmt: skip
    assert records.locate(3) == (str(files[2]), 0)
    for number in (-1, 5):
        with pytest.raises(IndexError, match="there are 5"):
            records[number]
        with pytest.raises(IndexError, match="there are 5"):
            records.locate(number)


def test_files_can_be_closed_and_pickled(files):
    records = ArrayRecordFiles(files)
    assert records[3] == b"three three"
    records.close()
    assert records[3] == b"three three"
    assert pickle.loads(pickle.dumps(records))[4] == b"four four"


def test_more_files_than_the_limit_of_open_files(tmp_path, monkeypatch):
    monkeypatch.setattr("layerkit_inputs.grain.array_records._MOST_OPEN", 2)
    paths = [write(tmp_path / f"{n}.array_record", [b"%d" % n]) for n in range(5)]
    records = ArrayRecordFiles(paths)
    for numbers in ([0, 1, 2, 3, 4], [4, 0, 2], [1, 3]):
        assert records.read(numbers, BadRecords()) == [b"%d" % number for number in numbers]


def test_damaged_record_raises_or_is_counted(files):
    damage(files[2], b"four four")
    records = ArrayRecordFiles(files)
    with pytest.raises(BadRecordError, match=re.escape(f"{files[2]}, record 1: ")):
        records[4]
    bad = BadRecords("skip")
    assert records.read([3, 4, 0], bad) == [b"three three", None, b"zero zero"]
    assert bad.num_skipped == 1 and "c.array_record, record 1" in bad.first[0]


@pytest.mark.parametrize("keep", [0, 1, 1000, 65536, -1])
def test_truncated_files_raise_when_opened(raises, files, keep):
    files[0].write_bytes(files[0].read_bytes()[:keep])
    size = files[0].stat().st_size
    with raises(BadRecordError, owner=str(files[0]), field="bytes", value=size):
        len(ArrayRecordFiles(files))


def test_missing_and_foreign_files_raise(raises, files, tmp_path):
    foreign = tmp_path / "text"
    foreign.write_bytes(b"some text\n" * 20_000)
    with raises(BadRecordError, owner=str(foreign), value=200_000):
        open_array_record(foreign)
    with raises(FileNotFoundError):
        open_array_record("nothing.array_record")
    with raises(BadRecordError, problem="3 records instead of 4"):
        ArrayRecordFiles([files[0]], num_records=[4])[0]
    with raises(ConfigError, field="paths", value=[]):
        ArrayRecordFiles([])
