"""A sweep's study in Optuna: whose turn it is, and what is known of every trial.

Each trial is drawn by a sampler that is seeded with the study's seed and the trial's number. So a
sweep that was stopped goes on as if it had not been, and two processes never draw the same.

A trial that Optuna holds for running and whose lock nobody holds lost its process: it is taken up
again under its own number, with its values and its folder, and so from its checkpoint. (Optuna's
heartbeats tell the same only after a while, fail the trial and begin another.)

`--study_storage` is the URL of a database, or the path of a journal file: SQLite may lose data on a
network disk that several machines write, and Optuna's journal does not.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Mapping
from typing import IO, Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from layerkit_runner.errors import UsageError
from layerkit_runner.tools.sweep.folder import SweepFolder
from layerkit_runner.tools.sweep.search_space import Value
from layerkit_runner.tools.sweep.study_file import Method, StudyFile

_SECONDS_TO_WAIT_FOR_DATABASE = 60


@dataclasses.dataclass(frozen=True)
class OwnTrial:
    """A trial that this process runs.

    Attributes:
      number: Which, from 0.
      values: What it takes, by the path of each field.
      is_resumed: Whether another process had begun it.
    """

    number: int
    values: Mapping[str, Value]
    is_resumed: bool
    _trial: optuna.Trial
    _lock: IO[bytes]
    # Steps whose values a process before this one reported.
    _known: frozenset[int]

    def report(self, step: int, value: float) -> bool:
        """Tells the value of the metric after so many training steps; False if it was known."""
        if step in self._known:
            return False
        self._trial.report(value, step)
        return True

    def should_prune(self) -> bool:
        """Whether the trial is not worth more steps."""
        return self._trial.should_prune()

    def keep(self, **facts: Any) -> None:
        """Keeps facts beside it, for the reports of all processes."""
        for name, fact in facts.items():
            self._trial.set_user_attr(name, fact)

    def release(self) -> None:
        """Lets go of it."""
        self._lock.close()


class Study:
    """The study of one folder, shared by all processes that run it.

    Args:
      file: What to search.
      folder: Where.
      name: By which the storage knows it.
      storage: A database's URL or a journal file; None for `study.db` in the folder.

    Raises:
      UsageError: the storage cannot be opened.
    """

    def __init__(
        self, file: StudyFile, folder: SweepFolder, *, name: str, storage: str | None
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
        self._file = file
        self._folder = folder
        self._sampler = _samplers(file)
        with folder.deciding():
            try:
                self._storage = _open_storage(storage or f"sqlite:///{folder.path / 'study.db'}")
                self._study = optuna.create_study(
                    storage=self._storage,
                    study_name=name,
                    direction=file.direction,
                    pruner=_pruner(file.pruner),
                    load_if_exists=True,
                )
            except Exception as error:  # the drivers of databases each have errors of their own
                raise UsageError(f"--study_storage={storage or 'study.db'}: {error}") from error

    def close(self) -> None:
        """Close the connections to the storage; call it once, at the end."""
        self._storage.remove_session()
        if isinstance(self._storage, optuna.storages.RDBStorage):
            self._storage.engine.dispose()

    def trials(self) -> list[FrozenTrial]:
        """All trials of all processes, by number."""
        return self._study.get_trials()

    def take(self) -> OwnTrial | None:
        """A trial to run, now this process's own: one left behind, else a new one.

        Returns:
          None if all trials are done or run elsewhere.
        """
        with self._folder.deciding():
            trials = self.trials()
            for frozen in trials:
                if frozen.state == TrialState.RUNNING:
                    lock = self._folder.try_to_own(frozen.number)
                    if lock is not None:
                        self._study.sampler = self._sampler(frozen.number)
                        trial = optuna.Trial(self._study, frozen._trial_id)
                        return self._own(trial, lock, frozenset(frozen.intermediate_values))
            if len(trials) >= self._file.num_trials:
                return None
            self._study.sampler = self._sampler(len(trials))
            trial = self._study.ask()
            lock = self._folder.try_to_own(trial.number)
            if lock is None:
                raise UsageError(
                    f"{self._folder.trial(trial.number)} is in use, but the storage does not know"
                    " that trial; was its study deleted?"
                )
            return self._own(trial, lock, None)

    def _own(self, trial: optuna.Trial, lock: IO[bytes], known: frozenset[int] | None) -> OwnTrial:
        # Values that the trial has already are returned as they are.
        values = {path: p.suggest(trial, path) for path, p in self._file.space.items()}
        # Samplers draw, and have nothing to do with how a trial ends.
        self._study.sampler = optuna.samplers.RandomSampler()
        is_resumed = known is not None
        return OwnTrial(trial.number, values, is_resumed, trial, lock, known or frozenset())

    def complete(self, own: OwnTrial, value: float) -> None:
        """The trial ran to its end."""
        self._study.tell(own.number, value)
        own.release()

    def prune(self, own: OwnTrial) -> None:
        """The trial was stopped as not worth more steps."""
        self._study.tell(own.number, state=TrialState.PRUNED)
        own.release()

    def fail(self, own: OwnTrial) -> None:
        """The trial has no value."""
        self._study.tell(own.number, state=TrialState.FAIL)
        own.release()


def _open_storage(storage: str) -> optuna.storages.BaseStorage:
    if "://" not in storage:
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        return JournalStorage(JournalFileBackend(os.path.abspath(os.path.expanduser(storage))))
    options: dict[str, Any] = {}
    if storage.startswith("sqlite:"):
        options = {"connect_args": {"timeout": _SECONDS_TO_WAIT_FOR_DATABASE}}
    return optuna.storages.RDBStorage(storage, engine_kwargs=options)


def _samplers(file: StudyFile) -> Callable[[int], optuna.samplers.BaseSampler]:
    """What makes the sampler of the trial of a number."""
    options = {"seed": 0, **file.sampler.options}
    seed = options.pop("seed")
    if file.sampler.name == "grid":
        grid = {path: parameter.all_values() or [] for path, parameter in file.space.items()}
        return lambda number: optuna.samplers.GridSampler(grid, seed=seed)
    if file.sampler.name == "random":
        return lambda number: optuna.samplers.RandomSampler(seed=seed + number)
    # With a constant liar, trials that run elsewhere count, and their surroundings are left alone.
    return lambda number: optuna.samplers.TPESampler(
        seed=seed + number, constant_liar=True, **options
    )


def _pruner(method: Method) -> optuna.pruners.BasePruner:
    pruners = {
        "none": optuna.pruners.NopPruner,
        "median": optuna.pruners.MedianPruner,
        "percentile": optuna.pruners.PercentilePruner,
        "successive_halving": optuna.pruners.SuccessiveHalvingPruner,
        "hyperband": optuna.pruners.HyperbandPruner,
    }
    return pruners[method.name](**method.options)
