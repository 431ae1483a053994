"""make_mesh: where each device stands, by hand."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from layerkit_runner.errors import UsageError
from layerkit_runner.partitioning import make_mesh
from layerkit_runner.tools.plan.devices import target_devices
from layerkit_runner.tools.plan.targets import parse_target

AXES = ("data", "fsdp", "tensor")


def ids(mesh: jax.sharding.Mesh) -> list:
    return np.vectorize(lambda device: device.id)(mesh.devices).tolist()


def test_one_slice():
    mesh = make_mesh(AXES, ici_mesh_shape=[2, 4, 1])
    assert dict(mesh.shape) == {"data": 2, "fsdp": 4, "tensor": 1}
    assert sorted(np.ravel(ids(mesh))) == list(range(8))
    assert mesh.axis_types == (AxisType.Auto,) * 3


def test_by_default_all_devices_are_on_the_first_axis():
    assert dict(make_mesh(AXES).shape) == {"data": 8, "fsdp": 1, "tensor": 1}
    assert dict(make_mesh(["batch"], devices=jax.devices()[:3]).shape) == {"batch": 3}


def test_by_default_all_devices_of_a_slice_are_on_the_first_axis():
    mesh = make_mesh(["data", "fsdp"], dcn_mesh_shape=[1, 2])
    assert ids(mesh) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_slices_are_the_slow_part_of_an_axis():
    # Two slices of four consecutive devices, each 2 × 2 of fsdp × tensor. Along fsdp, devices 0 and
    # 2 (one slice) come before 4 and 6.
    mesh = make_mesh(["fsdp", "tensor"], ici_mesh_shape=[2, 2], dcn_mesh_shape=[2, 1])
    assert ids(mesh) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    mesh = make_mesh(["fsdp", "tensor"], ici_mesh_shape=[2, 2], dcn_mesh_shape=[1, 2])
    assert ids(mesh) == [[0, 1, 4, 5], [2, 3, 6, 7]]


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        (
            {"ici_mesh_shape": [1, 4, 1]},
            "the mesh needs 4 devices (ici_mesh_shape=[1, 4, 1] × dcn_mesh_shape=[1, 1, 1] over"
            " data, fsdp, tensor), but there are 8 (cpu).\nFor these devices try"
            " --fdl.partitioner.ici_mesh_shape=[8,1,1]",
        ),
        (
            {"ici_mesh_shape": [1, 4, 1], "dcn_mesh_shape": [4, 1, 1]},
            "the mesh needs 16 devices (ici_mesh_shape=[1, 4, 1] × dcn_mesh_shape=[4, 1, 1] over"
            " data, fsdp, tensor), but there are 8 (cpu).\nFor these devices try"
            " --fdl.partitioner.ici_mesh_shape=[8,1,1] --fdl.partitioner.dcn_mesh_shape=None",
        ),
        (
            {"dcn_mesh_shape": [3, 1, 1]},
            "the mesh needs 6 devices (ici_mesh_shape=[2, 1, 1] × dcn_mesh_shape=[3, 1, 1] over"
            " data, fsdp, tensor), but there are 8 (cpu).\nFor these devices try"
            " --fdl.partitioner.ici_mesh_shape=[8,1,1] --fdl.partitioner.dcn_mesh_shape=None",
        ),
        (
            {"ici_mesh_shape": [8, 1]},
            "partitioner.ici_mesh_shape=[8, 1] needs one size of at least 1 for each of data, fsdp,"
            " tensor",
        ),
        (
            {"ici_mesh_shape": [8, 1, 1], "dcn_mesh_shape": [1, 0, 1]},
            "partitioner.dcn_mesh_shape=[1, 0, 1] needs one size of at least 1 for each of data,"
            " fsdp, tensor",
        ),
    ],
)
def test_shapes_that_do_not_fit(shapes: dict, text: str):
    with pytest.raises(UsageError) as caught:
        make_mesh(AXES, **shapes)
    assert str(caught.value) == text


def tpu_devices(slice_shape: str, num_slices: int = 1) -> list:
    """Devices that can be compiled for and are nowhere."""
    pytest.importorskip("libtpu", reason="the compiler of TPUs is not installed")
    return target_devices(parse_target(f"{slice_shape}*{num_slices}"))


def coordinates(mesh: jax.sharding.Mesh) -> np.ndarray:
    """Where the chips of a mesh lie in their torus, `[*mesh, dimension]`."""
    return np.array([device.coords for device in mesh.devices.flat]).reshape(*mesh.devices.shape, 3)


def test_a_mesh_that_splits_the_axes_of_a_torus(caplog):
    mesh = make_mesh(AXES, ici_mesh_shape=[1, 64, 4], devices=tpu_devices("v5e:16x16"))
    # Four neighbours in a row share the work of a tensor axis.
    assert np.array_equal(np.ptp(coordinates(mesh), axis=2)[0, :, 0], np.full(64, 3))
    assert "[1, 64, 4] does not lie along whole axes of the slice's torus" in caplog.text


def test_one_slice_is_one_torus_however_the_mesh_is_written():
    devices = tpu_devices("v5p:4x4x4")
    whole = make_mesh(AXES, ici_mesh_shape=[1, 64, 1], devices=devices)
    parts = make_mesh(AXES, ici_mesh_shape=[1, 8, 1], dcn_mesh_shape=[1, 8, 1], devices=devices)
    assert ids(whole) == ids(parts)


def test_slices_of_tpus_are_found_where_nothing_is_said():
    devices = tpu_devices("v5e:2x2", 2)
    mesh = make_mesh(["batch"], devices=devices)
    assert [device.slice_index for device in mesh.devices] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_slices_that_a_mesh_does_not_know_of_are_refused():
    with pytest.raises(UsageError) as caught:
        make_mesh(AXES, ici_mesh_shape=[1, 8, 1], devices=tpu_devices("v5e:2x2", 2))
    assert str(caught.value) == (
        "the devices lie in 2 slices, but dcn_mesh_shape=[1, 1, 1] in 1.\nTry"
        " --fdl.partitioner.dcn_mesh_shape=[2,1,1], and --fdl.partitioner.ici_mesh_shape=…"
        " for the 4 devices of one slice"
    )
