"""Public names: complete, defined in the listed modules, and cheap to import."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import layerkit
import layerkit.decoding
import layerkit.layers
import layerkit.models
import layerkit.testing

INDEXES = [layerkit.layers, layerkit.models, layerkit.decoding, layerkit.testing]


def imported_names(body):
    """Return name → module of the `from module import name as name` statements in `body`."""
    result = {}
    for node in body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                assert alias.asname == alias.name, "an index re-exports names as they are"
                assert alias.name not in result, f"{alias.name} is listed twice"
                result[alias.name] = node.module
    return result


def source_of(module):
    return ast.parse(Path(module.__file__).read_text())


def run_alone(code):
    """Return the output of code in a new interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_type_checkers_and_interpreter_find_the_same_names():
    blocks = [
        node.body
        for node in source_of(layerkit).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    assert len(blocks) == 1
    names = imported_names(blocks[0])
    assert layerkit.__all__ == sorted(names.keys() - {"__version__"})
    assert set(names) <= set(dir(layerkit))
    for name, module in names.items():
        assert getattr(layerkit, name) is getattr(importlib.import_module(module), name)


def test_importing_layerkit_or_its_config_loads_neither_jax_nor_flax():
    code = "import sys, layerkit\nprint(*sys.modules)"
    for names in ("layerkit.Config, layerkit.build, layerkit.NestedMap", "layerkit.BaseLayer"):
        code += f"\n{names}\nprint(*sys.modules)"
    heavy = {"jax", "jaxlib", "flax", "optax", "tensorflow"}
    package, light, whole = (set(line.split()) for line in run_alone(code).splitlines())
    assert not {*heavy, "numpy"} & package
    assert not heavy & light
    assert "jax" in whole


@pytest.mark.parametrize("index", INDEXES, ids=lambda index: index.__name__)
def test_index_lists_each_name_once_from_its_defining_module(index):
    body = source_of(index).body
    lazy = [node.body for node in body if isinstance(node, ast.If)]
    names = imported_names(lazy[0] if lazy else body)
    if lazy:
        assert index.__all__ == sorted(names)
        assert names.keys() <= set(dir(index))
    assert names
    for name, module in names.items():
        thing = getattr(index, name)
        assert thing is getattr(importlib.import_module(module), name)
        assert getattr(thing, "__module__", module) == module


def test_importing_one_layer_loads_no_other_family():
    code = "import sys; from layerkit.layers import Linear; print(*sys.modules)"
    loaded = run_alone(code).split()
    assert "layerkit.layers.basic.linears" in loaded
    assert not {"layerkit.layers.moe", "layerkit.layers.transformer.pipeline"} & set(loaded)


def test_misspelled_name_raises_with_the_nearest_name(raises):
    with raises(AttributeError, owner="layerkit.layers", value="Linaer"):
        layerkit.layers.Linaer  # noqa: B018
    with raises(AttributeError, owner="layerkit", value="NestdMap"):
        layerkit.NestdMap  # noqa: B018


# Parts that only other layers use, and abstract base classes.
INNER_LAYERS = {
    "AttentionLayer",
    "BaseAttention",
    "BaseMoeFeedForward",
    "BlockScaledDot",
    "ClassSoftmax",
    "CombinedProjection",
    "CurrentScalingDot",
    "LoraDot",
}


def test_every_layer_is_in_the_index(layers_in):
    defined = {layer.__name__ for layer in layers_in(layerkit.layers)}
    assert defined - INNER_LAYERS <= set(dir(layerkit.layers))
    assert defined >= INNER_LAYERS


def test_version_is_that_of_the_package():
    version = importlib.import_module("layerkit._version").__version__
    assert layerkit.__version__ == version
    assert all(part.isdigit() for part in version.split(".")[:2])
