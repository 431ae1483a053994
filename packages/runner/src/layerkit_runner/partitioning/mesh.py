"""Device meshes, and the padding of the arrays of a state that a mesh does not divide.

`ici_mesh_shape` arranges the devices of one slice (fast network), and `dcn_mesh_shape` arranges the
slices or hosts. The mesh is their elementwise product, with the slow network outermost.

An optimizer keeps arrays shaped like the weights in trees with the same paths. Such an array has
the axes of the weight whose path is the end of its path; dimensions reduced to size 1 have no axis.
Arrays of other shapes (counters, the moments of `optax.adafactor`) are replicated.

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
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import DictKey, KeyPath

from layerkit.base.weights import is_box
from layerkit.errors import first_names
from layerkit_runner.errors import UsageError
from layerkit_runner.files.text import size_text

_LOG = logging.getLogger("layerkit.mesh")


def make_mesh(
    axis_names: Sequence[str],
    *,
    ici_mesh_shape: Sequence[int] | None = None,
    dcn_mesh_shape: Sequence[int] | None = None,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Arrange devices in a mesh.

    Args:
      axis_names: Names of the mesh axes.
      ici_mesh_shape: Size of each axis within one slice; None puts all devices of a slice on the
        first axis.
      dcn_mesh_shape: Size of each axis across slices; None for one slice. If `ici_mesh_shape` is
        None too, all slices that exist are on the first axis.
      devices: Devices to arrange; by default all devices of all processes.

    Raises:
      UsageError: Sizes do not match the names, the number of devices or the slices.
    """
    devices = list(jax.devices() if devices is None else devices)
    ones = [1] * (len(axis_names) - 1)
    if dcn_mesh_shape is None and ici_mesh_shape is None:
        dcn_mesh_shape = [num_tpu_slices(devices), *ones]
    dcn_mesh_shape = dcn_mesh_shape or [1, *ones]
    if ici_mesh_shape is None:
        # The shape may hold a 0, which the check below reports.
        num_slices = max(math.prod(dcn_mesh_shape), 1)
        ici_mesh_shape = [max(len(devices) // num_slices, 1), *ones]
    for field, shape in (("ici_mesh_shape", ici_mesh_shape), ("dcn_mesh_shape", dcn_mesh_shape)):
        if len(shape) != len(axis_names) or any(size < 1 for size in shape):
            raise UsageError(
                field=f"partitioner.{field}",
                value=list(shape),
                expected=f"one size of at least 1 for each of {', '.join(axis_names)}",
            )
    needed = math.prod(ici_mesh_shape) * math.prod(dcn_mesh_shape)
    if needed != len(devices):
        kind = devices[0].device_kind if devices else "none"
        raise UsageError(
            f"the mesh needs {needed} devices, but there are {len(devices)} ({kind})",
            field="partitioner.ici_mesh_shape",
            value=list(ici_mesh_shape),
            settings=mesh_settings(len(devices), len(axis_names), dcn_mesh_shape),
        )
    arranged = _arrange(list(ici_mesh_shape), list(dcn_mesh_shape), devices)
    return Mesh(arranged, tuple(axis_names), axis_types=(AxisType.Auto,) * len(axis_names))


def mesh_settings(
    num_devices: int,
    num_axes: int,
    dcn_mesh_shape: Sequence[int] | None = None,
    *,
    num_slices: int = 1,
) -> dict[str, list[int] | None]:
    """Return the fields of a mesh that has all devices and slices on the first of its axes."""
    ones = [1] * (num_axes - 1)
    fields: dict[str, list[int] | None] = {}
    fields["partitioner.ici_mesh_shape"] = [num_devices // num_slices, *ones]
    if num_slices > 1:
        fields["partitioner.dcn_mesh_shape"] = [num_slices, *ones]
    elif math.prod(dcn_mesh_shape or ()) > 1:
        fields["partitioner.dcn_mesh_shape"] = None
    return fields


def num_tpu_slices(devices: Sequence[Any]) -> int:
    """Return the number of TPU slices of the devices; 1 for other devices."""
    slices = {getattr(device, "slice_index", None) for device in devices}
    return len(slices) if devices and devices[0].platform == "tpu" else 1


def _arrange(ici: list[int], dcn: list[int], devices: list[Any]) -> np.ndarray:
    num_slices = num_tpu_slices(devices)
    if math.prod(dcn) % num_slices:
        raise UsageError(
            field="partitioner.dcn_mesh_shape",
            value=dcn,
            expected=f"sizes whose product is a multiple of {num_slices}, the number of slices of"
            f" {len(devices) // num_slices} devices each",
        )
    shape = [d * i for d, i in zip(dcn, ici, strict=True)]
    if math.prod(dcn) == 1 or (devices[0].platform == "tpu" and num_slices == 1):
        # All chips of a slice are on one torus, so ICI and DCN axes need not be kept apart.
        return _arrange_on_torus(mesh_utils.create_device_mesh, shape, devices=devices)
    slices = {getattr(device, "slice_index", None) for device in devices}
    if len(slices) == math.prod(dcn) and None not in slices:
        return _arrange_on_torus(mesh_utils.create_hybrid_device_mesh, ici, dcn, devices=devices)
    if len({device.process_index for device in devices}) == math.prod(dcn):
        return mesh_utils.create_hybrid_device_mesh(
            ici, dcn, devices=devices, process_is_granule=True
        )
    # Simulated devices have no slice index, so consecutive devices form a slice. The axes are
    # ordered [dcn_0, ici_0, dcn_1, ici_1, …], with the slow network outermost.
    grid = np.asarray(devices, dtype=object).reshape([*dcn, *ici])
    order = [axis for dim in range(len(dcn)) for axis in (dim, len(dcn) + dim)]
    return grid.transpose(order).reshape(shape)


def _arrange_on_torus(
    arrange: Callable[..., np.ndarray], *shapes: list[int], devices: Any
) -> np.ndarray:
    """Return a mesh along whole axes of a TPU's torus, or along parts if that is impossible."""
    try:
        return arrange(*shapes, devices=devices)
    except NotImplementedError:  # No product of mesh sizes is a torus size.
        mesh = arrange(*shapes, devices=devices, allow_split_physical_axes=True)
    _LOG.warning(
        "mesh: %s does not lie along whole axes of the slice's torus, so some mesh axes use only a"
        " part of the links of a torus axis",
        " × ".join(map(str, shapes)),
    )
    return mesh


Axes = tuple[str | None, ...]
Path = tuple[Any, ...]


def axes_by_path(boxed: Any) -> dict[Path, tuple[Axes, tuple[int, ...]]]:
    """Return (axes, shape) of each weight of boxed variables `{collection: …}` by layer path."""
    leaves = jax.tree_util.tree_leaves_with_path(boxed, is_leaf=is_box)
    return {
        # The collection is a field of a state and not part of the layer's path.
        _dict_keys(path)[1:]: (box.axes, box.value.shape)
        for path, box in leaves
        if is_box(box)
    }


def map_with_axes(
    fn: Callable[[str, Axes, Any], Any], state: Any, weights: dict[Path, tuple[Axes, tuple]]
) -> Any:
    """Map `fn(path, axes, leaf)` over every array of a state, given `axes_by_path`."""

    def visit(path: KeyPath, leaf: Any) -> Any:
        return fn(jax.tree_util.keystr(path), _axes_of(_dict_keys(path), leaf, weights), leaf)

    return jax.tree_util.tree_map_with_path(visit, state)


def _axes_of(keys: Path, leaf: Any, weights: dict[Path, tuple[Axes, tuple]]) -> Axes:
    # The longest end comes first, so that `lm/final_norm/scale` does not match a weight
    # `final_norm/scale`.
    for start in range(len(keys)):
        axes, shape = weights.get(keys[start:], ((), ()))
        sizes = tuple(zip(leaf.shape, shape, strict=False))
        if len(shape) == leaf.ndim > 0 and all(size in (1, full) for size, full in sizes):
            return tuple(
                axis if size == full else None
                for axis, (size, full) in zip(axes, sizes, strict=True)
            )
    return (None,) * leaf.ndim


def _dict_keys(path: KeyPath) -> Path:
    """Return the dict keys that a path ends with."""
    entries = itertools.takewhile(lambda entry: isinstance(entry, DictKey), reversed(path))
    return tuple(entry.key for entry in entries)[::-1]


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
        axes = mesh_axes(self.sharding.spec, self.shape)
        return tuple(_num_parts(names, self.sharding.mesh) for names in axes)

    @property
    def on_devices(self) -> jax.ShapeDtypeStruct:
        """Form on the devices between steps."""
        return jax.ShapeDtypeStruct(self.padded_shape, self.dtype, sharding=self.sharding)

    @property
    def in_storage(self) -> jax.ShapeDtypeStruct:
        """Form that storage reads and writes.

        Mesh axes of uneven dimensions split the largest dimension that they divide, if any.
        """
        axes = mesh_axes(self.sharding.spec, self.shape)
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
    return jax.jit(array.cut, out_shardings=array.in_storage.sharding)


@functools.lru_cache
def _padding(array: UnevenArray) -> Any:
    return jax.jit(array.padded, out_shardings=array.sharding)


def padding_text(uneven: Uneven) -> str:
    """Return the padded dimensions with their mesh axes and the bytes of padding; "" if none.

    An example is `vocab 50257 → 50264 over tensor (lm/softmax/w); 16.1 kB per device`.
    """
    changes: dict[str, list[str]] = {}
    for path, array in uneven.items():
        sizes = zip(array.axes, array.shape, array.padded_shape, strict=True)
        over = mesh_axes(array.sharding.spec, array.shape)
        for (name, size, to), axes in zip(sizes, over, strict=True):
            if size != to:
                change = f"{name} {size} → {to} over {' × '.join(axes)}"
                changes.setdefault(change, []).append(path)
    if not changes:
        return ""
    extra = 0.0
    for array in uneven.values():
        more = math.prod(array.padded_shape) - math.prod(array.shape)
        extra += more * array.dtype.itemsize / math.prod(array.parts)
    parts = [f"{change} ({_names(paths)})" for change, paths in changes.items()]
    return f"{', '.join(parts)}; {size_text(extra)} per device"


def _names(paths: list[str]) -> str:
    weights = [path for path in paths if path.startswith(".params")] or paths
    return first_names(
        (path.partition("[")[2].strip("'[]").replace("']['", "/") for path in weights), limit=3
    )


def mesh_axes(spec: PartitionSpec, shape: tuple[int, ...]) -> list[tuple[str, ...]]:
    """Return the mesh axes that split each dimension."""
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    return [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in entries]


def split_over(
    spec: PartitionSpec, shape: tuple[int, ...], *, mesh: Any, axes: Sequence[str]
) -> PartitionSpec:
    """Split the largest dimension that allows it over the axes that an array does not use.

    If weights are replicated over `data`, so are the optimizer's state and the averages by the
    rules. Splitting these, and with them the update, over the replicas is ZeRO stage 1 (Rajbhandari
    et al., 2020, arXiv:1910.02054): the compiler sums the gradient of a part on the device that
    updates it, and gathers the new weights.
    """
    split = mesh_axes(spec, shape)
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
