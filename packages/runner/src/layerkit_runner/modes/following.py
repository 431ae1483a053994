"""How a job follows a training job: from one new checkpoint to the next, until there is no other.

Between checkpoints it waits, and says for what. It ends after the last step of the training job, on
Ctrl-C or SIGTERM, and after `--follow_timeout_secs` without a new checkpoint.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from etils import epath

from layerkit.errors import first_names
from layerkit_runner.checkpointing import documents
from layerkit_runner.checkpointing.folders import committed_steps, step_folder
from layerkit_runner.checkpointing.inventory import CheckpointWatcher
from layerkit_runner.distributed.process_exchange import from_process_0
from layerkit_runner.distributed.stop_signals import StopSignals
from layerkit_runner.distributed.watchdog import progress
from layerkit_runner.errors import UsageError
from layerkit_runner.trainer.executor import EARLY_STOPPING, ENDED
from layerkit_runner.trainer.job_folder import recorded_num_train_steps

# The folder is looked at more and more seldom while nothing comes.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 10.0
_SECONDS_TO_REMINDER = 60.0
_LONGEST_SILENCE = 3600.0


@dataclasses.dataclass
class Waiting:
    """How long to pause between two looks, and when to say again that nothing came.

    Pauses double from half a second to ten; reminders come after a minute, then each after twice
    as long as the one before, at least hourly.
    """

    began: float
    _pause: float = _FIRST_PAUSE / 2
    _silence: float = _SECONDS_TO_REMINDER
    _next_reminder: float | None = None

    def pause(self) -> float:
        """Seconds until the next look."""
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        return self._pause

    def reminds(self, now: float) -> bool:
        """Whether to say now that the wait goes on."""
        if self._next_reminder is None:
            self._next_reminder = self.began + self._silence
        if now < self._next_reminder:
            return False
        self._silence = min(2 * self._silence, _LONGEST_SILENCE)
        self._next_reminder = now + self._silence
        return True


def follow(
    directory: epath.Path,
    look_at: Callable[[], int | None],
    *,
    has_outputs: Callable[[int], bool],
    own_last_step: int,
    timeout_secs: float | None,
    signals: StopSignals,
    report: Callable[[str], None],
) -> None:
    """Calls `look_at` whenever a new checkpoint is there.

    Args:
      directory: The folder of the checkpoints, which may not be there yet.
      look_at: Does the work for the newest sound checkpoint, if it is not done; returns its step,
        or None if none could be read.
      has_outputs: Whether there are outputs of a step, so that it is none that was passed over.
      own_last_step: The last step as this job's configuration has it; what the training job
        recorded in its folder goes before it.
      timeout_secs: For how long to wait for a new checkpoint; None for ever.
      signals: Entered.
      report: Takes a message.

    Raises:
      UsageError: no checkpoint came in time, not even a first one.
    """
    watcher, done = CheckpointWatcher(directory), None
    while True:
        end = _end(directory, done, own_last_step)
        if end["is_last"]:
            if end["why"]:
                report(f"step {done} is the last: {end['why']}")
            return
        what = "the first checkpoint" if done is None else f"a checkpoint after step {done}"
        waits = f"waiting for {what} in {directory} (the last is that of step {end['last_step']})"
        found = _wait(watcher, waits, timeout_secs, signals, report, is_first=done is None)
        if signals.agreed_now():
            return
        if found is None:
            in_time = f"in {directory} within {timeout_secs:g} s (--follow_timeout_secs)"
            if done is None:
                raise UsageError(f"there was no checkpoint {in_time}")
            report(f"there was no new checkpoint {in_time}; the last was step {done}")
            return
        older = [str(step) for step in found["passed_over"] if not has_outputs(step)]
        if older:
            report(f"step {found['step']} is the newest; passed over: {first_names(older)}")
        looked_at = look_at()
        done = done if looked_at is None else looked_at
        if signals.agreed_now():
            return


def _end(directory: epath.Path, done: int | None, own_last_step: int) -> dict[str, Any]:
    """Whether no checkpoint can come after the step that was done, why where that may surprise, and
    which is to be the last."""

    def look() -> dict[str, Any]:
        last = recorded_num_train_steps(directory.parent)
        last = own_last_step if last is None else last
        is_last, why = done is not None and done >= last, ""
        if is_last and last < own_last_step:
            why = (
                f"config.json of the training job has task.train.num_train_steps={last}, this"
                f" command {own_last_step}"
            )
        elif done is not None and not is_last:
            why = _early_end(directory, done)
            is_last = bool(why)
        return {"last_step": last, "is_last": is_last, "why": why}

    return from_process_0(look)


def _early_end(directory: epath.Path, step: int) -> str:
    """What ended the training job with this checkpoint before its last step; "" if nothing did."""
    if step not in committed_steps(directory):
        return ""
    try:
        user = documents.read(step_folder(directory, step))["user"]
    except (OSError, ValueError, KeyError):
        return ""  # deleted meanwhile: the job goes on
    if (user.get(EARLY_STOPPING) or {}).get("stopped_at") is not None:
        return "early stopping ended the training job"
    return "the training job ended early" if user.get(ENDED) else ""


def _wait(
    watcher: CheckpointWatcher,
    waits: str,
    timeout_secs: float | None,
    signals: StopSignals,
    report: Callable[[str], None],
    *,
    is_first: bool,
) -> dict[str, Any] | None:
    """Waits for a new checkpoint; None if none came in time, or signals end the wait.

    Process 0 looks at folder and clock, and all others ask it each time.
    """
    waiting = Waiting(began=time.monotonic())

    def look() -> dict[str, Any]:
        new = watcher.poll_newest()
        late = timeout_secs is not None and time.monotonic() - waiting.began >= timeout_secs
        found = None if new is None else {"step": new.step, "passed_over": new.passed_over}
        return {"found": found, "is_late": late}

    said = False
    while not signals.agreed_now():
        seen = from_process_0(look)
        if seen["found"] is not None or seen["is_late"]:
            return seen["found"]
        if not said:
            hint = "; Ctrl-C ends this job, and the same command takes it up again"
            report(waits + (hint if is_first else ""))
            said = True
        elif waiting.reminds(now := time.monotonic()):
            report(f"still {waits}: {(now - waiting.began) / 60:.0f} min so far")
        until = time.monotonic() + waiting.pause()
        if timeout_secs is not None:
            until = min(until, waiting.began + timeout_secs)
        _pause(until, waits, signals)
    return None


def _pause(until: float, waits: str, signals: StopSignals) -> None:
    """Waits, and lets the watchdog see that it is on purpose, however short its patience."""
    while (left := until - time.monotonic()) > 0 and signals.received is None:
        progress(waits, waits_for_others=True)
        signals.wait(min(left, _FIRST_PAUSE))
