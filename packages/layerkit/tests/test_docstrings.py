"""Rules for every file and every public function of the library."""

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
    """Yield (path, function, docstring) of all public functions and methods."""
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


def test_docstrings_of_array_functions_give_shapes():
    result = {where: doc for where, f, doc in public_functions() if handles_arrays(f)}
    assert len(result) > 50
    missing = [where for where, doc in result.items() if not SHAPE.search(doc or "")]
    assert missing == []


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_file_has_at_most_500_lines(path):
    assert len(path.read_text().splitlines()) <= MAX_LINES
