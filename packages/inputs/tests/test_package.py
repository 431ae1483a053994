"""Tests of the public names of the package and of its imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

import layerkit_inputs


def test_every_exported_name_exists():
    for name in layerkit_inputs.__all__:
        assert getattr(layerkit_inputs, name).__name__ == name


def test_unknown_name_suggests_the_nearest_one(raises):
    with raises(AttributeError, owner="layerkit_inputs", value="LocalTexts"):
        _ = layerkit_inputs.LocalTexts


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import layerkit_inputs", {"numpy", "jax", "tensorflow"}),
        ("from layerkit_inputs import *", {"jax", "flax", "tensorflow", "torch"}),
        (
            "from layerkit_inputs import LocalText; LocalText(batch_size=2).get_next()",
            {"jax", "flax", "tensorflow", "torch"},
        ),
    ],
)
def test_a_fresh_interpreter_loads_nothing_heavy(statement: str, absent: set[str]):
    code = f"{statement}\nimport sys\nprint(*sorted({absent!r} & sys.modules.keys()))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert result.stdout.split() == []
