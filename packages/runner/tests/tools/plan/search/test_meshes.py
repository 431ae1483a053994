from __future__ import annotations

import itertools
import math

import pytest

from layerkit_runner.tools.plan.collectives import collective_traffic
from layerkit_runner.tools.plan.search.meshes import MeshShape, mesh_shapes, split_of_networks

AXES = ("data", "fsdp", "tensor")


def test_all_meshes_of_one_slice():
    found = list(mesh_shapes(AXES, current=MeshShape((1, 24, 1)), devices_per_slice=24))
    every = [
        sizes
        for sizes in itertools.product(range(1, 25), repeat=3)
        if math.prod(sizes) == 24 and sizes[2] <= 16
    ]
    assert sorted(mesh.ici for mesh in found) == every
    assert all(mesh.dcn is None for mesh in found)


def test_slices_lie_along_data_and_fsdp():
    current = MeshShape((1, 4, 1), (2, 1, 1))
    found = set(mesh_shapes(AXES, current=current, num_slices=2, devices_per_slice=4))
    assert {mesh.dcn for mesh in found} == {(2, 1, 1), (1, 2, 1)}
    assert len(found) == 2 * 6
    assert current in found
    assert {math.prod(mesh.sizes(AXES).values()) for mesh in found} == {8}


def test_other_axes_stay_as_they_are():
    axes = ("stage", *AXES)
    found = list(mesh_shapes(axes, current=MeshShape((4, 1, 2, 1)), devices_per_slice=8))
    assert {mesh.ici[0] for mesh in found} == {4}
    assert {mesh.ici[1:] for mesh in found} == {(1, 1, 2), (1, 2, 1), (2, 1, 1)}


def hlo_of(kind, groups):
    # The result on each device is 4096 bytes, of all kinds but a reduce-scatter, which has an axis'
    # part of that.
    return f"""ENTRY %main (x: f32[1024]) -> f32[1024] {{
  %x = f32[1024]{{0}} parameter(0)
  ROOT %r = f32[1024]{{0}} {kind}(%x), channel_id=1, replica_groups={groups}, to_apply=%add
}}
"""


@pytest.mark.parametrize(
    ("mesh", "axis", "groups"),
    [
        # Two slices of four devices: fsdp 2 · 4 with the slices outside, data 2 of slices alone.
        (MeshShape((1, 4, 1), (1, 2, 1)), "fsdp", "[1,8]<=[8]"),
        (MeshShape((1, 4, 1), (2, 1, 1)), "data", "[4,2]<=[2,4]T(1,0)"),
        (MeshShape((1, 4, 1), (2, 1, 1)), "fsdp", "[2,4]<=[8]"),
        # The same devices as one mesh, in nodes of four.
        (MeshShape((1, 8, 1)), "fsdp", "[1,8]<=[8]"),
        (MeshShape((2, 4, 1)), "data", "[4,2]<=[2,4]T(1,0)"),
        (MeshShape((1, 4, 2)), "fsdp", "[2,4]<=[4,2]T(1,0)"),
        (MeshShape((1, 4, 2)), "tensor", "[4,2]<=[8]"),
    ],
)
def test_bytes_of_both_networks_are_those_of_a_compiled_program(mesh, axis, groups):
    sizes = mesh.sizes(AXES)
    (traffic,) = collective_traffic(
        hlo_of("all-gather", groups), sizes, slices=[0, 0, 0, 0, 1, 1, 1, 1]
    )
    assert traffic.axes == axis
    fast, slow = split_of_networks({axis: traffic.bytes_sent}, mesh, AXES, devices_per_node=4)
    assert slow == pytest.approx(traffic.bytes_slow)
    assert fast + slow == pytest.approx(traffic.bytes_sent)
