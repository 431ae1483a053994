"""Files of token ids that other systems write, memory-mapped.

| file | content |
|---|---|
| `X.bin` beside `X.idx` | ids, and the index of Megatron-LM (`IndexedDataset` of Megatron Core) |
| `.bin` with a header | llm.c and modded-nanogpt: 256 int32 (magic, version, number of ids), ids |
| `.npy` of NumPy | one dimension of integers, as `numpy.save` writes and build-nanogpt reads |
| any other | ids alone, little-endian: `.bin` of nanoGPT, and `.npy` of OLMo and Dolma |

The files are not trusted: every number in them is compared with the sizes of the files before use.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

from layerkit_inputs.base.errors import BadRecordError

_MEGATRON = b"MMIDIDX\0\0"
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
_MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # others are floats
_NUMPY = b"\x93NUMPY"
_LLM_C_HEADER = struct.Struct("<iii1012x")
_SAMPLE = 1 << 12  # ids with which a guess of the dtype is compared
# Dtype and version by magic number: GPT-2's ids and Llama 3's.
_LLM_C_DTYPES = {20240520: ("<u2", 1), 20240801: ("<u4", 7)}


class TokenFile(NamedTuple):
    """A file of token ids."""

    path: Path
    ids: np.ndarray
    """Memory-mapped ids, integers `[ids]`."""
    sizes: np.ndarray | None = None
    """Number of ids of each document, int64 `[documents]`; None if the file has no index."""


def open_token_file(path: Path, dtype: str, *, is_stated: bool = True) -> TokenFile:
    """Map a file of token ids into memory.

    Args:
      path: File `.bin` or `.npy`.
      dtype: Dtype of the ids if the file has neither header nor index, `uint16` or `uint32`.
      is_stated: False if the dtype is a guess, which is compared with the first ids.

    Raises:
      BadRecordError: The file or its index is truncated, damaged or of an unsupported kind, or has
        another dtype than the guess.
    """
    index = path.with_suffix(".idx")
    if path.suffix == ".bin" and index.is_file():
        ids, sizes = _read_megatron(path, index)
        return TokenFile(path, ids, sizes)
    with path.open("rb") as file:
        begin = file.read(_LLM_C_HEADER.size)
    if begin.startswith(_NUMPY):
        return TokenFile(path, _map_numpy(path))
    if len(begin) == _LLM_C_HEADER.size:
        magic, version, count = _LLM_C_HEADER.unpack(begin)
        if magic in _LLM_C_DTYPES:
            stored, expected = _LLM_C_DTYPES[magic]
            _require_file(path, version == expected, "version", version, str(expected))
            return TokenFile(path, _map_ids(path, stored, len(begin), count))
    count, rest = divmod(path.stat().st_size, np.dtype(dtype).itemsize)
    _require_file(path, not rest, "size in bytes", path.stat().st_size, f"whole ids of {dtype}")
    ids = _map_ids(path, np.dtype(dtype).newbyteorder("<").str, 0, count)
    high = ids[1:_SAMPLE:2]  # the upper halves of numbers of 4 bytes
    is_wide = not is_stated and dtype == "uint16" and len(high) > 64 and high.max() <= 1
    hint = "uint32, since every second id is 0 or 1; set dtype"
    _require_file(path, not is_wide, "dtype", dtype, hint)
    return TokenFile(path, ids)


def _read_megatron(path: Path, index: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids, number of ids of each document) of a pair of files of Megatron-LM."""
    with index.open("rb") as file:
        begin = file.read(_MEGATRON_HEADER.size).ljust(_MEGATRON_HEADER.size, b"\0")
    magic, version, code, num_sequences, num_bounds = _MEGATRON_HEADER.unpack(begin)
    is_known = magic == _MEGATRON and version == 1 and code in _MEGATRON_DTYPES
    expected = f"{(_MEGATRON, 1)} and one of {sorted(_MEGATRON_DTYPES)}, the codes of integers"
    _require_file(index, is_known, "header", (magic, version, code), expected)
    size, at = index.stat().st_size, _MEGATRON_HEADER.size
    end = at + 12 * num_sequences + 8 * num_bounds
    # Data of several modes have one more byte for each sequence.
    expected = f"{end} or {end + num_sequences}, for {num_sequences} sequences, {num_bounds} bounds"
    _require_file(index, size in (end, end + num_sequences), "size in bytes", size, expected)
    sizes = _map(index, "<i4", at, num_sequences)
    pointers = _map(index, "<i8", at + 4 * num_sequences, num_sequences)
    bounds = _map(index, "<i8", at + 12 * num_sequences, num_bounds)
    stops = np.append(0, np.cumsum(sizes, dtype=np.int64))
    dtype = np.dtype(_MEGATRON_DTYPES[code])
    is_whole = (
        (sizes >= 0).all()
        and np.array_equal(pointers, stops[:-1] * dtype.itemsize)
        and [*bounds[:1], *bounds[-1:]] == [0, num_sequences]
        and (np.diff(bounds) >= 0).all()
    )
    expected = "adjacent sequences and ascending bounds of documents"
    _require_file(index, is_whole, "content", "damaged", expected)
    return _map_ids(path, dtype.str, 0, int(stops[-1])), np.diff(stops[bounds])


def _map_numpy(path: Path) -> np.ndarray:
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # the parser of headers lets errors of many kinds through
        reason = str(error).partition("\n")[0]
        raise BadRecordError(f"cannot read the array ({reason})", owner=str(path)) from None
    is_right = ids.ndim == 1 and ids.dtype.kind in "iu"
    _require_file(path, is_right, "array", (ids.dtype, ids.shape), "one dimension of integers")
    return np.asarray(ids)


def _map_ids(path: Path, dtype: str, begin: int, count: int) -> np.ndarray:
    """Map the ids that follow `begin` bytes to the end of a file."""
    size, end = path.stat().st_size, begin + count * np.dtype(dtype).itemsize
    expected = f"{end}, for {count} ids of {np.dtype(dtype).name}"
    _require_file(path, size == end, "size in bytes", size, expected)
    return _map(path, dtype, begin, count)


def _map(path: Path, dtype: str, begin: int, count: int) -> np.ndarray:
    if not count:  # An empty range cannot be mapped.
        return np.zeros(0, dtype)
    return np.asarray(np.memmap(path, dtype, mode="r", offset=begin, shape=(count,)))


def _require_file(path: Path, is_right: object, field: str, value: object, expected: str) -> None:
    if not is_right:
        raise BadRecordError(
            "damaged or unsupported", owner=str(path), field=field, value=value, expected=expected
        )
