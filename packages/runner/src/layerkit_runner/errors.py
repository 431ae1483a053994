"""Mistakes of the person at the keyboard, as distinct from faults of the program.

    UsageError          a wrong flag, name, path or value; the command line prints it, exit code 2
    ├── FieldError      a wrong experiment field; also a TypeError, for those who call from Python
    ├── StorageError    storage refused, such as a full disk: nobody's mistake, so exit code 1
    └── NonFiniteError  loss, gradient or weights are not finite: training ends, exit code 65

The texts say what was given, what was expected and the nearest right thing.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from pathlib import Path

from layerkit.diagnostics import layer_of


class UsageError(Exception):
    """A request that cannot be carried out as it was written; shown without a traceback."""

    exit_code = 2


class FieldError(UsageError, TypeError):
    """An experiment field that does not exist, has no value, or has one of the wrong type."""


class StorageError(UsageError):
    """What a run has to keep cannot be written."""

    exit_code = 1


class NonFiniteError(UsageError):
    """Training that cannot continue, because its steps or its state are not finite numbers."""

    exit_code = 65


def layer_error_text(error: Exception) -> str:
    """Return the text of an error; one line with layer and line of code, if a layer raised it."""
    layer = layer_of(error)
    if layer is None:
        return str(error)
    # JAX explains some errors at length below their first paragraph.
    text = " ".join(str(error).partition("\n\n")[0].split())
    if text.startswith(layer):
        return text
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not {"jax", "jaxlib", "flax"} & set(Path(frame.filename).parts)
    ]
    place = f", {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{text.rstrip('.')}, in layer {layer}{place}"


def first_names(names: Iterable[str], *, limit: int = 12) -> str:
    """Names as a list for an error message, at most `limit` of them."""
    names = list(names)
    more = f", … ({len(names) - limit} more)" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
