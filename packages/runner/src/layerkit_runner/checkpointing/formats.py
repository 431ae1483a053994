"""The two formats of a stored state, which readers recognize by the files.

`TENSORSTORE` stores each array in chunks, which all processes write and read; Orbax does that
(`handlers.py`). `MSGPACK` is one file, written by one process, for a state that each device holds
whole, as under pmap.

The single file is a stream of msgpack objects: a header (format, version, and path, shape and
dtype of every leaf), then each leaf's little-endian bytes in pieces, in the header's order.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import IO, Any

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
from etils import epath

from layerkit.errors import ConfigError
from layerkit_runner.checkpointing import structure
from layerkit_runner.checkpointing.errors import later_version
from layerkit_runner.checkpointing.integrity import Entry, Hasher
from layerkit_runner.files.atomic_write import open_read

STATE_FILE = "state.msgpack"
_FORMAT = "layerkit-state"
_VERSION = 1
_PIECE_BYTES = 64 * 2**20  # msgpack's own limit is 4 GiB; smaller pieces need smaller buffers


class StateFormat(enum.Enum):
    """Format of the stored state of a step."""

    TENSORSTORE = "tensorstore"
    MSGPACK = "msgpack"


@dataclasses.dataclass(frozen=True)
class RestoredCheckpoint:
    """The content of a step, with the shardings of the target.

    `casts` are lines about dtypes that were converted.
    """

    step: int
    state: Any
    input_states: Mapping[str, Any]
    metadata: Mapping[str, Any]
    casts: Sequence[str] = ()


def format_of(state_directory: epath.Path) -> StateFormat:
    """Return the format of a stored state."""
    is_file = (state_directory / STATE_FILE).exists()
    return StateFormat.MSGPACK if is_file else StateFormat.TENSORSTORE


def host_copy(leaves: Mapping[structure.LeafPath, jax.Array]) -> dict[structure.LeafPath, Any]:
    """Copy a replicated state to the host, so that its device buffers may be donated at once."""
    for path, leaf in leaves.items():
        assert leaf.is_fully_replicated, f"{structure.join(path)} is sharded by {leaf.sharding}"
        leaf.copy_to_host_async()
    # NumPy may share the buffer of a CPU array, which the next step may overwrite.
    return {path: np.array(leaf.addressable_data(0)) for path, leaf in leaves.items()}


def write_msgpack(
    state_directory: epath.Path, leaves: Mapping[structure.LeafPath, np.ndarray]
) -> Entry:
    """Write the single file and return its size and digest, taken from memory."""
    packer, hasher = msgpack.Packer(), Hasher()
    header = {
        "format": _FORMAT,
        "version": _VERSION,
        "leaves": [
            {"path": list(path), "shape": list(leaf.shape), "dtype": leaf.dtype.name}
            for path, leaf in leaves.items()
        ],
    }
    with (state_directory / STATE_FILE).open("wb") as file:

        def write(value: Any) -> None:
            content = packer.pack(value)
            file.write(content)
            hasher.add(content)

        write(header)
        for leaf in leaves.values():
            data = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
            for start in range(0, data.size, _PIECE_BYTES):
                write(data[start : start + _PIECE_BYTES].tobytes())
    return hasher.entry()


def msgpack_leaves(state_directory: epath.Path) -> dict[structure.LeafPath, structure.LeafSpec]:
    """Return the stored leaves of the single file; read no array."""
    with open_read(state_directory / STATE_FILE) as file:
        return _read_header(_unpacker(file), state_directory)


def read_msgpack(
    state_directory: epath.Path, targets: Mapping[structure.LeafPath, Any]
) -> dict[structure.LeafPath, jax.Array]:
    """Read the leaves in `targets` from the single file, in their dtypes and shardings."""
    restored: dict[structure.LeafPath, jax.Array] = {}
    with open_read(state_directory / STATE_FILE) as file:
        unpacker = _unpacker(file)
        for path, spec in _read_header(unpacker, state_directory).items():
            if path not in targets:
                for _ in range(0, spec.num_bytes, _PIECE_BYTES):
                    unpacker.skip()
                continue
            target, data = targets[path], bytearray()
            while len(data) < spec.num_bytes:
                data += unpacker.unpack()
            array = np.frombuffer(data, spec.dtype).reshape(spec.shape)
            array = array.astype(target.dtype, copy=False)
            restored[path] = jax.make_array_from_callback(
                spec.shape, target.sharding, array.__getitem__, dtype=target.dtype
            )
    return restored


def _unpacker(file: IO[bytes]) -> msgpack.Unpacker:
    # Each object is at most a piece and its few bytes of framing; the header is far smaller.
    return msgpack.Unpacker(file, max_buffer_size=2 * _PIECE_BYTES)


def _read_header(
    unpacker: msgpack.Unpacker, state_directory: epath.Path
) -> dict[structure.LeafPath, structure.LeafSpec]:
    header = unpacker.unpack()
    if header["format"] != _FORMAT or header["version"] > _VERSION:
        owner, field = state_directory / STATE_FILE, f"version of {header['format']}"
        raise later_version(ConfigError, owner, field, header["version"], _VERSION)
    return {
        tuple(leaf["path"]): structure.LeafSpec(tuple(leaf["shape"]), jnp.dtype(leaf["dtype"]))
        for leaf in header["leaves"]
    }
