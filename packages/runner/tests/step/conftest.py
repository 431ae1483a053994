from __future__ import annotations

from collections.abc import Callable

import jax
import pytest

from layerkit_runner.partitioning import Partitioner, PmapPartitioner, SpmdPartitioner


@pytest.fixture
def start() -> Callable[[str], Partitioner]:
    """Return a function that starts a partitioner of "one device", a "mesh" or "pmap"."""

    def start(kind: str) -> Partitioner:
        partitioner: Partitioner = PmapPartitioner()
        if kind != "pmap":
            partitioner = SpmdPartitioner(ici_mesh_shape=[4, 2, 1] if kind == "mesh" else [1, 1, 1])
        partitioner.start(jax.devices()[:1] if kind == "one device" else None)
        return partitioner

    return start
