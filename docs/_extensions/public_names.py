"""The public names of the four packages, as the API reference and its check need them.

A name is public if a package exports it (`__all__`, or an import in its `__init__.py`), or if one
of the modules below defines it without a leading underscore.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
import types
from pathlib import Path

# Page of the reference, and the modules whose names it documents. A name that several modules
# export is documented under the first.
PAGES: dict[str, tuple[str, ...]] = {
    "layerkit": (
        "layerkit",
        "layerkit.config.checks",
        "layerkit.errors",
        "layerkit.config.hparams",
        "layerkit.config.field_types",
        "layerkit.base.sharding",
        "layerkit.testing",
    ),
    "layers": (
        "layerkit.layers",
        "layerkit.layers.quantization.lora",
        "layerkit.ops.losses.softmax",
        "layerkit.ops.soft_cap",
        "layerkit.ops.pipeline_schedule",
        "layerkit.layers.basic.dots",
        "layerkit.ops.remat",
    ),
    "attention": (
        "layerkit.ops.attention.backends",
        "layerkit.layers.attention.base_attention",
    ),
    "models": ("layerkit.models", "layerkit.models.weighted_metrics"),
    "decoding": ("layerkit.decoding",),
    "interop": (
        "layerkit.interop.hugging_face",
        "layerkit.interop.peft",
        "layerkit.interop.praxis",
    ),
    "inputs": (
        "layerkit_inputs",
        "layerkit_inputs.base.base_input",
        "layerkit_inputs.lingvo",
        "layerkit_inputs.testing.laws",
    ),
    "runner": (
        "layerkit_runner",
        "layerkit_runner.checkpointing",
        "layerkit_runner.init_from",
        "layerkit_runner.partitioning",
        "layerkit_runner.cli",
        "layerkit_runner.step.metrics",
    ),
    "observers": ("layerkit_runner.observers",),
    "optim": (
        "layerkit_runner.optim.optimizers",
        "layerkit_runner.optim.schedules",
        "layerkit_runner.optim.optimizer_updates",
        "layerkit_runner.optim.sharded_adafactor",
        "layerkit_runner.step.task_metrics",
    ),
}


def recipe_modules() -> list[str]:
    """Return the modules of the recipes that experiments call, and of base classes beside these."""
    recipes = importlib.import_module("layerkit_experiments.recipes")
    result = pkgutil.iter_modules(recipes.__path__, f"{recipes.__name__}.")
    return [
        *(module.name for module in result),
        *(f"layerkit_experiments.lm.{name}" for name in ("distill", "pax")),
    ]


def experiments() -> dict[str, dict]:
    """Return the rows of the catalogue by dotted path of the experiment."""
    package = importlib.import_module("layerkit_experiments")
    catalogue = json.loads((Path(str(package.__file__)).parent / "catalogue.json").read_text())
    return {f"{package.__name__}.{name}": row for name, row in catalogue.items()}


def names_of(module_name: str) -> list[str]:
    """Return the public names of a module, in the order of their definition where it is known."""
    module = importlib.import_module(module_name)
    if hasattr(module, "__all__"):
        return [name for name in module.__all__ if not name.startswith("_")]
    is_package = hasattr(module, "__path__")
    result = []
    for name in dir(module):
        value = None if name.startswith("_") else getattr(module, name)
        if value is None or isinstance(value, types.ModuleType):
            continue
        home = getattr(value, "__module__", None)
        is_ours = home == module_name or (is_package and str(home).startswith(f"{module_name}."))
        is_defined = inspect.isclass(value) or inspect.isfunction(value)
        # Constants, and aliases of types such as `Conditions`.
        is_named = name.isupper() or (len(name) > 1 and name[0].isupper() and not is_ours)
        is_constant = is_named and name in assigned_names(home_of(module_name, name), module_name)
        if (is_ours and is_defined) or is_constant:
            result.append(name)
    return result


def home_of(module_name: str, name: str) -> str:
    """Return the module that defines a public name."""
    value = getattr(importlib.import_module(module_name), name)
    home = getattr(value, "__module__", None)
    if isinstance(home, str) and (inspect.isclass(value) or inspect.isfunction(value)):
        return home
    return imported_from(module_name, name) or module_name


def imported_from(module_name: str, name: str) -> str | None:
    """Return the module from which a module imports a name, also only for type checkers."""
    tree = ast.parse(inspect.getsource(importlib.import_module(module_name)))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            return node.module
    return None


def assigned_names(home: str, module_name: str) -> set[str]:
    """Return the names that `home` assigns, if it is the module or a part of it."""
    if home != module_name and not home.startswith(f"{module_name}."):
        return set()
    tree = ast.parse(inspect.getsource(importlib.import_module(home)))
    return set().union(*map(_targets, tree.body))


def comment_of(module_name: str, name: str) -> str:
    """Return the docstring below a constant, or the comment above it; empty without either."""
    home = importlib.import_module(home_of(module_name, name))
    source = inspect.getsource(home)
    body = ast.parse(source).body
    for node, following in zip(body, [*body[1:], None], strict=True):
        if name not in _targets(node):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            return inspect.cleandoc(str(following.value.value))
        above = []
        for line in reversed(source.splitlines()[: node.lineno - 1]):
            if not line.startswith("#"):
                break
            above.insert(0, line.lstrip("# "))
        return "\n".join(above)
    return ""


def _targets(node: ast.AST) -> set[str]:
    """Return the names that a statement assigns."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}
