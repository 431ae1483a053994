from __future__ import annotations

import importlib.util

import jax
import pytest

from layerkit_runner.errors import UsageError
from layerkit_runner.partitioning import PmapPartitioner, SpmdPartitioner
from layerkit_runner.tools.plan.hardware import Target, parse_target
from layerkit_runner.tools.plan.targets import (
    described_kind,
    planned_target,
    simulated_devices,
    target_devices,
)

FSDP_4 = SpmdPartitioner(ici_mesh_shape=[1, 4, 1])
TWICE_4 = SpmdPartitioner(ici_mesh_shape=[1, 4, 1], dcn_mesh_shape=[2, 1, 1])
NODES_32 = SpmdPartitioner(ici_mesh_shape=[1, 8, 1], dcn_mesh_shape=[1, 32, 1])


@pytest.mark.parametrize(
    ("partitioner", "flags", "described", "num_slices"),
    [
        (SpmdPartitioner(ici_mesh_shape=[1, 4, 2]), {}, "cpux8", 1),
        (TWICE_4, {"target": "cpux8"}, "cpux8", 2),
        (SpmdPartitioner(), {}, "cpux1", 1),
        (PmapPartitioner(), {"num_devices": 6}, "cpux6", 1),
        (PmapPartitioner(), {"target": "cpux6", "num_devices": 6}, "cpux6", 1),
        # The mesh completes the target.
        (NODES_32, {"target": "h100"}, "h100x256", 32),
        (TWICE_4, {"target": "v4:2x2x1*2"}, "v4:2x2x1*2", 2),
        (FSDP_4, {"target": "here"}, "here", 1),
        (TWICE_4, {"default": 3}, "cpux8", 2),
    ],
)
def test_target_is_completed_from_the_mesh(partitioner, flags, described, num_slices):
    result = planned_target(partitioner, **flags)
    assert (result.describe(), result.num_slices) == (described, num_slices)


@pytest.mark.parametrize(
    ("partitioner", "flags", "field"),
    [
        (PmapPartitioner(), {"target": "cpux4", "num_devices": 8}, "--num_devices"),
        (FSDP_4, {"target": "here", "num_devices": 4}, "--num_devices"),
    ],
)
def test_contradictory_flags_raise(raises, partitioner, flags, field):
    with raises(UsageError, field=field, value=flags[field.removeprefix("--")]):
        planned_target(partitioner, **flags)


@pytest.mark.parametrize(
    ("package", "target"), [("libtpu", "v5p:2x2x1"), ("jax_plugins", "h100x8")]
)
def test_missing_compiler_raises(package, target):
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(UsageError) as caught:
        target_devices(parse_target(target))
    assert (caught.value.field, caught.value.value) == ("--target", target)
    assert caught.value.hint.startswith("pip install 'jax[")


def test_kind_of_the_devices_of_this_machine():
    devices = target_devices(Target(None))
    assert devices == jax.devices()
    kind = described_kind(Target(None), devices)
    assert kind.platform == devices[0].platform
    assert kind.device_kind == devices[0].device_kind


def test_more_simulated_devices_than_jax_has_started_raise(raises):
    started = len(jax.devices("cpu"))
    assert simulated_devices(started - 1) == jax.devices("cpu")[: started - 1]
    with raises(UsageError, value=started + 1):
        simulated_devices(started + 1)
