"""What a reader needs beyond the package's own dependencies, and how to get it.

Nothing of an extra is imported before a reader that uses it is built, and where it is missing the
error is the command that installs it.
"""

from __future__ import annotations

import importlib
from types import ModuleType

# Importable name -> the extra of layerkit-inputs that brings it.
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


class MissingExtraError(ImportError):
    """A package that a reader stands on is not installed."""


def require(module: str, *, needed_by: str) -> ModuleType:
    """Imports `module`, which an extra of layerkit-inputs brings.

    Args:
      module: Dotted name, such as `grain.sources`.
      needed_by: Who asks, for the message.

    Raises:
      MissingExtraError: it is not installed; the message is the command that installs it.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A module that is missing inside an installed package is another fault, shown as it is.
        if error.name is None or error.name.partition(".")[0] != package:
            raise
    raise MissingExtraError(
        f"{needed_by} needs the package {package}: "
        f"pip install 'layerkit-inputs[{_EXTRA_OF[package]}]'"
    )
