"""Public names of a package whose modules are imported at the first use of a name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from layerkit.errors import UnknownNameError


def lazy_names(
    package: str, names_by_module: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package.

    Args:
      package: Name of the package.
      names_by_module: Public names, separated by spaces, by the module that defines them: its
        relative import without the first dot, such as `basic.linears` or `.ops.remat`.
    """
    module_of = {
        name: module for module, names in names_by_module.items() for name in names.split()
    }

    def find(name: str) -> Any:
        if name not in module_of:
            raise UnknownNameError("unknown name", owner=package, value=name, choices=module_of)
        value = getattr(importlib.import_module(f".{module_of[name]}", package), name)
        setattr(sys.modules[package], name, value)
        return value

    return find, lambda: sorted({*vars(sys.modules[package]), *module_of}), sorted(module_of)
