"""Imports of optional dependencies, which extras of layerkit-inputs install.

An optional dependency is imported when a reader that needs it is built. If it is missing, the error
message has the command that installs it.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from layerkit.errors import UserError

# Importable name -> extra of layerkit-inputs that installs it.
_EXTRA_OF = {
    "array_record": "grain",
    "datasets": "hf",
    "grain": "grain",
    "pyarrow": "grain",
    "sentencepiece": "text",
    "seqio": "seqio",
    "tensorflow": "seqio",
    "tensorflow_datasets": "seqio",
    "tokenizers": "hf",
}


class MissingExtraError(UserError, ImportError):
    """An optional dependency that is not installed."""


def require(module: str, *, needed_by: str) -> ModuleType:
    """Import and return a module that an extra of layerkit-inputs installs.

    Args:
      module: Dotted name, such as `grain.sources`.
      needed_by: Class or feature that needs the module, for the message.

    Raises:
      MissingExtraError: The module is not installed. The message has the command to install it.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A missing module inside an installed package is a different error.
        if error.name is None or error.name.partition(".")[0] != package:
            raise
    raise MissingExtraError(
        f"{needed_by} needs the package {package}",
        hint=f"Install it: pip install 'layerkit-inputs[{_EXTRA_OF[package]}]'",
    )
