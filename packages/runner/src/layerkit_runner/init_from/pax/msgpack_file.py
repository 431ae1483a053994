"""Finds the arrays in a msgpack file of Flax without reading their contents.

The file is scanned by the lengths that it declares, each of which is compared with the bytes that
are left, so that a small file cannot ask for more memory than it has bytes. An array is an
extension of type 1 (or 3, for a scalar) whose payload is (shape, dtype, bytes), again in msgpack.
An array of more than a GiB is a map with its shape and several such arrays.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from typing import IO, Any

import jax.numpy as jnp
import numpy as np

from layerkit_runner.checkpointing.structure import LeafSpec

_MAX_DEPTH = 100
_MAX_ITEMS = 2**20
_MAX_TEXT_BYTES = 64 * 2**20
_ARRAY_TYPES = (1, 3)
_CHUNKED = "__msgpack_chunked_array__"
# Struct formats of numbers by the byte that introduces them.
_NUMBERS = dict(
    zip((*range(0xCA, 0xD4),), ("f", "d", "B", "H", "I", "Q", "b", "h", "i", "q"), strict=True)
)
# Bytes of the length of strings, bytes, extensions, arrays and maps.
_STRINGS = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_FIXED_EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_LISTS = {0xDC: 2, 0xDD: 4}
_MAPS = {0xDE: 2, 0xDF: 4}


@dataclasses.dataclass(frozen=True)
class Span:
    """Bytes of a file."""

    start: int
    size: int


@dataclasses.dataclass(frozen=True)
class ArrayInFile:
    """An array and its bytes in row-major order, in one or several places of a file."""

    spec: LeafSpec
    spans: tuple[Span, ...]


def scan(file: IO[bytes], size: int) -> Any:
    """Return the value in a file, with `ArrayInFile` for arrays and `Span` for bytes.

    Args:
      file: The file, at its start.
      size: Size of the file, in bytes.

    Raises:
      ValueError: The file is malformed, cut off, nested too deeply, or has a type that Flax does
        not write.
    """
    scanner = _Scanner(file)
    value = scanner.value(size, 0)
    if scanner.at != size:
        raise ValueError(f"{size - scanner.at} bytes after the value")
    return value


class _Scanner:
    """A reader of msgpack with its position in a file."""

    def __init__(self, file: IO[bytes]) -> None:
        """Start at the first byte."""
        self._file, self.at, self._items = file, 0, 0

    def value(self, end: int, depth: int) -> Any:
        """Read a value that ends before the byte `end`."""
        self._items += 1
        if depth > _MAX_DEPTH or self._items > _MAX_ITEMS:
            raise ValueError(f"more than {_MAX_DEPTH} levels or {_MAX_ITEMS:,} values")
        (kind,) = self._take(1, end)
        if kind <= 0x7F or kind >= 0xE0:
            return kind if kind <= 0x7F else kind - 0x100
        if kind in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[kind]
        if kind in _NUMBERS:
            number = struct.Struct(f">{_NUMBERS[kind]}")
            return number.unpack(self._take(number.size, end))[0]
        if kind <= 0x8F or kind in _MAPS:
            count = kind & 0x0F if kind <= 0x8F else self._length(_MAPS[kind], end)
            return self._map(count, end, depth)
        if kind <= 0x9F or kind in _LISTS:
            count = kind & 0x0F if kind <= 0x9F else self._length(_LISTS[kind], end)
            self._check_count(count, end)
            return [self.value(end, depth + 1) for _ in range(count)]
        if kind <= 0xBF or kind in _STRINGS:
            length = kind & 0x1F if kind <= 0xBF else self._length(_STRINGS[kind], end)
            if length > _MAX_TEXT_BYTES:
                raise ValueError(f"a text of {length:,} bytes")
            return self._take(length, end).decode()
        if kind in _BYTES:
            return self._skip(self._length(_BYTES[kind], end), end)
        if kind in _EXTENSIONS or kind in _FIXED_EXTENSIONS:
            length = _FIXED_EXTENSIONS.get(kind) or self._length(_EXTENSIONS[kind], end)
            return self._extension(length, end, depth)
        raise ValueError(f"byte {kind:#x} at {self.at - 1}")

    def _map(self, count: int, end: int, depth: int) -> Any:
        self._check_count(count, end)
        found: dict[Any, Any] = {}
        for _ in range(count):
            key = self.value(end, depth + 1)
            if not isinstance(key, (str, int)):
                raise ValueError(f"key {key!r}")
            found[key] = self.value(end, depth + 1)
        return _joined(found) if _CHUNKED in found else found

    def _extension(self, length: int, end: int, depth: int) -> ArrayInFile:
        (kind,) = self._take(1, end)
        stop = self.at + length
        if stop > end:
            raise ValueError(f"cut off at byte {end:,}")
        if kind not in _ARRAY_TYPES:
            raise ValueError(f"extension of type {kind} at byte {self.at}")
        payload = self.value(stop, depth + 1)
        if self.at != stop or not isinstance(payload, list) or len(payload) != 3:
            raise ValueError(f"malformed array before byte {stop}")
        shape, dtype, span = payload
        spec = array_spec(shape, dtype)
        if not isinstance(span, Span) or spec.num_bytes != span.size:
            raise ValueError(f"an array {spec} with other than {spec.num_bytes:,} bytes")
        return ArrayInFile(spec, (span,))

    def _length(self, num_bytes: int, end: int) -> int:
        return int.from_bytes(self._take(num_bytes, end), "big")

    def _check_count(self, count: int, end: int) -> None:
        if count > end - self.at:
            raise ValueError(f"cut off: {count:,} values in {end - self.at:,} bytes")

    def _take(self, size: int, end: int) -> bytes:
        if size > end - self.at:
            raise ValueError(f"cut off at byte {end:,}")
        content = self._file.read(size)
        if len(content) != size:
            raise ValueError(f"cut off at byte {self.at + len(content):,}")
        self.at += size
        return content

    def _skip(self, size: int, end: int) -> Span:
        if size > end - self.at:
            raise ValueError(f"cut off at byte {end:,}")
        span = Span(self.at, size)
        self.at += size
        self._file.seek(self.at)
        return span


def array_spec(shape: Any, dtype: Any) -> LeafSpec:
    """Return the shape and the dtype that a file declares.

    Raises:
      ValueError: The shape is no list of sizes, or the dtype is not one of numbers.
    """
    is_shape = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
    if not is_shape or not isinstance(dtype, str):
        raise ValueError(f"an array with shape={shape} and dtype={dtype}")
    try:
        found = np.dtype(jnp.dtype(dtype))
    except TypeError as error:
        raise ValueError(f"dtype={dtype!r}") from error
    if found.hasobject or found.names is not None:
        raise ValueError(f"dtype={dtype!r}")
    return LeafSpec(tuple(shape), found)


def _joined(found: dict[Any, Any]) -> ArrayInFile:
    """Return an array that Flax split into parts of at most a GiB."""
    shape, parts = found.get("shape"), found.get("chunks")
    if not isinstance(shape, dict) or not isinstance(parts, dict):
        raise ValueError(f"malformed {_CHUNKED}")
    arrays = [parts.get(str(number)) for number in range(len(parts))]
    pieces = [one for one in arrays if isinstance(one, ArrayInFile)]
    if not pieces or len(pieces) != len(arrays):
        raise ValueError(f"malformed {_CHUNKED}")
    spec = array_spec(
        [shape.get(str(axis)) for axis in range(len(shape))], pieces[0].spec.dtype.name
    )
    sizes = [math.prod(one.spec.shape) for one in pieces]
    if sum(sizes) != math.prod(spec.shape) or {one.spec.dtype for one in pieces} != {spec.dtype}:
        raise ValueError(f"parts of an array {spec} with {sum(sizes):,} numbers")
    return ArrayInFile(spec, tuple(span for one in pieces for span in one.spans))
