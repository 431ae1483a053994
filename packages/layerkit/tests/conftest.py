"""Configuration of layerkit's tests, with what layers of Praxis compute.

Samples for type checkers, one of which is wrong on purpose, are not collected for doctests.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import pkgutil
from pathlib import Path

import numpy as np
import pytest

collect_ignore = ["typing_samples"]


@functools.cache
def _recorded():
    return json.loads((Path(__file__).parent / "praxis" / "reference.json").read_text())


@pytest.fixture(scope="session")
def praxis():
    """Return a function from the name of a case to its arrays; see scripts/praxis_reference.py."""

    def as_arrays(entry):
        if isinstance(entry, dict):
            return {name: as_arrays(value) for name, value in entry.items()}
        array = np.asarray(entry)
        kinds = {"f": np.float32, "i": np.int32}
        return array.astype(kinds.get(array.dtype.kind, array.dtype))

    return lambda name: as_arrays(_recorded()[name])


@pytest.fixture
def layers_in():
    """Return a function from a package to the layer classes that its modules define."""

    def find(package):
        from layerkit.base_layer import BaseLayer

        found = set()
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            for _, thing in inspect.getmembers(importlib.import_module(info.name), inspect.isclass):
                if issubclass(thing, BaseLayer) and thing.__module__ == info.name:
                    found.add(thing)
        return found

    return find
