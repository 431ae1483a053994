"""A state as a checkpoint stores it: its named leaves, and the two formats of their files.

A checkpoint stores no Python classes: a state is a set of leaves, each named by its path
(`params/layers/w`, `opt_state/0/mu/layers/w`), with a shape and a dtype. They are compared with
those of a run, and those that are not finite are found.

Readers recognize the format by the files. `TENSORSTORE` stores each array in chunks, which all
processes write and read; Orbax does that (`handlers.py`). `MSGPACK` is one file, written by one
process, for a state that each device holds whole, as under pmap.

The single file is a stream of msgpack objects: a header (format, version, and path, shape and
dtype of every leaf), then each leaf's little-endian bytes in pieces, in the header's order.
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import enum
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from layerkit.base.sharding import HOST_MEMORY
from layerkit.errors import ConfigError, first_names
from layerkit_runner.checkpointing.errors import later_version
from layerkit_runner.checkpointing.integrity import Entry, Hasher
from layerkit_runner.errors import NonFiniteError
from layerkit_runner.files.atomic_write import open_read

LeafPath = tuple[str, ...]

OPT_STATE = "opt_state"
"""First name of the paths of the optimizer's state."""

_STATISTICS = "spikes"
"""First name of the paths of statistics that begin empty if their settings changed."""

# A model of another depth differs in every layer.
_MAX_SHOWN = 6
# Parts that may hold infinities, such as the best value so far of an optimizer, but no NaN.
_MAY_BE_INFINITE = frozenset({OPT_STATE, "non_trainable", "ema_statistics"})
# JAX blocks while more than 32 programs wait for a CPU.
_ARRAYS_PER_PROGRAM = 16
_FIT_HINT = (
    "Restore with the configuration that wrote the checkpoint, which modes other than train read"
    " from the job folder if --exp is left out, or initialize a new job from it (--init_from)."
)
_CAST_HINT = (
    "Restore with the dtypes that wrote the checkpoint, or convert floating-point numbers with"
    " --restore_cast_dtypes."
)


class StructureMismatchError(ConfigError):
    """A stored state that differs in names, shapes or dtypes: `differences` has a line per leaf."""

    differences: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """Shape and dtype of a leaf."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        """Return the specification as `float32[4, 8]`."""
        return f"{self.dtype.name}{list(self.shape)}"


def named_leaves(tree: Any) -> dict[LeafPath, Any]:
    """Return the leaves of any pytree by path, in the order of the tree."""
    leaves: dict[LeafPath, Any] = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        path = tuple(jax.tree_util.keystr((key,), simple=True) for key in keys)
        if path in leaves:
            problem = "two leaves of the state have the same name"
            raise ConfigError(problem, field="leaf", value=join(path))
        leaves[path] = leaf
    return leaves


def check_storable(leaves: Mapping[LeafPath, Any]) -> None:
    """Raise an error if a leaf cannot be stored, before any thread or file of a save exists.

    Raises:
      TypeError: A leaf is no array, a typed random key, or empty.
      RuntimeError: An array was donated or deleted.
    """
    for path, leaf in leaves.items():
        is_array = isinstance(leaf, jax.Array) and leaf.size > 0
        if not is_array or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise TypeError(f"cannot save {join(path)}, a {type(leaf).__name__}: {leaf!r}")
        if leaf.is_deleted():
            raise RuntimeError(f"cannot save {join(path)}: the array was deleted.")


def check_match(
    stored: Mapping[LeafPath, LeafSpec],
    targets: Mapping[LeafPath, Any],
    *,
    where: str,
    cast_dtypes: bool = False,
) -> None:
    """Raise `StructureMismatchError` if stored leaves differ from those to restore.

    `cast_dtypes` allows floating-point dtypes of another width.
    """
    fatal, castable = find_differences(stored, targets)
    if fatal or (castable and not cast_dtypes):
        differences = sorted(fatal + castable)
        count, shown = len(differences), differences[:_MAX_SHOWN]
        if count > _MAX_SHOWN:
            shown.append(f"… and {count - _MAX_SHOWN} more")
        problem = f"does not fit the state to restore ({count} difference{'s' * (count > 1)}):"
        hint = _FIT_HINT if fatal else _CAST_HINT
        error = StructureMismatchError("\n  ".join([problem, *shown]), owner=where, hint=hint)
        error.differences = tuple(differences)
        raise error


def start_empty(
    stored: dict[LeafPath, LeafSpec], targets: Mapping[LeafPath, Any]
) -> tuple[dict[LeafPath, LeafSpec], dict[LeafPath, jax.Array]]:
    """Return the stored leaves to read, and zeros for statistics that are not stored alike."""
    expected = {path: spec_of(leaf) for path, leaf in targets.items() if path[0] == _STATISTICS}
    others = {path: spec for path, spec in stored.items() if path[0] != _STATISTICS}
    if stored == others | expected:
        return stored, {}
    zeros = {
        path: jnp.zeros(spec.shape, spec.dtype, device=targets[path].sharding)
        for path, spec in expected.items()
    }
    return others, zeros


def find_differences(
    stored: Mapping[LeafPath, LeafSpec], targets: Mapping[LeafPath, Any]
) -> tuple[list[str], list[str]]:
    """Return lines about (other differences, dtypes that may be cast) of stored leaves."""
    expected = {path: spec_of(leaf) for path, leaf in targets.items()}
    unexpected = [join(path) for path in stored if path not in expected]
    fatal: list[str] = []
    castable: list[str] = []
    for path in sorted(stored.keys() | expected.keys()):
        name, was, becomes = join(path), stored.get(path), expected.get(path)
        if was is None:
            near = difflib.get_close_matches(name, unexpected, n=1, cutoff=0.8)
            hint = f"; the nearest name there is {near[0]}" if near else ""
            fatal.append(f"{name}: missing in the checkpoint, expected {becomes}{hint}")
        elif becomes is None:
            fatal.append(f"{name}: unexpected, {was} in the checkpoint")
        elif was.shape != becomes.shape:
            fatal.append(
                f"{name}: shape {list(was.shape)} in the checkpoint, expected {list(becomes.shape)}"
            )
        elif was.dtype != becomes.dtype:
            lines = castable if is_castable(was.dtype, becomes.dtype) else fatal
            lines.append(
                f"{name}: dtype {was.dtype.name} in the checkpoint, expected {becomes.dtype.name}"
            )
    return fatal, castable


def is_castable(stored: np.dtype, target: np.dtype) -> bool:
    """Return whether both are floating-point dtypes of more than eight bits, without scales."""
    return all(
        jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1 for dtype in (stored, target)
    )


def cast_lines(stored: Mapping[LeafPath, LeafSpec], targets: Mapping[LeafPath, Any]) -> list[str]:
    """Return one line for each pair of dtypes that is cast."""
    pairs = collections.Counter(
        (stored[path].dtype.name, spec_of(leaf).dtype.name) for path, leaf in targets.items()
    )
    return [
        f"converted {count} array{'s' * (count > 1)} from {was} to {becomes}"
        for (was, becomes), count in sorted(pairs.items())
        if was != becomes
    ]


def spec_of(leaf: Any) -> LeafSpec:
    """Return the shape and dtype of an array or of a description of one."""
    return LeafSpec(tuple(leaf.shape), np.dtype(leaf.dtype))


def join(path: LeafPath) -> str:
    """Return the path as text: `params/layers/w`."""
    return "/".join(path)


class FiniteCheck:
    """A search for NaN and infinities in a state, which runs on the devices without blocking.

    All processes that share the arrays have to make one, and get the same result. The arrays may be
    donated afterwards, since their devices run the search first.
    """

    def __init__(self, leaves: Mapping[LeafPath, jax.Array]):
        """Start the search."""
        alike: dict[Any, list[LeafPath]] = collections.defaultdict(list)
        for path, leaf in leaves.items():
            if jnp.issubdtype(leaf.dtype, jnp.inexact):
                may_be_infinite = path[0] in _MAY_BE_INFINITE
                alike[spec_of(leaf), leaf.sharding, may_be_infinite].append(path)
        self._flags: dict[LeafPath, jax.Array] = {}
        for (_, sharding, may_be_infinite), paths in alike.items():
            mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
            find = _finder(mesh, may_be_infinite)
            # A program copies its arrays in host memory to the devices.
            count = 1 if sharding.memory_kind == HOST_MEMORY else _ARRAYS_PER_PROGRAM
            for start in range(0, len(paths), count):
                some = paths[start : start + count]
                flags = find([leaves[path] for path in some])
                self._flags |= zip(some, flags, strict=True)

    def nonfinite(self) -> list[LeafPath]:
        """Wait for the result: the paths of arrays with NaN or a forbidden infinity."""
        flags = jax.device_get(self._flags)
        return [path for path, is_bad in flags.items() if is_bad]


def require_finite(claim: str, leaves: Mapping[LeafPath, jax.Array], hint: str) -> None:
    """Raise NonFiniteError, which opens with `claim`, if an array is not finite."""
    paths = FiniteCheck(leaves).nonfinite()
    if paths:
        raise NonFiniteError(f"{claim}: {describe(paths)}. Expected finite values. {hint}")


def describe(paths: Sequence[LeafPath]) -> str:
    """Return a text that names the first of the arrays that `FiniteCheck` found."""
    return f"NaN or infinite values in {first_names(map(join, paths), limit=4)}"


# One program for arrays that are alike, such as a weight's two moments, and for all saves.
@functools.lru_cache
def _finder(mesh: Any, may_be_infinite: bool) -> Callable[[list[jax.Array]], list[jax.Array]]:  # noqa: FBT001
    def find(arrays: list[jax.Array]) -> list[jax.Array]:
        def is_bad(x: jax.Array) -> jax.Array:
            x = jax.device_put(x, jax.memory.Space.Device)  # It may be in host memory.
            # NaN and infinities times zero are NaN, and on CPUs a sum takes a third of the time of
            # a search.
            is_finite = ~jnp.isnan(jnp.sum(x * jnp.zeros((), x.dtype)))
            if not may_be_infinite:
                return ~is_finite
            return jax.lax.cond(is_finite, lambda: False, lambda: jnp.any(jnp.isnan(x)))

        return [is_bad(x) for x in arrays]

    # Replicated, so that each process can read the result.
    return jax.jit(find, out_shardings=mesh and NamedSharding(mesh, PartitionSpec()))


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


def host_copy(leaves: Mapping[LeafPath, jax.Array]) -> dict[LeafPath, Any]:
    """Copy a replicated state to the host, so that its device buffers may be donated at once."""
    for path, leaf in leaves.items():
        assert leaf.is_fully_replicated, f"{join(path)} is sharded by {leaf.sharding}"
        leaf.copy_to_host_async()
    # NumPy may share the buffer of a CPU array, which the next step may overwrite.
    return {path: np.array(leaf.addressable_data(0)) for path, leaf in leaves.items()}


def write_msgpack(
    state_directory: epath.Path, leaves: Mapping[LeafPath, np.ndarray]
) -> dict[str, Entry]:
    """Write the single file; return its entry, taken from memory, by path in the step."""
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
    return {f"state/{STATE_FILE}": hasher.entry()}


def msgpack_leaves(state_directory: epath.Path) -> dict[LeafPath, LeafSpec]:
    """Return the stored leaves of the single file; read no array."""
    with open_read(state_directory / STATE_FILE) as file:
        return _read_header(_unpacker(file), state_directory)


def read_msgpack(
    state_directory: epath.Path, targets: Mapping[LeafPath, Any]
) -> dict[LeafPath, jax.Array]:
    """Read the leaves in `targets` from the single file, in their dtypes and shardings."""
    restored: dict[LeafPath, jax.Array] = {}
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
) -> dict[LeafPath, LeafSpec]:
    header = unpacker.unpack()
    if header["format"] != _FORMAT or header["version"] > _VERSION:
        owner, field = state_directory / STATE_FILE, f"version of {header['format']}"
        raise later_version(owner, field, header["version"], _VERSION)
    return {
        tuple(leaf["path"]): LeafSpec(tuple(leaf["shape"]), jnp.dtype(leaf["dtype"]))
        for leaf in header["leaves"]
    }
