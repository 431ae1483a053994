"""Notes on errors that name the input they come from; loads neither NumPy nor JAX."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_NOTE = "In input "


@contextlib.contextmanager
def naming_input(label: str) -> Iterator[None]:
    """Add the label of an input as a note to errors, except to the end of its data.

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
            error.add_note(f"{_NOTE}{label}")
        raise


def input_of(error: BaseException) -> str | None:
    """Return the label of the input that raised an error, such as `LocalText 'train'`."""
    for note in getattr(error, "__notes__", ()):
        if note.startswith(_NOTE):
            return str(note.removeprefix(_NOTE))
    return None
