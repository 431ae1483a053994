"""The public names of the runner: each is found, and none loads JAX before it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import layerkit_runner


@pytest.mark.parametrize("name", layerkit_runner.__all__)
def test_public_name_is_the_object_of_its_module(name: str):
    found = getattr(layerkit_runner, name)
    assert found.__name__ == name
    assert getattr(sys.modules[found.__module__], name) is found


def test_misspelled_public_name_names_the_nearest(raises):
    with raises(AttributeError, owner="layerkit_runner", value="Lerner"):
        _ = layerkit_runner.Lerner


def test_import_of_the_package_loads_no_jax():
    code = "import sys, layerkit_runner; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
