from __future__ import annotations

import importlib.util

import jax
import pytest

from layerkit_runner.errors import UsageError
from layerkit_runner.partitioning import PmapPartitioner, SpmdPartitioner
from layerkit_runner.tools.plan.devices import (
    described_kind,
    num_planned_devices,
    planned_target,
    simulated_devices,
    target_devices,
)
from layerkit_runner.tools.plan.targets import Target, parse_target

FSDP_4 = SpmdPartitioner(ici_mesh_shape=[1, 4, 1])
TWICE_4 = SpmdPartitioner(ici_mesh_shape=[1, 4, 1], dcn_mesh_shape=[2, 1, 1])


@pytest.mark.parametrize(
    ("partitioner", "flags", "described", "num_slices"),
    [
        (SpmdPartitioner(ici_mesh_shape=[1, 4, 2]), {}, "cpux8", 1),
        (TWICE_4, {}, "cpux8", 2),
        (TWICE_4, {"target": "cpux8"}, "cpux8", 2),
        (FSDP_4, {"num_devices": 4, "target": "cpu"}, "cpux4", 1),
        (SpmdPartitioner(), {}, "cpux1", 1),
        (SpmdPartitioner(), {"target": "cpu"}, "cpux1", 1),
        (PmapPartitioner(), {}, "cpux1", 1),
        (PmapPartitioner(), {"num_devices": 6}, "cpux6", 1),
        (PmapPartitioner(), {"target": "cpux6"}, "cpux6", 1),
        (PmapPartitioner(), {"target": "cpux6", "num_devices": 6}, "cpux6", 1),
        # What a target leaves open, the mesh says.
        (FSDP_4, {"target": "h100"}, "h100x4", 1),
        (
            SpmdPartitioner(ici_mesh_shape=[1, 8, 1], dcn_mesh_shape=[1, 32, 1]),
            {"target": "h100"},
            "h100x256",
            32,
        ),
        (FSDP_4, {"target": "v5p"}, "v5p:2x2x1", 1),
        (FSDP_4, {"target": "v7x"}, "v7x:2x1x1", 1),
        (TWICE_4, {"target": "v5e"}, "v5e:2x2*2", 2),
        (TWICE_4, {"target": "2xv4-8"}, "v4:2x2x1*2", 2),
        (PmapPartitioner(), {"target": "v4", "num_devices": 4}, "v4:2x2x1", 1),
        (FSDP_4, {"target": "here"}, "here", 1),
    ],
)
def test_target_is_completed_from_the_mesh(partitioner, flags, described, num_slices):
    found = planned_target(partitioner, **flags)
    assert (found.describe(), found.num_slices) == (described, num_slices)


def test_number_of_simulated_devices():
    assert num_planned_devices(TWICE_4) == 8
    assert num_planned_devices(PmapPartitioner(), default=3) == 3
    assert num_planned_devices(PmapPartitioner(), num_devices=5, default=3) == 5


@pytest.mark.parametrize(
    ("partitioner", "flags", "message"),
    [
        (
            TWICE_4,
            {"target": "cpux4"},
            "--target=cpux4, but the mesh of this experiment has 8 devices"
            " (ici_mesh_shape=[1, 4, 1] × dcn_mesh_shape=[2, 1, 1]).\nFor these devices try"
            " --fdl.partitioner.ici_mesh_shape=[4,1,1] --fdl.partitioner.dcn_mesh_shape=None,"
            " or write --target=cpu for as"
            " many as it has",
        ),
        (
            TWICE_4,
            {"target": "v5p:4x4x4"},
            "--target=v5p:4x4x4 (64 devices), but the mesh of this experiment has 8 devices"
            " (ici_mesh_shape=[1, 4, 1] × dcn_mesh_shape=[2, 1, 1]).\nFor these devices try"
            " --fdl.partitioner.ici_mesh_shape=[64,1,1] --fdl.partitioner.dcn_mesh_shape=None,"
            " or write --target=v5p for as"
            " many as it has",
        ),
        (
            FSDP_4,
            {"target": "v5e:2x2*2"},
            "--target=v5e:2x2*2 (8 devices), but the mesh of this experiment has 4 devices"
            " (ici_mesh_shape=[1, 4, 1]).\nFor these devices try"
            " --fdl.partitioner.ici_mesh_shape=[4,1,1]"
            " --fdl.partitioner.dcn_mesh_shape=[2,1,1], or write --target=v5e for as"
            " many as it has",
        ),
        (
            FSDP_4,
            {"num_devices": 8},
            "--num_devices=8, but the mesh of this experiment has 4 devices"
            " (ici_mesh_shape=[1, 4, 1]).\nFor these devices try"
            " --fdl.partitioner.ici_mesh_shape=[8,1,1], or leave it out for as many as it has",
        ),
        (
            SpmdPartitioner(ici_mesh_shape=[1, 8, 1]),
            {"target": "v5e:2x2*2"},
            "--target=v5e:2x2*2 has 2 slice(s), but the mesh lies in 1"
            " (ici_mesh_shape=[1, 8, 1]).\nWith --fdl.partitioner.dcn_mesh_shape=[2,1,1] and"
            " --fdl.partitioner.ici_mesh_shape=… for the chips of one slice it lies in as many",
        ),
        (
            PmapPartitioner(),
            {"target": "cpux4", "num_devices": 8},
            "--target=cpux4 and --num_devices=8 contradict each other",
        ),
        (PmapPartitioner(), {"num_devices": 0}, "--num_devices=0: a plan needs at least 1 device"),
        (
            PmapPartitioner(),
            {"target": "here", "num_devices": 8},
            "--target=here and --num_devices=8 contradict each other: a plan for the devices of"
            " this machine takes all of them",
        ),
    ],
)
def test_contradictory_flags_are_rejected(partitioner, flags, message):
    with pytest.raises(UsageError) as caught:
        planned_target(partitioner, **flags)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("package", "target", "message"),
    [
        ("libtpu", "v5p:2x2x1", "libtpu, the compiler of TPUs, which is not installed."),
        ("jax_plugins", "h100x8", "JAX's CUDA plugin, which is not installed."),
    ],
)
def test_a_compiler_that_is_not_installed_is_named(package, target, message):
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(UsageError) as caught:
        target_devices(parse_target(target))
    assert f"--target={target} needs {message}" in str(caught.value)
    assert "pip install 'layerkit-runner[plan-" in str(caught.value)


def test_devices_that_are_here():
    devices = target_devices(Target(None))
    assert devices == jax.devices()
    kind = described_kind(Target(None), devices)
    assert kind.platform == devices[0].platform
    assert kind.device_kind == devices[0].device_kind


def test_too_few_simulated_devices_is_an_error():
    started = len(jax.devices("cpu"))
    assert simulated_devices(started - 1) == jax.devices("cpu")[: started - 1]
    with pytest.raises(UsageError) as caught:
        simulated_devices(started + 1)
    assert str(caught.value) == (
        f"a plan for {started + 1} devices needs a process of its own: in this one JAX has started"
        f" with {started} CPU device(s), and their number cannot change any more"
    )
