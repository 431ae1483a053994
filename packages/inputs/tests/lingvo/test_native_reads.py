"""What Lingvo's native reader may be asked, checked without the reader itself."""

from __future__ import annotations

import gzip
import re

import pytest

pytest.importorskip("tensorflow")

from layerkit_inputs.base.bad_records import BadRecordError
from layerkit_inputs.lingvo.native_reads import (
    NativeReadError,
    RecordFile,
    check_native_read,
    check_records,
)


def read(pattern, **arguments):
    given = {"repeat_count": 1, "require_sequential_order": True, **arguments}
    return check_native_read({"file_pattern": pattern, **given})


def write(folder, *names):
    for name in names:
        (folder / name).write_text("x\n")
    return [RecordFile(str(folder / name), "text") for name in names]


def test_patterns_name_the_files_that_lingvo_would_read(tmp_path):
    a, b, *shards = write(tmp_path, "a", "b", "s-00000-of-00002", "s-00001-of-00002")
    at = f"text:{tmp_path}"
    assert read(f"{at}/a").files == (a,)
    assert read(f"{at}/?").files == (a, b)
    assert read(f"{at}/b,{tmp_path}/a").files == (b, a)
    assert read(f"{at}/b;{tmp_path}/a").files == (b, a)
    assert read(f"{at}/s@2").files == read(f"{at}/s@*").files == tuple(shards)
    assert read("iota:7").files == ()


def test_native_read_has_order_and_end():
    assert read("iota:7").in_order and not read("iota:7").is_endless
    assert read("iota:7", repeat_count=-1).is_endless
    assert not check_native_read({"file_pattern": "iota:7"}).in_order
    assert check_native_read({"file_pattern": b"iota:"}).is_endless


RANDOM = {"require_sequential_order": False, "repeat_count": -1}


@pytest.mark.parametrize(
    ("pattern", "arguments", "field"),
    [
        ("text:none", {}, "file_pattern"),
        ("text:a,none*", {}, "file_pattern"),
        ("text:.", {}, "file_pattern"),
        ("a", {}, "file_pattern"),
        ("tf_record:a", {}, "file_pattern"),
        ("text:a@many", {}, "file_pattern"),
        ("iota:0", {}, "file_pattern"),
        ("iota:7", {"require_sequential_order": False}, "repeat_count"),
        ("iota:7", {"repeat_count": -2}, "repeat_count"),
        ("iota:7", {**RANDOM, "file_parallelism": 0}, "file_parallelism"),
        ("iota:7", {"num_threads": 0}, "num_threads"),
        ("iota:7", {"bucket_batch_limit": [2, 2], "bucket_upper_bound": [9]}, "bucket_batch_limit"),
        ("iota:7", {"input_source_weights": [1.0, 2.0]}, "file_pattern"),
        ("iota:7,iota:8", {"input_source_weights": [1.0, 2.0]}, "file_pattern"),
    ],
)
def test_arguments_that_would_abort_raise(raises, tmp_path, monkeypatch, pattern, arguments, field):
    write(tmp_path, "a")
    monkeypatch.chdir(tmp_path)
    with raises(NativeReadError, field=field):
        read(pattern, **arguments)


def test_empty_files_raise(tmp_path):
    (tmp_path / "a").touch()
    with pytest.raises(NativeReadError, match="every file that matches '.*/a' is empty"):
        read(f"text:{tmp_path}/a")


def test_mixed_sources_each_have_a_type():
    mixed = read("iota:7,iota:8", input_source_weights=[1.0, 2.0], **RANDOM)
    assert mixed.is_endless and not mixed.in_order


# Damaged records.


def test_records_are_counted(write_records, tmp_path):
    plain = write_records([b"1", b"22", b"333"])
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    text = write(tmp_path, "text")
    files = [RecordFile(str(plain), "tfrecord"), RecordFile(str(packed), "tfrecord_gzip"), *text]
    assert check_records(files) == 6


@pytest.mark.parametrize("cut", [1, 4, 17, 19, 30])
def test_truncated_file_raises_with_the_record(write_records, cut):
    path = write_records([b"%04d" % i for i in range(4)])  # 20 bytes each
    path.write_bytes(path.read_bytes()[:-cut])
    record = 3 - (cut - 1) // 20
    whole = rf"^{re.escape(str(path))}, record {record}: truncated record at {20 * record}"
    with pytest.raises(BadRecordError, match=whole):
        check_records([RecordFile(str(path), "tfrecord")])


@pytest.mark.parametrize("at", [2, 9, 13, 18])
def test_changed_byte_raises_with_the_record(write_records, at):
    path = write_records([b"%04d" % i for i in range(4)])
    data = bytearray(path.read_bytes())
    data[40 + at] ^= 1
    path.write_bytes(data)
    with pytest.raises(BadRecordError, match=f"^{re.escape(str(path))}, record 2: corrupted recor"):
        check_records([RecordFile(str(path), "tfrecord")])


def test_file_of_another_format_raises(tmp_path):
    path = tmp_path / "lines"
    path.write_text("one line\n" * 10)
    with pytest.raises(BadRecordError, match=f"^{re.escape(str(path))}, record 0: corrupted recor"):
        check_records([RecordFile(str(path), "tfrecord")])
