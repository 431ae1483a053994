"""Evaluation or decoding of each new checkpoint of a running training job, until its last."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from etils import epath

from layerkit.errors import first_names
from layerkit_runner.checkpointing.errors import DamagedCheckpointError, LayoutVersionError
from layerkit_runner.checkpointing.folders import committed_steps, read_metadata, step_folder
from layerkit_runner.checkpointing.integrity import step_digest
from layerkit_runner.distributed.cluster import run_on_process_0
from layerkit_runner.distributed.stop_signals import StopSignals
from layerkit_runner.distributed.watchdog import progress
from layerkit_runner.errors import UsageError
from layerkit_runner.run.executor import EARLY_STOPPING, ENDED
from layerkit_runner.run.job_folder import recorded_num_train_steps

_POLL_SECS = 1.0


class CheckpointWatcher:
    """A reader of a folder of checkpoints that returns each newest step once.

    It reads no arrays, so the step may be damaged. The training job that owns the folder may delete
    steps, and save a step again.
    """

    def __init__(self, directory: epath.Path) -> None:
        """Watch a folder, which need not exist yet."""
        self._directory = directory
        self._returned: tuple[int, str | None] | None = None

    def poll_newest(self) -> tuple[int, list[int]] | None:
        """Return the newest step, if it is new or was saved again, and older ones passed over."""
        steps = committed_steps(self._directory)
        if not steps:
            return None
        newest = steps[-1]
        digest = step_digest(step_folder(self._directory, newest))
        if (newest, digest) == self._returned:
            return None
        before = -1 if self._returned is None else self._returned[0]
        self._returned = (newest, digest)
        return newest, [step for step in steps[:-1] if step > before]


def watch_checkpoints(
    directory: epath.Path,
    process_newest: Callable[[], int | None],
    *,
    own_last_step: int,
    timeout_secs: float | None,
    signals: StopSignals,
    report: Callable[[str], None],
) -> None:
    """Call `process_newest` whenever there is a new checkpoint, until the training job ends.

    Args:
      directory: Folder of the checkpoints, which may not exist yet.
      process_newest: Function that processes the newest undamaged checkpoint, and returns its step,
        or None if no checkpoint could be read.
      own_last_step: Last step of this job's config, if the training job has not recorded its own.
      timeout_secs: Longest wait for a new checkpoint; None for no limit.
      signals: Active signal handler.
      report: Function that receives messages.
    """
    watcher, done, since = CheckpointWatcher(directory), None, time.monotonic()
    is_reported = False  # that it waits

    def poll() -> dict[str, Any]:
        last_step, end = _training_end(directory, done, own_last_step)
        late = timeout_secs is not None and time.monotonic() - since >= timeout_secs
        new = watcher.poll_newest() if end is None else None
        return {"last_step": last_step, "end": end, "new": new, "is_late": late}

    while not signals.agreed_now():
        polled = run_on_process_0(poll)
        if polled["end"] is not None:
            if polled["end"]:
                report(f"step {done} is the last: {polled['end']}")
            return
        if polled["new"] is not None:
            newest, skipped = polled["new"]
            if skipped:
                names = first_names(map(str, skipped))
                report(f"step {newest} is the newest; skipped older steps: {names}")
            processed = process_newest()
            done = done if processed is None else processed
            since, is_reported = time.monotonic(), False
            continue
        if polled["is_late"]:
            if done is None:
                problem, field = f"found no checkpoint in {directory}", "--follow_timeout_secs"
                raise UsageError(problem, field=field, value=timeout_secs)
            report(
                f"found no new checkpoint in {directory} within --follow_timeout_secs="
                f"{timeout_secs:g}; the last was step {done}"
            )
            return
        what = "the first checkpoint" if done is None else f"a checkpoint after step {done}"
        waits = f"waiting for {what} in {directory} (training ends at step {polled['last_step']})"
        if not is_reported:
            report(waits)
            is_reported = True
        progress(waits, waits_for_others=True)
        signals.wait(_POLL_SECS)


def _training_end(
    directory: epath.Path, done: int | None, own_last_step: int
) -> tuple[int, str | None]:
    """Return the last step, and why `done` is it: None if it is not, empty if as expected."""
    recorded = recorded_num_train_steps(directory.parent)
    last = own_last_step if recorded is None else recorded
    if done is None:
        return last, None
    if done < last:
        return last, _early_end(directory, done)
    if last >= own_last_step:
        return last, ""
    return last, (
        f"config.json of the training job has task.train.num_train_steps={last}, this command"
        f" {own_last_step}"
    )


def _early_end(directory: epath.Path, step: int) -> str | None:
    """Return why the training job ended early with this checkpoint; None if it did not."""
    if step not in committed_steps(directory):
        return None
    try:
        user = read_metadata(step_folder(directory, step))["user"]
    except (DamagedCheckpointError, LayoutVersionError):
        return None  # The checkpoint was just deleted, so the training job is still running.
    if (user.get(EARLY_STOPPING) or {}).get("stopped_at") is not None:
        return "early stopping ended the training job"
    return "the training job ended early" if user.get(ENDED) else None
