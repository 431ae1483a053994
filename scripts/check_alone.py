"""Import all of layerkit and check that neither TensorFlow nor the other packages are installed.

Run by the `layerkit_alone` session, in an isolated interpreter:

    python -I scripts/check_alone.py
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys

STRANGERS = ("tensorflow", "layerkit_inputs", "layerkit_runner", "layerkit_experiments")


def main() -> None:
    """Import every module of layerkit, and exit with a message if a stranger can be imported."""
    if installed := [name for name in STRANGERS if importlib.util.find_spec(name)]:
        sys.exit(f"importable beside layerkit: {installed}")
    import layerkit

    names = [m.name for m in pkgutil.walk_packages(layerkit.__path__, "layerkit.", onerror=_fail)]
    for name in names:
        importlib.import_module(name)
    print(f"layerkit stands alone: {len(names)} modules imported, none of {', '.join(STRANGERS)}")


def _fail(name: str) -> None:
    raise ImportError(f"cannot import {name}")


if __name__ == "__main__":
    main()
