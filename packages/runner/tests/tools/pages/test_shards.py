"""Rectangles of sharded arrays, compared with JAX's."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from layerkit_runner import draw_sharding
from layerkit_runner.tools.pages.shards import drawing, shards

AXES = ("data", "fsdp", "tensor")


@pytest.mark.parametrize("mesh_shape", [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 2, 4)])
@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((16, 24), P("fsdp", "tensor")),
        ((16, 24), P("tensor", "fsdp")),
        ((16, 24), P(None, ("tensor", "fsdp"))),
        ((16, 24), P(("data", "fsdp", "tensor"))),
        ((8, 16, 8), P("data", "tensor", "fsdp")),
        ((8,), P()),
        ((), P()),
    ],
    ids=str,
)
def test_rectangles_are_those_of_jax(mesh_shape, shape, spec):
    # The devices are in another order than their numbers.
    devices = np.array(jax.devices()[:8])[::-1].reshape(mesh_shape)
    sharding = NamedSharding(jax.sharding.Mesh(devices, AXES), spec)
    split = [[e] if isinstance(e, str) else [*(e or ())] for e in (*spec, *[None] * 3)][
        : len(shape)
    ]
    parts = shards(shape, split, sharding.mesh.shape, [device.id for device in devices.flat])
    bounds = {
        device.id: [(s.start or 0, s.stop or size) for s, size in zip(index, shape, strict=True)]
        for device, index in sharding.devices_indices_map(shape).items()
    }
    assert {device: part.bounds for part in parts for device in part.devices} == bounds
    count = np.zeros(shape, int)
    for part in parts:
        count[tuple(slice(*pair) for pair in part.bounds)] += 1
    assert (count == 1).all()
    assert [part.bounds for part in parts] == sorted(part.bounds for part in parts)
    picture = drawing(parts, list("abc")[: len(shape)], title="w")
    assert picture["rows"] * picture["columns"] == len(parts)
    html = draw_sharding(shape, sharding)._repr_html_()
    assert html.count("<rect") == len(parts)


def test_array_on_one_device_is_one_rectangle():
    array = jax.numpy.zeros((3, 4))
    assert draw_sharding(array.shape, array.sharding).html.count("<rect") == 1


def test_last_rectangles_of_an_uneven_split_are_smaller():
    parts = shards([10], [["fsdp"]], {"fsdp": 4}, range(4))
    assert [part.bounds for part in parts] == [[(0, 3)], [(3, 6)], [(6, 9)], [(9, 10)]]
    parts = shards([2, 5], [["data"], ["fsdp"]], {"fsdp": 4, "data": 2}, range(8))
    assert [part.devices for part in parts] == [[0], [2], [4], [1], [3], [5]]
    picture = drawing(parts, ["a", "b"], title="w")
    assert (picture["rows"], picture["columns"]) == (2, 3)
