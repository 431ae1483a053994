"""The two formats of a stored state, and the single-file one in full.

`TENSORSTORE` stores every array in pieces, written and read by all processes side by side; it
fits any state. `MSGPACK` is one file, written by one process, for a state that every device holds
whole, as under pmap: easy to copy about and to read anywhere. What a checkpoint holds is seen from
its files, so readers need no flag.

The single file is a stream of msgpack objects: a header (format, version, and path, shape and
dtype of every leaf), then each leaf's little-endian bytes in pieces, in the header's order. So
the structure can be checked before an array is read, and no more than one array at a time is held
besides the state. TensorStore's format is Orbax's own; see `handlers.py`.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import IO, Any

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
from etils import epath

from layerkit_runner.checkpointing import structure
from layerkit_runner.checkpointing.integrity import Entry

STATE_FILE = "state.msgpack"
_FORMAT = "layerkit-state"
_VERSION = 1
_PIECE_BYTES = 64 * 2**20  # msgpack's own limit is 4 GiB; smaller pieces need smaller buffers


class StateFormat(enum.Enum):
    """How the state of a step is stored."""

    TENSORSTORE = "tensorstore"
    MSGPACK = "msgpack"


def format_of(state_directory: epath.Path) -> StateFormat:
    """Tells the format from what is there."""
    is_file = (state_directory / STATE_FILE).exists()
    return StateFormat.MSGPACK if is_file else StateFormat.TENSORSTORE


def check_replicated(leaves: Mapping[structure.LeafPath, jax.Array]) -> None:
    """Refuses a state that no single process holds whole.

    Raises:
      ValueError: naming every leaf that is not fully replicated, with its sharding.
    """
    split = [
        f"{structure.join(path)} {structure.spec_of(leaf)} is sharded by {leaf.sharding}"
        for path, leaf in leaves.items()
        if not leaf.is_fully_replicated
    ]
    if split:
        raise ValueError(
            "The msgpack format stores a state that is replicated on all devices, but\n  "
            + "\n  ".join(split)
            + "\nSave a sharded state with StateFormat.TENSORSTORE (--pmap_use_tensorstore=True)."
        )


def host_copy(leaves: Mapping[structure.LeafPath, jax.Array]) -> dict[structure.LeafPath, Any]:
    """Copies a replicated state to the host, so that its device buffers may be donated at once."""
    for leaf in leaves.values():
        leaf.copy_to_host_async()
    # A CPU array may lend its own buffer, which the next step may overwrite: hence the copy.
    return {path: np.array(leaf.addressable_data(0)) for path, leaf in leaves.items()}


def write_msgpack(
    state_directory: epath.Path, leaves: Mapping[structure.LeafPath, np.ndarray]
) -> Entry:
    """Write the single file and return its size and digest, taken from memory."""
    packer, digest, size = msgpack.Packer(), hashlib.sha256(), 0

    def write(file: IO[bytes], content: bytes) -> None:
        nonlocal size
        file.write(content)
        digest.update(content)
        size += len(content)

    header = {
        "format": _FORMAT,
        "version": _VERSION,
        "leaves": [
            {"path": list(path), "shape": list(leaf.shape), "dtype": leaf.dtype.name}
            for path, leaf in leaves.items()
        ],
    }
    with (state_directory / STATE_FILE).open("wb") as file:
        write(file, packer.pack(header))
        for leaf in leaves.values():
            data = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
            for start in range(0, data.size, _PIECE_BYTES):
                write(file, packer.pack(data[start : start + _PIECE_BYTES].tobytes()))
    return Entry(size, digest.hexdigest())


def msgpack_leaves(state_directory: epath.Path) -> dict[structure.LeafPath, structure.LeafSpec]:
    """Reads names, shapes and dtypes of the stored leaves, and no array."""
    with (state_directory / STATE_FILE).open("rb") as file:
        return _read_header(_unpacker(file), state_directory)


def read_msgpack(
    state_directory: epath.Path, targets: Mapping[structure.LeafPath, Any]
) -> dict[structure.LeafPath, jax.Array]:
    """Reads the single file, placing each leaf under its target's sharding.

    Args:
      state_directory: the folder of the state.
      targets: stored leaves to read, with a `sharding`; shapes match already, and numbers are
        cast to the dtype.
    """
    restored: dict[structure.LeafPath, jax.Array] = {}
    with (state_directory / STATE_FILE).open("rb") as file:
        unpacker = _unpacker(file)
        for path, spec in _read_header(unpacker, state_directory).items():
            if path not in targets:
                _skip_array(unpacker, spec)
                continue
            target = targets[path]
            array = _read_array(unpacker, spec).astype(target.dtype, copy=False)
            restored[path] = jax.make_array_from_callback(
                spec.shape, target.sharding, array.__getitem__, dtype=target.dtype
            )
    return restored


def _unpacker(file: IO[bytes]) -> msgpack.Unpacker:
    # Each object is at most a piece and its few bytes of framing; the header is far smaller.
    return msgpack.Unpacker(file, max_buffer_size=2 * _PIECE_BYTES)


def _read_header(
    unpacker: Iterator[Any], state_directory: epath.Path
) -> dict[structure.LeafPath, structure.LeafSpec]:
    header = next(unpacker)
    if header["format"] != _FORMAT or header["version"] > _VERSION:
        raise ValueError(
            f"{state_directory / STATE_FILE} is {header['format']} version {header['version']}; "
            f"expected {_FORMAT} up to version {_VERSION}."
        )
    return {
        tuple(leaf["path"]): structure.LeafSpec(tuple(leaf["shape"]), jnp.dtype(leaf["dtype"]))
        for leaf in header["leaves"]
    }


def _read_array(unpacker: Iterator[Any], spec: structure.LeafSpec) -> np.ndarray:
    data = bytearray(math.prod(spec.shape) * spec.dtype.itemsize)
    position = 0
    while position < len(data):
        piece = next(unpacker)
        data[position : position + len(piece)] = piece
        position += len(piece)
    return np.frombuffer(data, dtype=spec.dtype).reshape(spec.shape)


def _skip_array(unpacker: msgpack.Unpacker, spec: structure.LeafSpec) -> None:
    for _ in range(0, math.prod(spec.shape) * spec.dtype.itemsize, _PIECE_BYTES):
        unpacker.skip()
