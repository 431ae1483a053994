"""Parts of the tests in this folder: their examples, and a mesh that shows the layout of arrays."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from layerkit.base.sharding import BoundSharding


@pytest.fixture(scope="session")
def sharding():
    devices = np.reshape(jax.devices(), (2, 2, 2))
    return BoundSharding(jax.sharding.Mesh(devices, ("data", "tensor", "context")))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test without parameters the examples of its module; those of SLOW are slow."""
    is_given = metafunc.definition.get_closest_marker("parametrize") is not None
    if "example" not in metafunc.fixturenames or is_given:
        return
    slow = getattr(metafunc.module, "SLOW", ())
    examples = [
        pytest.param(
            example,
            marks=[pytest.mark.slow] * (example.layer_class in slow),
            id=example.layer_class.__name__,
        )
        for example in metafunc.module.EXAMPLES
    ]
    metafunc.parametrize("example", examples)
