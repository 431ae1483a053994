"""Tests of the public names of the package and of its imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

import layerkit_inputs


def test_every_exported_name_exists():
    for name in layerkit_inputs.__all__:
        assert getattr(layerkit_inputs, name).__name__.rpartition(".")[2] == name


def test_unknown_name_suggests_the_nearest_one(raises):
    with raises(AttributeError, owner="layerkit_inputs", value="LocalTexts"):
        _ = layerkit_inputs.LocalTexts


# One module defines subclasses of Grain's classes and is imported when Grain is used.
IMPORT_ALL = """
import pkgutil, layerkit_inputs
for module in pkgutil.walk_packages(layerkit_inputs.__path__, "layerkit_inputs."):
    if not module.name.endswith(".grain_iterators"):
        __import__(module.name)
"""
LIBRARIES = {
    *("array_record", "datasets", "flax", "grain", "jax", "lingvo", "pyarrow", "sentencepiece"),
    *("jinja2", "seqio", "tensorflow", "tensorflow_datasets", "tokenizers", "torch"),
}


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import layerkit_inputs", LIBRARIES | {"numpy"}),
        ("from layerkit_inputs import *", LIBRARIES),
        (IMPORT_ALL, LIBRARIES),
        ("from layerkit_inputs import LocalText; LocalText(batch_size=2).get_next()", LIBRARIES),
    ],
    ids=["package", "names", "modules", "batch"],
)
def test_a_fresh_interpreter_loads_nothing_heavy(statement: str, absent: set[str]):
    code = f"{statement}\nimport sys\nprint(*sorted({absent!r} & sys.modules.keys()))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert result.stdout.split() == []
