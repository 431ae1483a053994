"""Errors of inputs: the label of the input that raised one, and missing optional dependencies.

An optional dependency is imported when a reader that needs it is built. If it is missing, the error
message has the command that installs it. This module loads neither NumPy nor JAX.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from types import ModuleType

from layerkit.errors import UserError, pip_install

_ATTRIBUTE = "layerkit_input"
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


@contextlib.contextmanager
def naming_input(label: str) -> Iterator[None]:
    """Record the label of an input, such as `LocalText 'train'`, in its errors.

    StopIteration is no error.

    A `UserError` without an owner gets the label as its owner. Errors of values and files keep
    their text, and reports add the label by `input_of`. Other errors get a note, which tracebacks
    show.
    """
    try:
        yield
    except Exception as error:
        # An input that reads another input does not replace the label of that input.
        if input_of(error) is None and not isinstance(error, StopIteration):
            setattr(error, _ATTRIBUTE, label)
            if isinstance(error, UserError):
                error.owner = error.owner or label
            elif not isinstance(error, (OSError, ValueError)):
                error.add_note(f"In input {label}")
        raise


def input_of(error: BaseException) -> str | None:
    """Return the label of the input that raised an error, such as `LocalText 'train'`."""
    return getattr(error, _ATTRIBUTE, None)


class MissingExtraError(UserError, ImportError):
    """An optional dependency that is not installed."""


def require_extra(module: str, *, needed_by: str) -> ModuleType:
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
    hint = f"Install it: {pip_install('layerkit-inputs', _EXTRA_OF[package])}"
    raise MissingExtraError(f"{needed_by} needs the package {package}", hint=hint)
