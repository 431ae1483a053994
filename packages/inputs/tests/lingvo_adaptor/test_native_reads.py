"""What Lingvo's native reader may be asked, checked without the reader itself."""

from __future__ import annotations

import gzip
import re

import pytest

pytest.importorskip("tensorflow")

from layerkit_inputs.bad_records import BadRecordError
from layerkit_inputs.lingvo_adaptor.native_reads import (
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


def test_order_and_end_are_told():
    assert read("iota:7").in_order and not read("iota:7").is_endless
    assert read("iota:7", repeat_count=-1).is_endless
    assert not check_native_read({"file_pattern": "iota:7"}).in_order
    assert check_native_read({"file_pattern": b"iota:"}).is_endless


RANDOM = {"require_sequential_order": False, "repeat_count": -1}


@pytest.mark.parametrize(
    ("pattern", "arguments", "text"),
    [
        (
            "text:FOLDER/none",
            {},
            "no file matches 'FOLDER/none', of file_pattern='text:FOLDER/none'.",
        ),
        (
            "text:FOLDER/a,FOLDER/none*",
            {},
            "no file matches 'FOLDER/none*', of file_pattern='text:FOLDER/a,FOLDER/none*'.",
        ),
        ("text:FOLDER", {}, "no file matches 'FOLDER', of file_pattern='text:FOLDER'."),
        (
            "FOLDER/a",
            {},
            "file_pattern='FOLDER/a' begins with the type ''. Expected TYPE:PATH, where TYPE is "
            "one of tfrecord, tfrecord_gzip, text, iota.",
        ),
        (
            "tf_record:FOLDER/a",
            {},
            "file_pattern='tf_record:FOLDER/a' begins with the type 'tf_record'; did you mean "
            "'tfrecord'? Expected TYPE:PATH, where TYPE is one of tfrecord, tfrecord_gzip, text, "
            "iota.",
        ),
        ("text:a@many", {}, "'a@many': expected a number of shards, or *, after the @."),
        ("iota:0", {}, "file_pattern='iota:0'; expected iota:COUNT, at least 1."),
        (
            "iota:7",
            {"require_sequential_order": False},
            "repeat_count=1, but the records are read at random, without end. Set "
            "cluster_do_eval=True on the adaptor (with is_training=False) to read them in order, "
            "or leave repeat_count at -1.",
        ),
        (
            "iota:7",
            {"repeat_count": -2},
            "repeat_count=-2; expected 1 or more passes, or -1 for no end.",
        ),
        ("iota:7", {**RANDOM, "file_parallelism": 0}, "file_parallelism=0; expected at least 1."),
        ("iota:7", {"num_threads": 0}, "num_threads=0; expected at least 1."),
        (
            "iota:7",
            {"bucket_batch_limit": [2, 2], "bucket_upper_bound": [9]},
            "bucket_batch_limit=[2, 2] with bucket_upper_bound=[9]; expected a batch size of at "
            "least 1 for each bucket.",
        ),
        (
            "iota:7",
            {"input_source_weights": [1.0, 2.0]},
            "file_pattern='iota:7' has 1 parts, with 2 weights; expected one weight for each part.",
        ),
        (
            "iota:7,iota:8",
            {"input_source_weights": [1.0, 2.0]},
            "file_pattern='iota:7,iota:8' mixes 2 sources by weight, which Lingvo cannot do in "
            "order. Evaluate each source by an input of its own.",
        ),
    ],
)
def test_what_would_end_the_process_is_refused(tmp_path, pattern, arguments, text):
    write(tmp_path, "a")
    whole = text.replace("FOLDER", str(tmp_path))
    with pytest.raises(NativeReadError, match=f"^{re.escape(whole)}$"):
        read(pattern.replace("FOLDER", str(tmp_path)), **arguments)


def test_files_that_are_all_empty_are_refused(tmp_path):
    (tmp_path / "a").touch()
    with pytest.raises(NativeReadError, match="^every file that matches '.*/a' is empty.$"):
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
def test_a_file_cut_short_is_named_with_the_record(write_records, cut):
    path = write_records([b"%04d" % i for i in range(4)])  # 20 bytes each
    path.write_bytes(path.read_bytes()[:-cut])
    record = 3 - (cut - 1) // 20
    whole = (
        rf"^{re.escape(str(path))}, record {record}: truncated record at {20 * record}.*\. Lingvo "
        r"cannot skip damaged records: write the file again\.$"
    )
    with pytest.raises(BadRecordError, match=whole):
        check_records([RecordFile(str(path), "tfrecord")])


@pytest.mark.parametrize("at", [2, 9, 13, 18])
def test_a_changed_byte_is_found(write_records, at):
    path = write_records([b"%04d" % i for i in range(4)])
    data = bytearray(path.read_bytes())
    data[40 + at] ^= 1
    path.write_bytes(data)
    with pytest.raises(BadRecordError, match=f"^{re.escape(str(path))}, record 2: corrupted recor"):
        check_records([RecordFile(str(path), "tfrecord")])


def test_a_file_of_another_kind_is_found(tmp_path):
    path = tmp_path / "lines"
    path.write_text("one line\n" * 10)
    with pytest.raises(BadRecordError, match=f"^{re.escape(str(path))}, record 0: corrupted recor"):
        check_records([RecordFile(str(path), "tfrecord")])
