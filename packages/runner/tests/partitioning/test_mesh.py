"""make_mesh: where each device stands, by hand."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from layerkit_runner.errors import UsageError
from layerkit_runner.partitioning import make_mesh
from layerkit_runner.tools.plan.hardware import parse_target
from layerkit_runner.tools.plan.targets import target_devices

AXES = ("data", "fsdp", "tensor")


def ids(mesh: jax.sharding.Mesh) -> list:
    return np.vectorize(lambda device: device.id)(mesh.devices).tolist()


def test_mesh_of_one_slice_has_the_sizes_of_its_axes():
    mesh = make_mesh(AXES, ici_mesh_shape=[2, 4, 1])
    assert dict(mesh.shape) == {"data": 2, "fsdp": 4, "tensor": 1}
    assert sorted(np.ravel(ids(mesh))) == list(range(8))
    assert mesh.axis_types == (AxisType.Auto,) * 3


def test_by_default_all_devices_are_on_the_first_axis():
    assert dict(make_mesh(AXES).shape) == {"data": 8, "fsdp": 1, "tensor": 1}
    assert dict(make_mesh(["batch"], devices=jax.devices()[:3]).shape) == {"batch": 3}
    # So are all devices of a slice.
    mesh = make_mesh(["data", "fsdp"], dcn_mesh_shape=[1, 2])
    assert ids(mesh) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_by_default_all_devices_of_a_mesh_with_stages_are_on_the_axis_of_data():
    assert dict(make_mesh(("stage", "data", "fsdp")).shape) == {"stage": 1, "data": 8, "fsdp": 1}


def test_slices_are_the_outermost_part_of_an_axis():
    # Two slices of four consecutive devices, each 2 × 2 of fsdp × tensor. Along fsdp, devices 0 and
    # 2 (one slice) come before 4 and 6.
    mesh = make_mesh(["fsdp", "tensor"], ici_mesh_shape=[2, 2], dcn_mesh_shape=[2, 1])
    assert ids(mesh) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    mesh = make_mesh(["fsdp", "tensor"], ici_mesh_shape=[2, 2], dcn_mesh_shape=[1, 2])
    assert ids(mesh) == [[0, 1, 4, 5], [2, 3, 6, 7]]


@pytest.mark.parametrize(
    ("shapes", "field"),
    [
        ({"ici_mesh_shape": [1, 4, 1]}, "ici_mesh_shape"),
        ({"ici_mesh_shape": [1, 4, 1], "dcn_mesh_shape": [4, 1, 1]}, "ici_mesh_shape"),
        ({"dcn_mesh_shape": [3, 1, 1]}, "ici_mesh_shape"),
        ({"ici_mesh_shape": [8, 1]}, "ici_mesh_shape"),
        ({"ici_mesh_shape": [8, 1, 1], "dcn_mesh_shape": [1, 0, 1]}, "dcn_mesh_shape"),
    ],
)
def test_shape_that_does_not_match_the_devices_is_an_error(raises, shapes: dict, field: str):
    with raises(UsageError, field=f"partitioner.{field}"):
        make_mesh(AXES, **shapes)


def tpu_devices(slice_shape: str, num_slices: int = 1) -> list:
    """Return devices of a topology, for which programs can be compiled."""
    pytest.importorskip("libtpu", reason="the compiler of TPUs is not installed")
    return target_devices(parse_target(f"{slice_shape}*{num_slices}"))


def coordinates(mesh: jax.sharding.Mesh) -> np.ndarray:
    """Return the torus coordinates of the chips of a mesh, `[*mesh, dimension]`."""
    return np.array([device.coords for device in mesh.devices.flat]).reshape(*mesh.devices.shape, 3)


def test_mesh_may_split_torus_axes():
    mesh = make_mesh(AXES, ici_mesh_shape=[1, 64, 4], devices=tpu_devices("v5e:16x16"))
    # Four neighbors in a row share the work of a tensor axis.
    assert np.array_equal(np.ptp(coordinates(mesh), axis=2)[0, :, 0], np.full(64, 3))


def test_dcn_shape_within_one_tpu_slice_uses_the_torus():
    devices = tpu_devices("v5p:4x4x4")
    whole = make_mesh(AXES, ici_mesh_shape=[1, 64, 1], devices=devices)
    parts = make_mesh(AXES, ici_mesh_shape=[1, 8, 1], dcn_mesh_shape=[1, 8, 1], devices=devices)
    assert ids(whole) == ids(parts)


def test_default_mesh_has_all_tpu_slices_on_the_first_axis():
    devices = tpu_devices("v5e:2x2", 2)
    mesh = make_mesh(["batch"], devices=devices)
    assert [device.slice_index for device in mesh.devices] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_mesh_of_fewer_slices_than_the_devices_is_an_error(raises):
    devices = tpu_devices("v5e:2x2", 2)
    with raises(UsageError, field="partitioner.dcn_mesh_shape", value=[1, 1, 1]):
        make_mesh(AXES, ici_mesh_shape=[1, 8, 1], devices=devices)
