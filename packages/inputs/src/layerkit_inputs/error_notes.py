"""Errors know the input that they come from; loads neither NumPy nor JAX."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_ATTRIBUTE = "layerkit_input"


@contextlib.contextmanager
def naming_input(label: str) -> Iterator[None]:
    """Record the label of an input in errors, except in the end of its data.

    Errors of values and files say what is wrong with the data, and whoever reports them adds the
    label by `input_of`. All others carry it as a note, which a traceback shows.

    Args:
      label: Class and name, such as `LocalText 'train'`.
    """
    try:
        yield
    except StopIteration:
        raise
    except Exception as error:
        # An input that reads others is not where the error comes from.
        if input_of(error) is None:
            setattr(error, _ATTRIBUTE, label)
            if not isinstance(error, (OSError, ValueError)):
                error.add_note(f"In input {label}")
        raise


def input_of(error: BaseException) -> str | None:
    """Return the label of the input that raised an error, such as `LocalText 'train'`."""
    return getattr(error, _ATTRIBUTE, None)
