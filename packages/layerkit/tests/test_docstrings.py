"""What every file and every public function of the library keeps."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import layerkit

ROOT = Path(layerkit.__file__).parent
MAX_LINES = 500
# `[batch, length, dims]`, `[..., dims]`, or the word for an array without axes.
SHAPE = re.compile(r"`\[[^\]`]*\]`|scalar")


def modules():
    for info in pkgutil.walk_packages([str(ROOT)], "layerkit."):
        yield importlib.import_module(info.name)


def public_functions():
    """(where, function) of all functions and methods that take or give arrays."""
    for module in modules():
        for name, thing in vars(module).items():
            if name.startswith("_") or getattr(thing, "__module__", None) != module.__name__:
                continue
            if inspect.isfunction(thing):
                yield f"{module.__name__}.{name}", thing, inspect.getdoc(thing)
            elif inspect.isclass(thing):
                for method, function in vars(thing).items():
                    function = function.fget if isinstance(function, property) else function
                    function = getattr(function, "__func__", function)
                    function = inspect.unwrap(function) if callable(function) else function
                    if not method.startswith("_") and inspect.isfunction(function):
                        doc = inspect.getdoc(getattr(thing, method))
                        yield f"{module.__name__}.{name}.{method}", function, doc


def handles_arrays(function):
    annotations = getattr(function, "__annotations__", {}).values()
    return any("jax.Array" in str(annotation) for annotation in annotations)


def test_every_public_function_of_arrays_says_their_shapes():
    found = {where: doc for where, f, doc in public_functions() if handles_arrays(f)}
    assert len(found) > 50
    silent = [where for where, doc in found.items() if not SHAPE.search(doc or "")]
    assert silent == []


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_holds_one_idea(path):
    assert len(path.read_text().splitlines()) <= MAX_LINES
