"""Refuses to train from scratch where an earlier run of the same job committed a checkpoint.

`DIR/last_checkpoint.json` names the newest step that is known to be committed. It lies outside of
`DIR/checkpoints`, which may be a disk that is not mounted, and is written after the commit. So a
run that was killed before its first save leaves no such file, and the same command starts it again.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from etils import epath

from layerkit_runner.checkpointing import folders
from layerkit_runner.checkpointing.errors import SaveError
from layerkit_runner.distributed.process_exchange import from_process_0
from layerkit_runner.errors import UsageError
from layerkit_runner.files.atomic_write import atomic_write

FILE_NAME = "last_checkpoint.json"
FLAG = "allow_restart_from_scratch"


def record_checkpoint(directory: epath.Path, step: int) -> None:
    """Record in the folder of a job that a step is committed.

    A record of the same step is left as it is, so that a run that is refused writes nothing.

    Raises:
      SaveError: The record cannot be written.
    """
    path, text = directory / FILE_NAME, json.dumps({"step": step}) + "\n"
    try:
        if not (path.exists() and path.read_bytes() == text.encode()):
            atomic_write(path, text)
    except OSError as error:
        raise SaveError(f"{path} could not be written: {error}; step {step} is saved.") from error


def forget_checkpoint(directory: epath.Path) -> None:
    """Delete the record, as a run that starts from scratch does before its first step."""
    (directory / FILE_NAME).unlink(missing_ok=True)


def check_restart(
    directory: epath.Path,
    checkpoints: epath.Path,
    *,
    is_allowed: bool,
    report: Callable[[str], None],
) -> None:
    """Raise an error if a job without a sound checkpoint has committed one before.

    To be called by all processes where no checkpoint is sound. Process 0 decides.

    Args:
      directory: The folder of the job.
      checkpoints: The folder of its checkpoints.
      is_allowed: Whether the job may start from scratch all the same. Steps that are damaged are
        moved aside then.
      report: Called with a line that says what was found, and one for each step that was moved.

    Raises:
      UsageError: A step is recorded or there, and starting from scratch is not allowed.
    """
    found = from_process_0(lambda: _lost_work(directory, checkpoints))
    if found is None:
        return
    if not is_allowed:
        raise UsageError(
            f"{found}. Expected a sound checkpoint, since training would start from scratch."
            f" Mount or restore {checkpoints}, give another --job_log_dir, or start this job from"
            f" scratch by --{FLAG}."
        )
    report(f"{found}; the run starts from scratch, as --{FLAG} allows")
    from_process_0(lambda: _move_aside(checkpoints, report))


def _lost_work(directory: epath.Path, checkpoints: epath.Path) -> str | None:
    """Return what shows that work would be lost; None if nothing does."""
    damaged = folders.committed_steps(checkpoints)
    if damaged:
        return f"{checkpoints} holds no sound checkpoint: damaged={damaged}"
    if not (directory / FILE_NAME).exists():
        return None
    try:
        step = json.loads((directory / FILE_NAME).read_text())["step"]
    except (OSError, ValueError, KeyError, TypeError):
        step = "unknown"
    return f"{checkpoints} holds no checkpoint, but {directory / FILE_NAME} has step={step}"


def _move_aside(checkpoints: epath.Path, report: Callable[[str], None]) -> None:
    for step in folders.committed_steps(checkpoints):
        path = folders.step_folder(checkpoints, step)
        report(f"{path} was moved aside to {folders.move_aside(path).name}")
