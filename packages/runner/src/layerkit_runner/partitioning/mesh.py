"""Device meshes, the elementwise product of an ICI and a DCN mesh.

`ici_mesh_shape` arranges the devices of one slice (fast network), and `dcn_mesh_shape` arranges the
slices or hosts. The mesh is their elementwise product, with the slow network outermost.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from layerkit.config.checks import require
from layerkit_runner.errors import UsageError


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
        axis `data`, or on the first one if there is none.
      dcn_mesh_shape: Size of each axis across slices; None for one slice. If `ici_mesh_shape` is
        None too, all slices that exist are on that axis.
      devices: Devices to arrange; by default all devices of all processes.

    Raises:
      UsageError: Sizes do not match the names, the number of devices or the slices.
    """
    devices = list(jax.devices() if devices is None else devices)
    along_axis = functools.partial(along_default_axis, axis_names=axis_names)
    if dcn_mesh_shape is None and ici_mesh_shape is None:
        dcn_mesh_shape = along_axis(num_tpu_slices(devices))
    dcn_mesh_shape = dcn_mesh_shape or along_axis(1)
    if ici_mesh_shape is None:
        # The shape may hold a 0, which the check below reports.
        num_slices = max(math.prod(dcn_mesh_shape), 1)
        ici_mesh_shape = along_axis(max(len(devices) // num_slices, 1))
    for field, shape in (("ici_mesh_shape", ici_mesh_shape), ("dcn_mesh_shape", dcn_mesh_shape)):
        is_valid = len(shape) == len(axis_names) and all(size >= 1 for size in shape)
        expected = f"one size of at least 1 for each of {', '.join(axis_names)}"
        require(is_valid, None, f"partitioner.{field}", list(shape), expected, UsageError)
    needed = math.prod(ici_mesh_shape) * math.prod(dcn_mesh_shape)
    if needed != len(devices):
        kind = devices[0].device_kind if devices else "none"
        settings: dict[str, Any] = {"partitioner.ici_mesh_shape": along_axis(len(devices))}
        if math.prod(dcn_mesh_shape) > 1:
            settings["partitioner.dcn_mesh_shape"] = None
        raise UsageError(
            f"the mesh needs {needed} devices, but there are {len(devices)} ({kind})",
            field="partitioner.ici_mesh_shape",
            value=list(ici_mesh_shape),
            settings=settings,
        )
    arranged = _arrange(list(ici_mesh_shape), list(dcn_mesh_shape), devices)
    return Mesh(arranged, tuple(axis_names), axis_types=(AxisType.Auto,) * len(axis_names))


def num_mesh_devices(partitioner: Any) -> int | None:
    """Return the number of devices that a partitioner, or its config, asks for; None for all."""
    ici, dcn = (getattr(partitioner, f"{kind}_mesh_shape", None) for kind in ("ici", "dcn"))
    return None if ici is None else math.prod([*ici, *(dcn or ())])


def along_default_axis(size: int, axis_names: Sequence[str]) -> list[int]:
    """Return the sizes of a mesh that is split along `data`, or the first axis if it has none."""
    axis = "data" if "data" in axis_names else axis_names[0]
    return [size if name == axis else 1 for name in axis_names]


def num_tpu_slices(devices: Sequence[Any]) -> int:
    """Return the number of TPU slices of the devices; 1 for other devices."""
    slices = {getattr(device, "slice_index", None) for device in devices}
    return len(slices) if devices and devices[0].platform == "tpu" else 1


def _arrange(ici: list[int], dcn: list[int], devices: list[Any]) -> np.ndarray:
    num_slices = num_tpu_slices(devices)
    expected = f"sizes whose product is a multiple of {num_slices}, the number of slices of"
    expected += f" {len(devices) // num_slices} devices each"
    is_valid = math.prod(dcn) % num_slices == 0
    require(is_valid, None, "partitioner.dcn_mesh_shape", dcn, expected, UsageError)
    shape = [d * i for d, i in zip(dcn, ici, strict=True)]
    if math.prod(dcn) == 1 or (devices[0].platform == "tpu" and num_slices == 1):
        # All chips of a slice are on one torus, so ICI and DCN axes need not be kept apart.
        # Parts of a torus axis serve a mesh axis only if no whole ones fit.
        return mesh_utils.create_device_mesh(shape, devices=devices, allow_split_physical_axes=True)
    slices = {getattr(device, "slice_index", None) for device in devices}
    if len(slices) == math.prod(dcn) and None not in slices:
        return mesh_utils.create_hybrid_device_mesh(
            ici, dcn, devices=devices, allow_split_physical_axes=True
        )
    if len({device.process_index for device in devices}) == math.prod(dcn):
        return mesh_utils.create_hybrid_device_mesh(
            ici, dcn, devices=devices, process_is_granule=True
        )
    # Simulated devices have no slice index, so consecutive devices form a slice. The axes are
    # ordered [dcn_0, ici_0, dcn_1, ici_1, …], with the slow network outermost.
    grid = np.asarray(devices, dtype=object).reshape([*dcn, *ici])
    order = [axis for dim in range(len(dcn)) for axis in (dim, len(dcn) + dim)]
    return grid.transpose(order).reshape(shape)
