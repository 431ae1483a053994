"""Fixture of the tests in this folder: a mesh that shows the layout of arrays."""

from __future__ import annotations

import jax
import pytest

from layerkit.sharding import BoundSharding


@pytest.fixture(scope="session")
def sharding():
    auto = (jax.sharding.AxisType.Auto,) * 3
    return BoundSharding(jax.make_mesh((2, 2, 2), ("data", "tensor", "context"), axis_types=auto))
