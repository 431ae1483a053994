from __future__ import annotations

import jax
import pytest

from layerkit_runner.errors import UsageError
from layerkit_runner.partitioning import PmapPartitioner, SpmdPartitioner
from layerkit_runner.plan.devices import num_planned_devices, simulated_devices


@pytest.mark.parametrize(
    ("partitioner", "flags", "count"),
    [
        (SpmdPartitioner(ici_mesh_shape=[1, 4, 2]), {}, 8),
        (SpmdPartitioner(ici_mesh_shape=[1, 4, 2], dcn_mesh_shape=[2, 1, 1]), {}, 16),
        (SpmdPartitioner(ici_mesh_shape=[1, 4, 1]), {"num_devices": 4, "target": "cpu"}, 4),
        (SpmdPartitioner(), {}, 1),
        (SpmdPartitioner(), {"target": "cpu"}, 1),
        (PmapPartitioner(), {}, 1),
        (PmapPartitioner(), {"num_devices": 6}, 6),
        (PmapPartitioner(), {"target": "cpux6"}, 6),
        (PmapPartitioner(), {"target": "cpux6", "num_devices": 6}, 6),
    ],
)
def test_number_of_devices(partitioner, flags, count):
    assert num_planned_devices(partitioner, **flags) == count


@pytest.mark.parametrize(
    ("partitioner", "flags", "message"),
    [
        (
            SpmdPartitioner(ici_mesh_shape=[1, 4, 1], dcn_mesh_shape=[2, 1, 1]),
            {"target": "cpux4"},
            "--target=cpux4, but the mesh of this experiment has 8 devices"
            " (ici_mesh_shape=[1, 4, 1] × dcn_mesh_shape=[2, 1, 1]).\nLeave --target"
            " out, or give the mesh other sizes with --fdl.ICI_MESH_SHAPE=…",
        ),
        (
            PmapPartitioner(),
            {"target": "cpux4", "num_devices": 8},
            "--target=cpux4 and --num_devices=8 contradict each other",
        ),
        (PmapPartitioner(), {"num_devices": 0}, "--num_devices=0: a plan needs at least 1 device"),
        *(
            (
                PmapPartitioner(),
                {"target": target},
                f"--target={target}: the targets that exist now are cpu (simulated devices, as many"
                " as the mesh or --num_devices says) and cpuxN (N of them, such as cpux8)",
            )
            for target in ("h100x256", "v5p:8x8x4", "cpux", "cpu8")
        ),
    ],
)
def test_contradictions_and_unknown_targets_are_refused(partitioner, flags, message):
    with pytest.raises(UsageError) as caught:
        num_planned_devices(partitioner, **flags)
    assert str(caught.value) == message


def test_a_process_that_has_fewer_devices_says_so():
    started = len(jax.devices("cpu"))
    assert simulated_devices(started - 1) == jax.devices("cpu")[: started - 1]
    with pytest.raises(UsageError) as caught:
        simulated_devices(started + 1)
    assert str(caught.value) == (
        f"a plan for {started + 1} devices needs a process of its own: in this one JAX has started"
        f" with {started} CPU device(s), and their number cannot change any more"
    )
