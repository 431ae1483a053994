"""Checks of the arguments and files of Lingvo's native reader, before it is called.

The reader is C++ that aborts the process or hangs for a missing file, an unknown file type or a
damaged record. These errors cannot be caught, so they are checked first. The rules are those of
Lingvo 0.14.2 (record_yielder.cc, sequential_record_yielder.cc, record_batcher.cc,
generic_input_op_kernels.cc), and each was tested.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import Any

from layerkit.errors import ConfigError
from layerkit_inputs.base.bad_records import BadRecordError
from layerkit_inputs.base.errors import require_extra

_RECORD_TYPES = ("tfrecord", "tfrecord_gzip", "text", "iota")
_MERGED_DTYPES = ("float32", "bfloat16", "uint8", "int32", "int64", "bool", "string")
_ENDLESS = -1
_FRAME_BYTES = 16
"""Bytes around a TFRecord: length (8), checksum of the length (4) and of the contents (4)."""


class NativeReadError(ConfigError):
    """An error about arguments on which Lingvo's native reader would abort or hang."""


@dataclasses.dataclass(frozen=True)
class RecordFile:
    """A file of a native reader."""

    path: str
    record_type: str


@dataclasses.dataclass(frozen=True)
class NativeRead:
    """A checked call of the native reader.

    Attributes:
      files: Files to read.
      in_order: True if files are read in order, else records have a new random order in each run.
      is_endless: True if the files are repeated without end.
    """

    files: tuple[RecordFile, ...]
    in_order: bool
    is_endless: bool


def check_native_read(arguments: dict[str, Any]) -> NativeRead:
    """Check the arguments of Lingvo's `generic_input` op.

    Args:
      arguments: Arguments from GenericInput; missing ones have the defaults of the op.

    Raises:
      NativeReadError: The op would abort or hang.
    """
    in_order = bool(arguments.get("require_sequential_order", False))
    repeat_count = int(arguments.get("repeat_count", _ENDLESS))
    _check_repeats(repeat_count, in_order=in_order)
    _check_positive(arguments, in_order=in_order)
    _check_dtypes(arguments.get("out_types", ()))
    weights = list(arguments.get("input_source_weights") or ())
    pattern = arguments.get("file_pattern", "")
    pattern = pattern.decode() if isinstance(pattern, bytes) else str(pattern)
    patterns = pattern.split(",") if weights else [pattern]
    if len(patterns) != max(1, len(weights)):
        raise NativeReadError(
            field="file_pattern",
            value=pattern,
            expected=f"{len(weights)} comma-separated parts, one for each weight",
        )
    if in_order and len(patterns) > 1:
        raise NativeReadError(
            field="file_pattern",
            value=pattern,
            expected="one source, since Lingvo cannot mix sources in order",
            hint="Evaluate each source with its own input.",
        )
    files = tuple(file for one in patterns for file in _files_of(one))
    return NativeRead(files, in_order=in_order, is_endless=repeat_count == _ENDLESS)


def _check_repeats(repeat_count: int, *, in_order: bool) -> None:
    if repeat_count != _ENDLESS and not in_order:
        raise NativeReadError(
            field="repeat_count",
            value=repeat_count,
            expected="-1, since records are read in random order without end",
            hint="To read them in order, set cluster_do_eval=True and is_training=False.",
        )
    if repeat_count < 1 and repeat_count != _ENDLESS:
        expected = "a positive integer, or -1 for no end"
        raise NativeReadError(field="repeat_count", value=repeat_count, expected=expected)


def _check_positive(arguments: dict[str, Any], *, in_order: bool) -> None:
    names = ["num_threads"] if in_order else ["num_threads", "file_buffer_size", "file_parallelism"]
    for name in names:
        if name in arguments and int(arguments[name]) < 1:
            value = arguments[name]
            raise NativeReadError(field=name, value=value, expected="a positive integer")
    limits = [int(limit) for limit in arguments.get("bucket_batch_limit", ())]
    bounds = list(arguments.get("bucket_upper_bound", ()))
    if len(limits) != len(bounds) or any(limit < 1 for limit in limits):
        raise NativeReadError(
            field="bucket_batch_limit",
            value=limits,
            expected=f"a positive batch size for each bucket of bucket_upper_bound={bounds}",
        )


def _check_dtypes(out_types: Iterable[Any]) -> None:
    wrong = sorted({str(dtype.name) for dtype in out_types} - set(_MERGED_DTYPES))
    if wrong:
        raise NativeReadError(
            "Lingvo cannot batch the outputs of the processor",
            field="dtypes",
            value=wrong,
            expected=f"some of {', '.join(_MERGED_DTYPES)}",
            hint="Cast the outputs in the processor.",
        )


def _files_of(pattern: str) -> Iterator[RecordFile]:
    """Yield the files of `TYPE:GLOB,GLOB;GLOB,PREFIX@SHARDS`; each part must match files."""
    record_type, colon, globs = pattern.partition(":")
    if not colon or "/" in record_type:
        record_type, globs = "", pattern
    if record_type not in _RECORD_TYPES:
        raise NativeReadError(
            f"unknown file type {record_type!r}",
            field="file_pattern",
            value=pattern,
            expected=f"TYPE:PATH, where TYPE is one of {', '.join(_RECORD_TYPES)}",
        )
    if record_type == "iota":  # generates COUNT records without a file
        if globs and not (globs.isdecimal() and int(globs) > 0):
            expected = "iota:COUNT, with a count of at least 1"
            raise NativeReadError(field="file_pattern", value=pattern, expected=expected)
        return
    for part in re.split("[,;]", globs):
        paths = _paths_of(part, pattern)
        yield from (RecordFile(path, record_type) for path in paths)


def _paths_of(part: str, pattern: str) -> list[str]:
    gfile = require_extra("tensorflow", needed_by="Lingvo inputs").io.gfile
    paths = [path for path in gfile.glob(_shards_as_glob(part)) if not gfile.isdir(path)]
    if not paths:
        raise NativeReadError(f"no file matches {part!r}", field="file_pattern", value=pattern)
    if not any(gfile.stat(path).length for path in paths):
        problem = f"every file that matches {part!r} is empty"
        raise NativeReadError(problem, field="file_pattern", value=pattern)
    return sorted(paths)


def _shards_as_glob(part: str) -> str:
    """Convert `name@3` to `name-?????-of-00003`."""
    prefix, at, shards = part.partition("@")
    if not at:
        return part
    if shards == "*":
        return f"{prefix}-?????-of-?????"
    if not (shards.isdecimal() and int(shards) <= 99_999):
        expected = "a number of shards, or *, after the @"
        raise NativeReadError(field="file_pattern", value=part, expected=expected)
    return f"{prefix}-?????-of-{int(shards):05d}"


def check_records(files: Iterable[RecordFile]) -> int:
    """Read files of TFRecords and check every checksum, as TensorFlow does.

    Lingvo's reader hangs on a damaged record. Text files have no checksums and are skipped.

    Returns:
      Number of records.

    Raises:
      BadRecordError: A record is damaged. The error names the file and the record.
    """
    tensorflow = require_extra("tensorflow", needed_by="Lingvo inputs")
    total = 0
    for file in files:
        if not file.record_type.startswith("tfrecord"):
            continue
        try:
            count, num_bytes = _count(tensorflow, file)
        except tensorflow.errors.OpError as error:
            number, problem = first_damaged(file) or (0, strip_graph_names(error.message))
            raise _damaged(file, number, problem) from None
        # TensorFlow reads a truncated header as the end of the file.
        length = tensorflow.io.gfile.stat(file.path).length
        if file.record_type == "tfrecord" and num_bytes != length:
            raise _damaged(file, count, f"truncated record at {num_bytes}")
        total += count
    return total


def _count(tensorflow: Any, file: RecordFile) -> tuple[int, int]:
    """Return the number of records of a file, and their bytes with lengths and checksums."""
    zero = tensorflow.constant(0, tensorflow.int64)

    def add(sums: Any, record: Any) -> Any:
        size = tensorflow.cast(tensorflow.strings.length(record), tensorflow.int64)
        return sums[0] + 1, sums[1] + size + _FRAME_BYTES

    count, num_bytes = _records_of(tensorflow, file).reduce((zero, zero), add)
    return int(count), int(num_bytes)


def _damaged(file: RecordFile, number: int, problem: str) -> BadRecordError:
    return BadRecordError(
        problem,
        owner=f"{file.path}, record {number}",
        hint="Write the file again; Lingvo cannot skip damaged records.",
    )


def first_damaged(file: RecordFile) -> tuple[int, str] | None:
    """Return number and problem of the first damaged record of a TFRecord file, or None."""
    tensorflow = require_extra("tensorflow", needed_by="Lingvo inputs")
    number = 0
    try:
        for _ in _records_of(tensorflow, file):
            number += 1
    except tensorflow.errors.OpError as error:
        return number, strip_graph_names(error.message)
    return None


def strip_graph_names(message: str) -> str:
    """Return a message of TensorFlow without the names of its graph."""
    without_names = re.sub(r"\[\[.*|\[Op:.*|\{\{[^}]*\}\}", "", message, flags=re.DOTALL)
    return " ".join(without_names.split())


def _records_of(tensorflow: Any, file: RecordFile) -> Any:
    compression = "GZIP" if file.record_type == "tfrecord_gzip" else ""
    return tensorflow.data.TFRecordDataset(file.path, compression_type=compression)
