"""Device meshes: ICI × DCN, elementwise.

`ici_mesh_shape` arranges the devices of one slice (fast network), and `dcn_mesh_shape` arranges the
slices or hosts. The mesh is their elementwise product, with the slow network outermost.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from layerkit_runner.errors import UsageError

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
      UsageError: Sizes do not match the names or the number of devices.
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
                f"partitioner.{field}={list(shape)} needs one size of at least 1 for each of"
                f" {', '.join(axis_names)}"
            )
    needed = math.prod(ici_mesh_shape) * math.prod(dcn_mesh_shape)
    if needed != len(devices):
        kind = devices[0].device_kind if devices else "none"
        raise UsageError(
            f"the mesh needs {needed} devices (ici_mesh_shape={list(ici_mesh_shape)} ×"
            f" dcn_mesh_shape={list(dcn_mesh_shape)} over {', '.join(axis_names)}), but there are"
            f" {len(devices)} ({kind}).\nFor these devices try"
            f" {flags_for(len(devices), len(axis_names), dcn_mesh_shape)}"
        )
    arranged = _arrange(list(ici_mesh_shape), list(dcn_mesh_shape), devices)
    return Mesh(arranged, tuple(axis_names), axis_types=(AxisType.Auto,) * len(axis_names))


def flags_for(num_devices: int, num_axes: int, dcn_mesh_shape: Sequence[int] | None) -> str:
    """Return flags that put all devices on the first axis of a mesh with that many axes."""
    # Without blanks, so that a shell reads each flag as one word.
    sizes = ",".join(map(str, [num_devices, *[1] * (num_axes - 1)]))
    flags = f"--fdl.partitioner.ici_mesh_shape=[{sizes}]"
    has_slices = math.prod(dcn_mesh_shape or ()) > 1
    return f"{flags} --fdl.partitioner.dcn_mesh_shape=None" if has_slices else flags


def num_tpu_slices(devices: Sequence[Any]) -> int:
    """Return the number of TPU slices that devices lie in; 1 for other devices."""
    slices = {getattr(device, "slice_index", None) for device in devices}
    return len(slices) if devices and devices[0].platform == "tpu" else 1


def _arrange(ici: list[int], dcn: list[int], devices: list[Any]) -> np.ndarray:
    num_slices = num_tpu_slices(devices)
    if math.prod(dcn) % num_slices:
        sizes = ",".join(map(str, [num_slices, *dcn[1:]]))
        raise UsageError(
            f"the devices lie in {num_slices} slices, but dcn_mesh_shape={dcn} in"
            f" {math.prod(dcn)}.\nTry --fdl.partitioner.dcn_mesh_shape=[{sizes}], and"
            f" --fdl.partitioner.ici_mesh_shape=… for the"
            f" {len(devices) // num_slices} devices of one slice"
        )
    on_tpu = bool(devices) and devices[0].platform == "tpu"
    if math.prod(dcn) == 1 or (on_tpu and num_slices == 1):
        # Within a slice all chips are neighbours on a torus, wherever they are in the mesh.
        shape = [d * i for d, i in zip(dcn, ici, strict=True)]
        return _on_torus(mesh_utils.create_device_mesh, shape, devices=devices)
    slices = {getattr(device, "slice_index", None) for device in devices}
    if len(slices) == math.prod(dcn) and None not in slices:
        return _on_torus(mesh_utils.create_hybrid_device_mesh, ici, dcn, devices=devices)
    processes = {device.process_index for device in devices}
    if len(processes) == math.prod(dcn):
        return mesh_utils.create_hybrid_device_mesh(
            ici, dcn, devices=devices, process_is_granule=True
        )
    # Simulated devices have no slice index: consecutive devices form a slice.
    # Axes are then ordered [dcn_0, ici_0, dcn_1, ici_1, …], the slow network outermost.
    grid = np.asarray(devices, dtype=object).reshape([*dcn, *ici])
    order = [axis for dim in range(len(dcn)) for axis in (dim, len(dcn) + dim)]
    return grid.transpose(order).reshape([d * i for d, i in zip(dcn, ici, strict=True)])


def _on_torus(arrange: Callable[..., np.ndarray], *shapes: list[int], devices: Any) -> np.ndarray:
    """Lay mesh axes along whole axes of a TPU's torus, or along parts if that is impossible."""
    try:
        return arrange(*shapes, devices=devices)
    except NotImplementedError:  # the sizes do not multiply to those of the torus
        found = arrange(*shapes, devices=devices, allow_split_physical_axes=True)
    _LOG.warning(
        "mesh: %s does not lie along whole axes of the slice's torus, so that some mesh axes have a"
        " part of the links of one",
        " × ".join(map(str, shapes)),
    )
    return found
