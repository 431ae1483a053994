"""What can go wrong with a checkpoint, each in words that its user can act on.

SaveError               a checkpoint could not be written: a full disk, a read-only folder
└── SaveTimeoutError    a save has not ended in time
DamagedCheckpointError  the files of a step are not as they were written
LayoutVersionError      a later version of this package wrote the step
"""

from __future__ import annotations


class SaveError(OSError):
    """A checkpoint could not be written. The message names it, the reason, and what is left."""


class SaveTimeoutError(SaveError):
    """A save has not ended in time. Its threads may never end: leave the process by `os._exit`."""


class DamagedCheckpointError(RuntimeError):
    """The files of a step are not as they were written. The message lists them."""


class LayoutVersionError(ValueError):
    """A checkpoint was written by a later version of this package."""


def save_error(
    error: BaseException, *, step: int, directory: object, newest: int | None, timeout_secs: int
) -> SaveError:
    """The error of a save, from what storage said.

    Args:
      error: what storage raised.
      step: the step that was being saved.
      directory: the folder of the checkpoints.
      newest: the newest step that is committed; None if there is none.
      timeout_secs: how long a save may take, in seconds.
    """
    left = "it holds no checkpoint" if newest is None else f"step {newest} is the newest there"
    if isinstance(error, TimeoutError):
        return SaveTimeoutError(
            f"The checkpoint of step {step} has not been written to {directory} within "
            f"{timeout_secs} s (--async_timeout_secs); {left}."
        )
    return SaveError(
        f"The checkpoint of step {step} could not be written to {directory}: {_reason(error)}; "
        f"{left}."
    )


def _reason(error: BaseException) -> str:
    """The first line of what storage said; TensorStore appends places in its own source."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].partition(" [source locations=")[0].rstrip(".")
