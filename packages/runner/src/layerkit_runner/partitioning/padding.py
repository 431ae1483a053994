"""Logical axes of the arrays of a state, and padding of those that the mesh does not divide.

An optimizer keeps its arrays in trees with the paths of the weights. An array shaped like the
weight whose path is the end of its path has the axes of that weight; dimensions reduced to size 1
have no axis. An array of another shape (a preconditioner, the moments of `optax.adafactor`) keeps
the axes of leading layers and experts, and the mesh axes that divide the weight divide its largest
dimension. Arrays at no weight (counters) are replicated.

Between steps, JAX holds arrays in equal parts only, so a dimension such as 50257 words on 8 devices
is rounded up with zeros at its end. A compiled step removes them first and adds them last, which
needs no communication. A checkpoint does not depend on the mesh:

    on the devices   [50264/tensor, 768]     equal parts, zeros at the end
    within a step    [50257/tensor, 768]
    in storage       [50257, 768/tensor]     equal parts of another dimension, or whole
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import KeyPath

from layerkit.base.weights import is_box
from layerkit.errors import first_names
from layerkit_runner.files.text import size_text
from layerkit_runner.optim.optimizer_groups import STACK_AXES
from layerkit_runner.optim.weight_selection import mesh_axes, weight_path

Axes = tuple[str | None, ...]
Path = tuple[Any, ...]
Declared = tuple[Axes, tuple[int, ...]]
"""Axes and shape of a weight."""

# Axes that an array keeps which has another shape than its weight: it has a part for each of these.
_KEPT_AXES = STACK_AXES | {"expert"}


def axes_by_path(boxed: Any) -> dict[Path, Declared]:
    """Return (axes, shape) of each weight of boxed variables `{collection: …}` by layer path."""
    leaves = jax.tree_util.tree_leaves_with_path(boxed, is_leaf=is_box)
    return {
        # The collection is a field of a state and not part of the layer's path.
        weight_path(path)[1:]: (box.axes, box.value.shape)
        for path, box in leaves
        if is_box(box)
    }


def map_with_axes(
    fn: Callable[[str, Axes, Any, Declared | None], Any], state: Any, weights: dict[Path, Declared]
) -> Any:
    """Map `fn(path, axes, leaf, weight)` over every array of a state, given `axes_by_path`.

    `weight` is the weight of an array of another shape, whose mesh axes the array is divided over,
    and None for all others.
    """

    def visit(path: KeyPath, leaf: Any) -> Any:
        axes, weight = _axes_of(weight_path(path), leaf, weights)
        return fn(jax.tree_util.keystr(path), axes, leaf, weight)

    return jax.tree_util.tree_map_with_path(visit, state)


def _axes_of(keys: Path, leaf: Any, weights: dict[Path, Declared]) -> tuple[Axes, Declared | None]:
    # The longest end comes first, so that `lm/final_norm/scale` does not match a weight
    # `final_norm/scale`.
    ends = (keys[start:] for start in range(len(keys)))
    weight = next((weights[end] for end in ends if end in weights), None)
    if weight is None or leaf.ndim == 0:
        return (None,) * leaf.ndim, None
    pairs = [*zip(*weight, leaf.shape, strict=False)]
    if len(weight[1]) == leaf.ndim and all(size in (1, full) for _, full, size in pairs):
        return tuple(axis if size == full else None for axis, full, size in pairs), None
    is_kept = (axis in _KEPT_AXES and size == full for axis, full, size in pairs)
    kept = weight[0][: sum(itertools.takewhile(bool, is_kept))]
    return kept + (None,) * (leaf.ndim - len(kept)), weight


@dataclasses.dataclass(frozen=True)
class UnevenArray:
    """An array that its mesh axes do not divide, with its forms on devices and in storage.

    `axes` has the logical name of each dimension, and `sharding` divides `shape` unevenly.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: Axes
    sharding: NamedSharding

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Shape on the devices: each dimension is rounded up to a multiple of its parts."""
        return tuple(
            -(-size // parts) * parts for size, parts in zip(self.shape, self.parts, strict=True)
        )

    @property
    def parts(self) -> tuple[int, ...]:
        """Number of parts that each dimension is split into."""
        axes = mesh_axes(self.sharding.spec, len(self.shape))
        return tuple(_num_parts(names, self.sharding.mesh) for names in axes)

    @property
    def on_devices(self) -> jax.ShapeDtypeStruct:
        """Form on the devices between steps."""
        return jax.ShapeDtypeStruct(self.padded_shape, self.dtype, sharding=self.sharding)

    @property
    def stored_spec(self) -> jax.ShapeDtypeStruct:
        """Form that storage reads and writes.

        Mesh axes of uneven dimensions split the largest dimension that they divide, if any.
        """
        axes = mesh_axes(self.sharding.spec, len(self.shape))
        uneven = [d for d, parts in enumerate(self.parts) if self.shape[d] % parts]
        moved = tuple(axis for dim in uneven for axis in axes[dim])
        for dim in uneven:
            axes[dim] = ()
        split_largest(axes, moved, shape=self.shape, mesh=self.sharding.mesh)
        even = NamedSharding(self.sharding.mesh, PartitionSpec(*(entry or None for entry in axes)))
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=even)

    def padded(self, x: jax.Array) -> jax.Array:
        """Return `x` `[...]` with zeros at the end of uneven dimensions, in traced code."""
        x = jax.lax.with_sharding_constraint(x, self.sharding)
        more = [(0, to - size, 0) for size, to in zip(self.shape, self.padded_shape, strict=True)]
        return jax.lax.pad(x, jnp.zeros((), x.dtype), more)

    def cut(self, x: jax.Array) -> jax.Array:
        """Return `x` `[...]` without the zeros that `padded` added, in traced code."""
        x = jax.lax.slice(x, (0,) * x.ndim, self.shape)
        return jax.lax.with_sharding_constraint(x, self.sharding)

    def to_storage(self, x: jax.Array) -> Any:
        """Return `x` `[...]` on the devices in the form of storage."""
        return _cutting(self)(x)

    def to_devices(self, x: jax.Array) -> Any:
        """Return `x` `[...]` from storage in the form of the devices."""
        return _padding(self)(x)


Uneven = Mapping[str, UnevenArray]
"""Uneven arrays by their path in a state, as `jax.tree_util.keystr` writes it."""


def map_uneven(fn: Callable[[UnevenArray, Any], Any], state: Any, uneven: Uneven) -> Any:
    """Map `fn(array, leaf)` over the uneven arrays of a state; other leaves are not copied."""
    if not uneven:
        return state

    def visit(path: Any, x: Any) -> Any:
        array = uneven.get(jax.tree_util.keystr(path))
        return x if array is None else fn(array, x)

    return jax.tree_util.tree_map_with_path(visit, state)


# All saves and all equal arrays, such as a weight and its moments, share one program.
@functools.lru_cache
def _cutting(array: UnevenArray) -> Any:
    return jax.jit(array.cut, out_shardings=array.stored_spec.sharding)


@functools.lru_cache
def _padding(array: UnevenArray) -> Any:
    return jax.jit(array.padded, out_shardings=array.sharding)


def padding_text(uneven: Uneven) -> str:
    """Return the padded dimensions with their mesh axes and the bytes of padding; "" if none.

    An example is `vocab 50257 → 50264 over tensor (lm/softmax/w); 16.1 kB per device`.
    """
    changes: dict[str, list[str]] = {}
    extra = 0.0
    for path, array in uneven.items():
        more = math.prod(array.padded_shape) - math.prod(array.shape)
        extra += more * array.dtype.itemsize / math.prod(array.parts)
        over = mesh_axes(array.sharding.spec, len(array.shape))
        sizes = zip(array.axes, array.shape, array.padded_shape, over, strict=True)
        for name, size, to, axes in sizes:
            if size != to:
                change = f"{name} {size} → {to} over {' × '.join(axes)}"
                changes.setdefault(change, []).append(path)
    parts = [f"{change} ({_names(paths)})" for change, paths in changes.items()]
    return f"{', '.join(parts)}; {size_text(extra)} per device" if parts else ""


def _names(paths: list[str]) -> str:
    weights = [path for path in paths if path.startswith(".params")] or paths
    return first_names(
        (path.partition("[")[2].strip("'[]").replace("']['", "/") for path in weights), limit=3
    )


def split_over(
    spec: PartitionSpec, shape: tuple[int, ...], *, mesh: Any, axes: Sequence[str]
) -> PartitionSpec:
    """Split the largest dimension that allows it over the axes that an array does not use.

    If weights are replicated over `data`, so are the optimizer's state and the averages by the
    rules. Splitting these, and with them the update, over the replicas is ZeRO stage 1 (Rajbhandari
    et al., 2020, arXiv:1910.02054): the compiler sums the gradient of a part on the device that
    updates it, and gathers the new weights.
    """
    split = mesh_axes(spec, len(shape))
    used = {name for names in split for name in names}
    added = tuple(axis for axis in axes if axis not in used and mesh.shape[axis] > 1)
    if added and split_largest(split, added, shape=shape, mesh=mesh):
        return PartitionSpec(*(names or None for names in split))
    return spec


def split_largest(
    axes: list[tuple[str, ...]], added: tuple[str, ...], *, shape: tuple[int, ...], mesh: Any
) -> bool:
    """Add mesh axes to the largest dimension that they divide; return False if there is none."""
    for dim in sorted(range(len(shape)), key=lambda dim: -shape[dim]):
        if shape[dim] % _num_parts(axes[dim] + added, mesh) == 0:
            axes[dim] += added
            return True
    return False


def _num_parts(axes: tuple[str, ...], mesh: Any) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)
