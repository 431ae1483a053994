"""Errors of checkpoints, and a filter that keeps their tracebacks out of the logs."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

import jax

from layerkit.errors import ConfigError, UserError, error_text
from layerkit_runner.errors import NonFiniteError

# Errors of a save: of files, of TensorStore, which are ValueErrors, and of a state with NaN.
STORAGE_ERRORS = (OSError, ValueError, NonFiniteError)


class SaveError(OSError):
    """A failure to write a checkpoint, such as a full disk or a read-only folder."""


class SaveTimeoutError(SaveError):
    """A save that exceeded its time limit. Its threads may never end; exit by `os._exit`."""


class DamagedCheckpointError(UserError, RuntimeError):
    """Files of a step that differ from those that were written."""


class LayoutVersionError(ConfigError):
    """A checkpoint, or an undamaged manifest, that a later version of this package wrote."""


class ProcessCountError(ConfigError):
    """Input states of single processes, which a job with another number of processes wrote."""


def later_version(owner: object, field: str, value: object, newest: int) -> LayoutVersionError:
    """Return the error about a file that a later version of this package wrote."""
    hint = "Use the later version of layerkit-runner that wrote it."
    return LayoutVersionError(
        owner=str(owner), field=field, value=value, expected=f"at most {newest}", hint=hint
    )


@contextlib.contextmanager
def naming_damage(path: object) -> Iterator[None]:
    """Raise `DamagedCheckpointError` that names a file if code of the block cannot use its content.

    Errors of users and of devices stay as they are.
    """
    try:
        yield
    except (UserError, jax.errors.JaxRuntimeError, MemoryError):
        raise
    except Exception as error:
        # TensorStore appends locations in its own source code.
        text = error_text(error).partition(" [source locations=")[0]
        lines = text.strip().splitlines() or ["no message"]
        raise DamagedCheckpointError(
            f"damaged: {type(error).__name__}: {lines[0].rstrip('.')}",
            owner=str(path),
            hint="Move this step out of the folder to use an older one.",
        ) from error


def save_error(
    error: BaseException, *, step: int, directory: object, newest: int | None, timeout_secs: int
) -> SaveError | NonFiniteError:
    """Return the error of a save of `step`; `newest` is the newest committed step, if any."""
    left = "none" if newest is None else f"step {newest}"
    if isinstance(error, NonFiniteError):
        return NonFiniteError(
            f"The checkpoint of step {step} is not written to {directory}: {error}"
            f" The newest checkpoint there: {left}."
        )
    # The time-out of a file system has an errno.
    if isinstance(error, TimeoutError) and error.errno is None:
        return SaveTimeoutError(
            f"The checkpoint of step {step} was not written to {directory} within "
            f"--async_timeout_secs={timeout_secs}. The newest checkpoint there: {left}."
        )
    # TensorStore appends locations in its own source code.
    text = str(error).strip() or type(error).__name__
    reason = text.splitlines()[0].partition(" [source locations=")[0].rstrip(".")
    return SaveError(
        f"The checkpoint of step {step} could not be written to {directory}: {reason}. "
        f"The newest checkpoint there: {left}."
    )


def silence_tracebacks() -> None:
    """Filter tracebacks of storage errors of a save, which the manager raises, out of the logs."""
    for name in ("absl", "asyncio"):
        logger = logging.getLogger(name)
        if _is_logged not in logger.filters:
            logger.addFilter(_is_logged)


def _is_logged(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    is_raised_elsewhere = isinstance(error, STORAGE_ERRORS) or (
        # A thread of the failed save still works while the process ends.
        isinstance(error, RuntimeError) and "cannot schedule new futures after" in str(error)
    )
    # A record of asyncio names the file of its task in the message.
    where = f"{record.pathname} {record.getMessage()}"
    return not (is_raised_elsewhere and f"{os.sep}orbax{os.sep}checkpoint" in where)
