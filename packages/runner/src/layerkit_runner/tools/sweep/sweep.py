"""A sweep: Optuna's study, and the loop that takes a trial, runs it and reports its result.

The seed of the sampler is the study's seed plus the number of the trial. So a stopped sweep draws
the values that it would have drawn, and two processes never draw the same.

A trial that is running according to Optuna, and whose lock is free, has lost its process. It is
resumed with its values, in its folder, and so from its checkpoint.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
import warnings
from collections.abc import Callable, Mapping
from typing import IO, Any, Literal

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from layerkit_runner.errors import UsageError
from layerkit_runner.tools.sweep import report
from layerkit_runner.tools.sweep.study_file import Method, StudyFile, Value, grid, override_text
from layerkit_runner.tools.sweep.trials import (
    SweepFolder,
    TrialMetrics,
    TrialProcess,
    UnknownMetricError,
)

_DATABASE_TIMEOUT_SECS = 60
_SECONDS_BETWEEN_POLLS = 0.5
# When so many trials fail in a row and none has succeeded, the cause is common to all.
_MAX_FAILURES = 3
_STATES = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a trial's process ended. A stopped trial can be resumed: the sweep itself was stopped."""

    state: Literal["complete", "pruned", "failed", "stopped"]
    value: float | None  # of the last evaluation
    step: int
    reason: str = ""  # why it failed


@dataclasses.dataclass(frozen=True)
class OwnTrial:
    """A trial that this process runs, while it holds the lock of the trial."""

    number: int
    values: Mapping[str, Value]
    is_resumed: bool  # whether another process started it
    trial: optuna.Trial
    lock: IO[bytes]
    known: frozenset[int]  # steps whose values an earlier process reported

    def report(self, step: int, value: float) -> bool:
        """Report the metric after a training step; return False if it was reported before."""
        if step in self.known:
            return False
        self.trial.report(value, step)
        return True


class Study:
    """Optuna's study of one folder, shared by all processes of the sweep.

    The storage is the URL of a database, or the path of a journal file: SQLite may lose data on a
    network disk that several machines write, and a journal does not. None is `study.db`.

    Raises:
      UsageError: The storage cannot be opened.
    """

    def __init__(
        self, file: StudyFile, folder: SweepFolder, *, name: str, storage: str | None
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
        self._file = file
        self._folder = folder
        with folder.deciding():
            try:
                self._storage = _open_storage(storage or f"sqlite:///{folder.path / 'study.db'}")
                self.optuna = optuna.create_study(
                    storage=self._storage,
                    study_name=name,
                    direction=file.direction,
                    pruner=_pruner(file.pruner),
                    load_if_exists=True,
                )
            except Exception as error:  # each database driver has errors of its own
                raise UsageError(f"--study_storage={storage or 'study.db'}: {error}") from error

    def close(self) -> None:
        """Close the connections to the storage; call it once, at the end."""
        self._storage.remove_session()
        if isinstance(self._storage, RDBStorage):
            self._storage.engine.dispose()

    def trials(self) -> list[FrozenTrial]:
        """Return the trials of all processes, by number."""
        return self.optuna.get_trials()

    def take(self) -> OwnTrial | None:
        """Return a trial that this process now owns: one that lost its process, or a new one.

        Returns:
          None if all trials are done or belong to other processes.
        """
        with self._folder.deciding():
            trials = self.trials()
            for frozen in trials:
                if frozen.state == TrialState.RUNNING:
                    lock = self._folder.try_to_own(frozen.number)
                    if lock is not None:
                        self.optuna.sampler = _sampler(self._file, frozen.number)
                        trial = optuna.Trial(self.optuna, frozen._trial_id)
                        return self._own(trial, lock, frozen)
            if len(trials) >= self._file.num_trials:
                return None
            self.optuna.sampler = _sampler(self._file, len(trials))
            trial = self.optuna.ask()
            lock = self._folder.try_to_own(trial.number)
            if lock is None:
                raise UsageError(
                    f"{self._folder.trial(trial.number)} is in use, but the storage does not know"
                    " that trial; was its study deleted?"
                )
            return self._own(trial, lock)

    def _own(
        self, trial: optuna.Trial, lock: IO[bytes], earlier: FrozenTrial | None = None
    ) -> OwnTrial:
        # Values that the trial has already are returned as they are.
        values = {path: p.suggest(trial, path) for path, p in self._file.space.items()}
        # The sampler is only for drawing; Optuna would also call it when the trial ends.
        self.optuna.sampler = optuna.samplers.RandomSampler()
        known = frozenset(earlier.intermediate_values if earlier is not None else ())
        return OwnTrial(trial.number, values, earlier is not None, trial, lock, known)

    def end(self, own: OwnTrial, outcome: Outcome) -> None:
        """Store how a trial ended, and release it. A stopped trial can be resumed."""
        if outcome.state != "stopped":
            own.trial.set_user_attr("step", outcome.step)
            own.trial.set_user_attr("reason", outcome.reason)
            value = outcome.value if outcome.state == "complete" else None
            self.optuna.tell(own.number, value, state=_STATES[outcome.state])
        own.lock.close()


def _open_storage(storage: str) -> BaseStorage:
    if "://" not in storage:
        return JournalStorage(JournalFileBackend(os.path.abspath(os.path.expanduser(storage))))
    options: dict[str, Any] = {}
    if storage.startswith("sqlite:"):
        options = {"connect_args": {"timeout": _DATABASE_TIMEOUT_SECS}}
    return RDBStorage(storage, engine_kwargs=options)


def _sampler(file: StudyFile, number: int) -> optuna.samplers.BaseSampler:
    """Return the sampler that draws the trial of a number."""
    options = {"seed": 0, **file.sampler.options}
    seed = options.pop("seed")
    if file.sampler.name == "grid":
        return optuna.samplers.GridSampler(grid(file.space), seed=seed)
    if file.sampler.name == "random":
        return optuna.samplers.RandomSampler(seed=seed + number)
    # The constant liar keeps away from the values of trials that run in other processes.
    return optuna.samplers.TPESampler(seed=seed + number, constant_liar=True, **options)


def _pruner(method: Method) -> optuna.pruners.BasePruner:
    pruners = {
        "none": optuna.pruners.NopPruner,
        "median": optuna.pruners.MedianPruner,
        "percentile": optuna.pruners.PercentilePruner,
        "successive_halving": optuna.pruners.SuccessiveHalvingPruner,
        "hyperband": optuna.pruners.HyperbandPruner,
    }
    return pruners[method.name](**method.options)


class StopRequests:
    """Ctrl-C and SIGTERM, recorded while it is entered on the main thread."""

    def __init__(self) -> None:
        self.received: list[int] = []  # in order
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequests:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, lambda n, _: self.received.append(n))
        return self

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def is_urgent(self) -> bool:
        """Whether Ctrl-C came a second time: stop at once."""
        return len(self.received) > 1 and self.received[-1] == signal.SIGINT


@dataclasses.dataclass
class Sweep:
    """Runs the trials of a study one after another, in processes of their own.

    Ctrl-C and SIGTERM stop a sweep: the current trial saves and stops, and is resumed when the same
    command is started again.

    Attributes:
      dataset: The data set of the metric.
      command: Returns a trial's arguments, given the texts of its values and its folder.
      longer: Returns the command that trains the best trial for longer, given the texts of its
        values and its number of steps.
    """

    file: StudyFile
    folder: SweepFolder
    study: Study
    experiment: str
    dataset: str
    command: Callable[[dict[str, str], str], list[str]]
    longer: Callable[[dict[str, str], int], str]

    def run(self) -> int:
        """Run trials until all are done or a signal comes; return the exit code."""
        num_failed = 0
        with StopRequests() as stops:
            while not stops.received:
                own = self.study.take()
                if own is None:
                    break
                outcome = self._run_trial(own, stops)
                found = self._write_results()
                num_failed = num_failed + 1 if outcome.state == "failed" else 0
                if num_failed >= _MAX_FAILURES and report.best_of(found) is None:
                    _say(f"{num_failed} trials failed one after another; this sweep gives up")
                    break
        found = self._write_results()
        self._print_results(found)
        if stops.received:
            _say("the same command resumes this sweep")
            return 128 + stops.received[0]
        return 0 if any(result.state in ("complete", "unfinished") for result in found) else 1

    def _run_trial(self, own: OwnTrial, stops: StopRequests) -> Outcome:
        label, began = f"trial {own.number:04d}", time.monotonic()
        resumed = "resumed: " if own.is_resumed else ""
        values = ", ".join(f"{path}={report.shown(value)}" for path, value in own.values.items())
        _say(f"{label}: {resumed}{values}")
        folder = self.folder.trial(own.number)
        name = self.file.metric.removeprefix(f"{self.dataset}/")
        metrics = TrialMetrics(folder / "metrics.jsonl", dataset=self.dataset, name=name)
        process = TrialProcess(folder, self.command(_texts(own.values), str(folder)))
        try:
            outcome = self._follow(own, process, metrics, stops)
        except UnknownMetricError as error:
            process.close()
            # The trial is resumed once the metric is spelt right.
            own.lock.close()
            self.folder.forget_metric()
            raise UsageError(f"--study={self.file.path}: {error}") from error
        finally:
            process.close()
        self.study.end(own, outcome)
        took = f"{time.monotonic() - began:.0f} s"
        reason = f": {outcome.reason}" if outcome.reason else ""
        _say(f"{label}: {outcome.state} at step {outcome.step}, {took}{reason}")
        return outcome

    def _follow(
        self, own: OwnTrial, process: TrialProcess, metrics: TrialMetrics, stops: StopRequests
    ) -> Outcome:
        """Wait for the end of a trial, or stop it."""
        is_pruned, is_asked, is_killed = False, False, False
        code = None
        while code is None:
            code = process.wait(_SECONDS_BETWEEN_POLLS)
            for step, value in metrics.read():
                if own.report(step, value):
                    _say(f"trial {own.number:04d}: {metrics.label} {value:.5g} at step {step}")
                if code is None and not metrics.is_last(step):
                    is_pruned = is_pruned or own.trial.should_prune()
            is_to_stop = is_pruned or metrics.problem or stops.received
            if is_to_stop and not is_asked and code is None:
                process.stop()
                is_asked = True
            if stops.is_urgent and not is_killed and code is None:
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
        if stops.received:
            return Outcome("stopped", last, step)
        return Outcome("failed", last, step, process.reason(code))

    def _write_results(self) -> list[report.TrialResult]:
        found = report.results(self.study.trials(), self.file, self.folder)
        report.write_results(found, self.file, self.folder, experiment=self.experiment)
        return found

    def _print_results(self, found: list[report.TrialResult]) -> None:
        for line in report.table(found, self.file):
            _say(line)
        num_unfinished = sum(result.state == "unfinished" for result in found)
        if num_unfinished:
            _say(f"{num_unfinished} of {len(found)} trials are unfinished")
        _say(report.draw(self.study.optuna, self.file, self.folder))
        best = report.best_of(found)
        if best is not None:
            _say("next: the best of them, for twice as long")
            _say(f"  {self.longer(_texts(best.parameters), best.step)}")


def _texts(values: Mapping[str, Value]) -> dict[str, str]:
    return {path: override_text(value) for path, value in values.items()}


def _say(line: str) -> None:
    print(line, flush=True)
