"""What Lingvo's native reader is asked to read, checked before it is asked.

The reader is C++ that ends the process, or never returns, on what it does not expect: a file that
is not there, a type of file it does not know, a record that is damaged. None of that can be caught,
so it is looked for first. The rules below are those of Lingvo 0.14.2 (record_yielder.cc,
sequential_record_yielder.cc, record_batcher.cc, generic_input_op_kernels.cc), each of them tried.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import Any

from layerkit.near_names import near_names
from layerkit_inputs.bad_records import BadRecordError
from layerkit_inputs.extras import require

_RECORD_TYPES = ("tfrecord", "tfrecord_gzip", "text", "iota")
_MERGED_DTYPES = ("float32", "bfloat16", "uint8", "int32", "int64", "bool", "string")
_ENDLESS = -1
_FRAME_BYTES = 16
"""Around a TFRecord: its length (8), the checksum of that (4), and of the contents (4)."""


class NativeReadError(ValueError):
    """Lingvo's native reader would end the process, or hang, on what it was asked to read."""


@dataclasses.dataclass(frozen=True)
class RecordFile:
    """A file that a native reader is to read."""

    path: str
    record_type: str


@dataclasses.dataclass(frozen=True)
class NativeRead:
    """One call of the native reader that has been checked."""

    files: tuple[RecordFile, ...]
    in_order: bool
    """Whether it reads its files in order; else records come as chance has it, in each run anew."""
    is_endless: bool


def check_native_read(arguments: dict[str, Any]) -> NativeRead:
    """Checks the arguments of Lingvo's `generic_input` op.

    Args:
      arguments: As GenericInput passes them on; what is missing has the op's own default.

    Raises:
      NativeReadError: the op would abort or hang.
    """
    in_order = bool(arguments.get("require_sequential_order", False))
    repeat_count = int(arguments.get("repeat_count", _ENDLESS))
    _check_repeats(repeat_count, in_order=in_order)
    _check_positive(arguments, in_order=in_order)
    _check_dtypes(arguments.get("out_types", ()))
    weights = list(arguments.get("input_source_weights") or ())
    pattern = _as_text(arguments.get("file_pattern", ""))
    patterns = pattern.split(",") if weights else [pattern]
    if len(patterns) != max(1, len(weights)):
        raise NativeReadError(
            f"file_pattern={pattern!r} has {len(patterns)} parts, with {len(weights)} weights; "
            "expected one weight for each part."
        )
    if in_order and len(patterns) > 1:
        raise NativeReadError(
            f"file_pattern={pattern!r} mixes {len(patterns)} sources by weight, which Lingvo "
            "cannot do in order. Evaluate each source by an input of its own."
        )
    files = tuple(file for one in patterns for file in _files_of(one))
    return NativeRead(files, in_order=in_order, is_endless=repeat_count == _ENDLESS)


def _check_repeats(repeat_count: int, *, in_order: bool) -> None:
    if repeat_count != _ENDLESS and not in_order:
        raise NativeReadError(
            f"repeat_count={repeat_count}, but the records are read at random, without end. Set "
            "cluster_do_eval=True on the adaptor (with is_training=False) to read them in order, "
            "or leave repeat_count at -1."
        )
    if repeat_count < 1 and repeat_count != _ENDLESS:
        raise NativeReadError(
            f"repeat_count={repeat_count}; expected 1 or more passes, or -1 for no end."
        )


def _check_positive(arguments: dict[str, Any], *, in_order: bool) -> None:
    names = ["num_threads"] if in_order else ["num_threads", "file_buffer_size", "file_parallelism"]
    for name in names:
        if name in arguments and int(arguments[name]) < 1:
            raise NativeReadError(f"{name}={arguments[name]}; expected at least 1.")
    limits = [int(limit) for limit in arguments.get("bucket_batch_limit", ())]
    bounds = list(arguments.get("bucket_upper_bound", ()))
    if len(limits) != len(bounds) or any(limit < 1 for limit in limits):
        raise NativeReadError(
            f"bucket_batch_limit={limits} with bucket_upper_bound={bounds}; expected a batch size "
            "of at least 1 for each bucket."
        )


def _check_dtypes(out_types: Iterable[Any]) -> None:
    wrong = sorted({str(dtype.name) for dtype in out_types} - set(_MERGED_DTYPES))
    if wrong:
        raise NativeReadError(
            f"the processor of the records returns {', '.join(wrong)}; Lingvo's batcher takes only "
            f"{', '.join(_MERGED_DTYPES)}. Cast it in the processor."
        )


def _as_text(pattern: str | bytes) -> str:
    return pattern.decode() if isinstance(pattern, bytes) else str(pattern)


def _files_of(pattern: str) -> Iterator[RecordFile]:
    """The files of `TYPE:GLOB,GLOB;GLOB,PREFIX@SHARDS`, all of which must be there."""
    record_type, colon, globs = pattern.partition(":")
    if not colon or "/" in record_type:
        record_type, globs = "", pattern
    if record_type not in _RECORD_TYPES:
        raise NativeReadError(
            f"file_pattern={pattern!r} begins with the type {record_type!r}"
            f"{near_names(record_type, _RECORD_TYPES)} Expected TYPE:PATH, where TYPE is one of "
            f"{', '.join(_RECORD_TYPES)}."
        )
    if record_type == "iota":  # makes up that many records, without a file
        if globs and not (globs.isdecimal() and int(globs) > 0):
            raise NativeReadError(f"file_pattern={pattern!r}; expected iota:COUNT, at least 1.")
        return
    for part in re.split("[,;]", globs):
        paths = _paths_of(part, pattern)
        yield from (RecordFile(path, record_type) for path in paths)


def _paths_of(part: str, pattern: str) -> list[str]:
    gfile = require("tensorflow", needed_by="Lingvo inputs").io.gfile
    paths = [path for path in gfile.glob(_shards_as_glob(part)) if not gfile.isdir(path)]
    if not paths:
        raise NativeReadError(f"no file matches {part!r}, of file_pattern={pattern!r}.")
    if not any(gfile.stat(path).length for path in paths):
        raise NativeReadError(f"every file that matches {part!r} is empty.")
    return sorted(paths)


def _shards_as_glob(part: str) -> str:
    """`name@3` as `name-?????-of-00003`."""
    prefix, at, shards = part.partition("@")
    if not at:
        return part
    if shards == "*":
        return f"{prefix}-?????-of-?????"
    if not (shards.isdecimal() and int(shards) <= 99_999):
        raise NativeReadError(f"{part!r}: expected a number of shards, or *, after the @.")
    return f"{prefix}-?????-of-{int(shards):05d}"


def check_records(files: Iterable[RecordFile]) -> int:
    """Reads through files of TFRecords and checks every checksum, as TensorFlow does.

    Lingvo's reader never returns from a damaged record. Text cannot be damaged in this way.

    Returns:
      How many records there are.

    Raises:
      BadRecordError: a record is damaged; the message names the file and the record.
    """
    tensorflow = require("tensorflow", needed_by="Lingvo inputs")
    total = 0
    for file in files:
        if not file.record_type.startswith("tfrecord"):
            continue
        try:
            count, num_bytes = _count(tensorflow, file)
        except tensorflow.errors.OpError as error:
            number, problem = first_damaged(file) or (0, words_of(error.message))
            raise _damaged(file, number, problem) from None
        # TensorFlow takes a header that was cut short for the end.
        length = tensorflow.io.gfile.stat(file.path).length
        if file.record_type == "tfrecord" and num_bytes != length:
            raise _damaged(file, count, f"truncated record at {num_bytes}")
        total += count
    return total


def _count(tensorflow: Any, file: RecordFile) -> tuple[int, int]:
    """Records of a file, and their bytes with what frames each: its length and two checksums."""
    zero = tensorflow.constant(0, tensorflow.int64)

    def add(sums: Any, record: Any) -> Any:
        size = tensorflow.cast(tensorflow.strings.length(record), tensorflow.int64)
        return sums[0] + 1, sums[1] + size + _FRAME_BYTES

    count, num_bytes = _records_of(tensorflow, file).reduce((zero, zero), add)
    return int(count), int(num_bytes)


def _damaged(file: RecordFile, number: int, problem: str) -> BadRecordError:
    return BadRecordError(
        f"{file.path}, record {number}: {problem}. Lingvo cannot skip damaged records: write the "
        "file again."
    )


def first_damaged(file: RecordFile) -> tuple[int, str] | None:
    """Number of the first damaged record of a file of TFRecords, and what is wrong with it."""
    tensorflow = require("tensorflow", needed_by="Lingvo inputs")
    number = 0
    try:
        for _ in _records_of(tensorflow, file):
            number += 1
    except tensorflow.errors.OpError as error:
        return number, words_of(error.message)
    return None


def words_of(message: str) -> str:
    """TensorFlow's message without the names of its graph."""
    without_names = re.sub(r"\[\[.*|\[Op:.*|\{\{[^}]*\}\}", "", message, flags=re.DOTALL)
    return " ".join(without_names.split())


def _records_of(tensorflow: Any, file: RecordFile) -> Any:
    compression = "GZIP" if file.record_type == "tfrecord_gzip" else ""
    return tensorflow.data.TFRecordDataset(file.path, compression_type=compression)
