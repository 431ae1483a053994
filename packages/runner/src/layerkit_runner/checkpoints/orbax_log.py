"""What Orbax logs of a save that failed: a traceback from each thread that met the error.

The manager raises that error as one sentence, `SaveError`, before which a user would read hundreds
of lines that say the same.
"""

from __future__ import annotations

import logging
import os

_ORBAX = f"{os.sep}orbax{os.sep}checkpoint{os.sep}"


def leave_out(errors: tuple[type[BaseException], ...]) -> None:
    """From now on, Orbax logs no errors of these kinds. Once is enough, and more do no harm."""
    logger = logging.getLogger("absl")
    if not any(isinstance(known, _FailedSaves) for known in logger.filters):
        logger.addFilter(_FailedSaves(errors))


class _FailedSaves(logging.Filter):
    def __init__(self, errors: tuple[type[BaseException], ...]) -> None:
        super().__init__()
        self._errors = errors

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not (isinstance(error, self._errors) and _ORBAX in record.pathname)
