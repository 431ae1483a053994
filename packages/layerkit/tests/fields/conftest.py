"""Fixture of the tests in this folder: a mesh that shows the layout of arrays."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from layerkit.base.sharding import BoundSharding


@pytest.fixture(scope="session")
def sharding():
    devices = np.reshape(jax.devices(), (2, 2, 2))
    return BoundSharding(jax.sharding.Mesh(devices, ("data", "tensor", "context")))
