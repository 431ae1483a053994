"""Configuration of layerkit's tests, with what layers of Praxis compute.

Samples for type checkers, one of which is wrong on purpose, are not collected for doctests.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

collect_ignore = ["typing_samples"]


@functools.cache
def _recorded() -> dict[str, Any]:
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
