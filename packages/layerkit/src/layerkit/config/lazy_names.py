"""Public names of a package whose modules are imported at the first use of a name."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from typing import Any

from layerkit.errors import UnknownNameError

# `from package.module import Name as Name` below `if TYPE_CHECKING:`.
_IMPORT = re.compile(r"^    from ([\w.]+) import \(?\s*(\w+) as \2\b", re.MULTILINE)


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package.

    The public names are those that its source imports below `if TYPE_CHECKING:`, so type checkers
    and programs read one list.

    Args:
      package: Name of the package, `__name__`.
    """
    module = sys.modules[package]
    source = module.__loader__.get_data(module.__file__).decode()  # type: ignore
    module_of = {name: origin for origin, name in _IMPORT.findall(source)}

    def find(name: str) -> Any:
        if name not in module_of:
            raise UnknownNameError("unknown name", owner=package, value=name, choices=module_of)
        value = getattr(importlib.import_module(module_of[name]), name)
        setattr(module, name, value)
        return value

    public = sorted(name for name in module_of if not name.startswith("_"))
    return find, lambda: sorted({*vars(module), *module_of}), public
