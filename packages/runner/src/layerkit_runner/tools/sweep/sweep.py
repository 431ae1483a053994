"""A sweep: Optuna's study, and the loop that claims, runs and reports trials.

The seed of the sampler is the study's seed plus the number of the trial. So a resumed sweep draws
the same values as an uninterrupted one, and two processes never draw the same values.

A trial that is running according to Optuna, and whose lock is free, has lost its process. It is
resumed with its values from the checkpoint in its folder.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, Literal

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from layerkit_runner.distributed.watchdog import HUNG_EXIT_CODE
from layerkit_runner.errors import UNREADABLE_DATA, UsageError
from layerkit_runner.tools.sweep import report
from layerkit_runner.tools.sweep.study_file import StudyFile, Value, override_text
from layerkit_runner.tools.sweep.trials import (
    SweepFolder,
    TrialMetrics,
    TrialProcess,
    UnknownMetricError,
)

_DATABASE_TIMEOUT_SECS = 60
_SECONDS_BETWEEN_POLLS = 0.5
# After so many failures in a row and no success, all trials probably have the same cause.
_MAX_FAILURES = 3
# A trial whose process was killed is started again, but not if it was killed so often at one step.
_MAX_KILLS = 3
# Exit codes of runs that hung, or could not read their data for a while.
_RESUMABLE = (HUNG_EXIT_CODE, UNREADABLE_DATA)
_STATES = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of a trial's process; a stopped trial is resumed with its sweep.

    `value` is the metric of the last evaluation, and `reason` the cause of a failure. `is_killed`
    is True for a failure that the same command may complete from the newest checkpoint.
    """

    state: Literal["complete", "pruned", "failed", "stopped"]
    value: float | None
    step: int
    reason: str = ""
    is_killed: bool = False


@dataclasses.dataclass(frozen=True)
class ClaimedTrial:
    """A trial that this process runs and whose lock it holds.

    An earlier process may have reported steps of it, and then it is resumed.
    """

    trial: optuna.Trial
    lock: IO[bytes]
    reported: frozenset[int] = frozenset()
    is_resumed: bool = False

    def report(self, step: int, value: float) -> bool:
        """Report the metric after a training step; return False if it was reported before."""
        if step in self.reported:
            return False
        self.trial.report(value, step)
        return True


class Study:
    """Optuna's study of one folder, shared by all processes of the sweep."""

    def __init__(
        self, file: StudyFile, folder: SweepFolder, *, name: str, storage: str | None
    ) -> None:
        """Open or create the study in a storage: a URL, a journal file, or None for `study.db`.

        SQLite may lose data on a network disk to which several machines write; a journal does not.
        """
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
        self._file = file
        self._folder = folder
        with folder.locked():
            try:
                self._storage = _open_storage(storage or f"sqlite:///{folder.path / 'study.db'}")
                self.optuna = optuna.create_study(
                    storage=self._storage,
                    study_name=name,
                    direction=file.direction,
                    pruner=file.make_pruner(),
                    load_if_exists=True,
                )
            except Exception as error:  # each database driver has other errors
                raise UsageError(
                    f"cannot open the storage: {error}",
                    owner=f"--study_storage={storage or 'study.db'}",
                ) from error

    def close(self) -> None:
        """Close the connections to the storage."""
        self._storage.remove_session()
        if isinstance(self._storage, RDBStorage):
            self._storage.engine.dispose()

    def trials(self) -> list[FrozenTrial]:
        """Return the trials of all processes, by number."""
        return self.optuna.get_trials()

    def claim(self) -> ClaimedTrial | None:
        """Claim a trial that lost its process, or a new one; return None if there is neither."""
        with self._folder.locked():
            trials = self.trials()
            for frozen in trials:
                if frozen.state != TrialState.RUNNING:
                    continue
                lock = self._folder.try_lock_trial(frozen.number)
                if lock is not None and frozen.params.keys() == self._file.space.keys():
                    trial = optuna.Trial(self.optuna, frozen._trial_id)
                    reported = frozenset(frozen.intermediate_values)
                    return ClaimedTrial(trial, lock, reported, is_resumed=True)
                if lock is not None:  # killed while it drew values
                    self.optuna.tell(frozen.number, state=TrialState.FAIL)
                    lock.close()
            if sum(bool(trial.params) for trial in trials) >= self._file.num_trials:
                return None
            self.optuna.sampler = self._file.make_sampler(len(trials))
            trial = self.optuna.ask(dict(self._file.space))
            # Optuna would also call the sampler of the study when the trial ends.
            self.optuna.sampler = optuna.samplers.RandomSampler()
            lock = self._folder.try_lock_trial(trial.number)
            if lock is None:
                raise UsageError(
                    "another process runs this trial, but the storage does not have it",
                    owner=str(self._folder.trial(trial.number)),
                    hint="Stop that process if its study was deleted.",
                )
            return ClaimedTrial(trial, lock)

    def end(self, claimed: ClaimedTrial, outcome: Outcome) -> None:
        """Store the outcome of a trial and release its lock."""
        if outcome.state != "stopped":
            claimed.trial.set_user_attr("step", outcome.step)
            claimed.trial.set_user_attr("reason", outcome.reason)
            value = outcome.value if outcome.state == "complete" else None
            self.optuna.tell(claimed.trial.number, value, state=_STATES[outcome.state])
        claimed.lock.close()


def _open_storage(storage: str) -> BaseStorage:
    if "://" not in storage:
        return JournalStorage(JournalFileBackend(os.path.abspath(os.path.expanduser(storage))))
    options: dict[str, Any] = {}
    if storage.startswith("sqlite:"):
        options = {"connect_args": {"timeout": _DATABASE_TIMEOUT_SECS}}
    return RDBStorage(storage, engine_kwargs=options)


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Yield the list to which SIGINT and SIGTERM are appended as they arrive."""
    received: list[int] = []
    previous = {
        number: signal.signal(number, lambda n, _: received.append(n))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@dataclasses.dataclass
class Sweep:
    """A loop that runs the trials of a study one after another, each in its own process.

    Ctrl-C and SIGTERM stop a sweep: the current trial saves and stops, and the same command resumes
    it. A second Ctrl-C kills the trial.

    `dataset` is the data set of the metric. `command` returns the arguments of a trial, from the
    texts of its values and its folder. `longer` returns the command that trains the best trial for
    longer, from the texts of its values and its number of steps.
    """

    file: StudyFile
    folder: SweepFolder
    study: Study
    experiment: str
    dataset: str
    command: Callable[[dict[str, str], str], list[str]]
    longer: Callable[[dict[str, str], int], str]

    def run(self) -> int:
        """Run trials until all have ended or a signal is received; return the exit code."""
        num_failed = 0
        with _stop_signals() as stops:
            while not stops and (claimed := self.study.claim()) is not None:
                outcome = self._run_trial(claimed, stops)
                found = self._write_results()
                num_failed = num_failed + 1 if outcome.state == "failed" else 0
                if num_failed >= _MAX_FAILURES and report.best_of(found) is None:
                    _say(f"stopping the sweep: {num_failed} trials in a row failed")
                    break
        found = self._write_results()
        for line in report.table(found, self.file):
            _say(line)
        if num_unfinished := sum(result.state == "unfinished" for result in found):
            _say(f"{num_unfinished} of {len(found)} trials are unfinished")
        if (best := report.best_of(found)) is not None:
            _say("next: train the best trial for twice as many steps")
            _say(f"  {self.longer(_texts(best.parameters), best.step)}")
        if stops:
            _say("the same command resumes this sweep")
            return 128 + stops[0]
        return 0 if any(result.state in ("complete", "unfinished") for result in found) else 1

    def _run_trial(self, claimed: ClaimedTrial, stops: list[int]) -> Outcome:
        trial, began = claimed.trial, time.monotonic()
        label, resumed = f"trial {trial.number:04d}", "resumed: " if claimed.is_resumed else ""
        values = (f"{path}={report.shown(value)}" for path, value in trial.params.items())
        _say(f"{label}: {resumed}{', '.join(values)}")
        folder = self.folder.trial(trial.number)
        name = self.file.metric.removeprefix(f"{self.dataset}/")
        metrics = TrialMetrics(folder / "metrics.jsonl", dataset=self.dataset, name=name)
        words = self.command(_texts(trial.params), str(folder))
        kills: collections.Counter[int] = collections.Counter()  # by the step before each
        while True:
            outcome = self._run_process(claimed, TrialProcess(folder, words), metrics, stops)
            kills[outcome.step] += outcome.is_killed
            if not outcome.is_killed or kills[outcome.step] >= _MAX_KILLS:
                break
            _say(f"{label}: {outcome.reason} after step {outcome.step}; it is started again")
        self.study.end(claimed, outcome)
        reason = f": {outcome.reason}" if outcome.reason else ""
        took = f"{time.monotonic() - began:.0f} s"
        _say(f"{label}: {outcome.state} at step {outcome.step}, {took}{reason}")
        return outcome

    def _run_process(
        self,
        claimed: ClaimedTrial,
        process: TrialProcess,
        metrics: TrialMetrics,
        stops: list[int],
    ) -> Outcome:
        try:
            return _follow(claimed, process, metrics, stops)
        except UnknownMetricError as error:
            process.close()
            # The trial is resumed with the corrected file.
            claimed.lock.close()
            self.folder.clear_metric()
            error.owner = f"--study={self.file.path}"
            raise
        finally:
            process.close()

    def _write_results(self) -> list[report.TrialResult]:
        found = report.results(self.study.trials(), self.file, self.folder)
        report.write_results(found, self.file, self.folder, experiment=self.experiment)
        return found


def _follow(
    claimed: ClaimedTrial, process: TrialProcess, metrics: TrialMetrics, stops: list[int]
) -> Outcome:
    """Wait for the end of a trial, or stop it."""
    is_pruned, is_asked, is_killed = False, False, False
    code = None
    while code is None:
        code = process.wait(_SECONDS_BETWEEN_POLLS)
        for step, value in metrics.read():
            if claimed.report(step, value):
                number = claimed.trial.number
                _say(f"trial {number:04d}: {metrics.label} {value:.5g} at step {step}")
            if code is None and not metrics.is_last(step):
                is_pruned = is_pruned or claimed.trial.should_prune()
        if code is None and not is_asked and (is_pruned or metrics.problem or stops):
            process.stop()
            is_asked = True
        if code is None and not is_killed and len(stops) > 1 and stops[-1] == signal.SIGINT:
            process.kill()
            is_killed = True
    last, step = metrics.last_value, metrics.step
    if metrics.problem:
        return Outcome("failed", last, step, metrics.problem)
    if code == 0 and last is not None:
        return Outcome("complete", last, step)
    if code == 0:
        return Outcome("failed", last, step, f"no evaluation reported {metrics.label}")
    if is_pruned:
        return Outcome("pruned", last, step)
    if stops:
        return Outcome("stopped", last, step)
    is_killed = code < 0 or code > 128 or code in _RESUMABLE
    return Outcome("failed", last, step, process.reason(code), is_killed=is_killed)


def _texts(values: Mapping[str, Value]) -> dict[str, str]:
    return {path: override_text(value) for path, value in values.items()}


def _say(line: str) -> None:
    print(line, flush=True)
