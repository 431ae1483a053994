"""Labels of inputs in their errors. This module loads neither NumPy nor JAX."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from layerkit.errors import UserError

_ATTRIBUTE = "layerkit_input"


@contextlib.contextmanager
def naming_input(label: str) -> Iterator[None]:
    """Record the label of an input in its errors, except StopIteration.

    A `UserError` without an owner gets the label as its owner. Errors of values and files keep
    their text, and reports add the label by `input_of`. Other errors get a note, which tracebacks
    show.

    Args:
      label: Class and name, such as `LocalText 'train'`.
    """
    try:
        yield
    except StopIteration:
        raise
    except Exception as error:
        # An input that reads another input does not replace the label of that input.
        if input_of(error) is None:
            setattr(error, _ATTRIBUTE, label)
            if isinstance(error, UserError):
                error.owner = error.owner or label
            elif not isinstance(error, (OSError, ValueError)):
                error.add_note(f"In input {label}")
        raise


def input_of(error: BaseException) -> str | None:
    """Return the label of the input that raised an error, such as `LocalText 'train'`."""
    return getattr(error, _ATTRIBUTE, None)
