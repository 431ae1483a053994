"""The loop of a training job.

Each turn: save if due → leave if asked → train a step → evaluate if due → decode if due. At the end
a forced save, then evaluation and decoding.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from layerkit.near_names import near_names
from layerkit_runner.checkpoints import CheckpointManager
from layerkit_runner.errors import UsageError, first_names
from layerkit_runner.observers import Goodput, Observer, Throughput
from layerkit_runner.observers.step_profiler import StepProfiler
from layerkit_runner.processes.stop_signals import StopSignals
from layerkit_runner.processes.watchdog import progress
from layerkit_runner.programs import DecodeProgram, EvalProgram, TrainProgram
from layerkit_runner.steps.train_state import TrainState
from layerkit_runner.train_hparams import TrainHParams


@dataclasses.dataclass
class Executor:
    """Runs programs in order until the last step or a signal.

    Attributes:
      train: How long, and how often what is due.
      train_program: Started.
      eval_programs: One per held-out data set.
      decode_programs: One per decode data set.
      checkpoints: Where to save; None saves nothing.
      metadata: Kept beside each checkpoint.
      observers: Whom to report to.
      throughput: The clock of the steps.
      signals: Entered.
      exit_after_ondemand_checkpoint: Whether to leave once a signal asked to save.
      goodput: What becomes of the time.
      profiler: Entered; None captures nothing.
    """

    train: TrainHParams
    train_program: TrainProgram
    eval_programs: list[EvalProgram]
    decode_programs: list[DecodeProgram]
    checkpoints: CheckpointManager | None
    metadata: Mapping[str, Any]
    observers: Observer
    throughput: Throughput
    signals: StopSignals
    exit_after_ondemand_checkpoint: bool = False
    goodput: Goodput = dataclasses.field(default_factory=Goodput)
    profiler: StepProfiler | None = None

    def run(self, state: TrainState, step: int) -> tuple[TrainState, int]:
        """Trains from `step` completed steps on.

        Returns:
          (state, number of completed steps): all of `num_train_steps` unless a signal came.
        """
        with self.goodput.phase("steps"):
            return self._run(state, step)

    def _run(self, state: TrainState, step: int) -> tuple[TrainState, int]:
        while True:
            stops = self.signals.agreed(step)
            on_demand = self.signals.take_save_request() and self._can_save_on_demand()
            if on_demand or (self.checkpoints is not None and self.checkpoints.should_save(step)):
                self._save(state, step, force=on_demand)
            if on_demand:
                self.observers.message(f"step {step} is the checkpoint that SIGUSR1 asked for")
            if stops or (on_demand and self.exit_after_ondemand_checkpoint):
                break
            if step >= self.train.num_train_steps:
                break
            step += 1
            self._start_profile_if_due(step)
            state = self.train_program.run_step(state, step)
            if self.profiler is not None and self.profiler.ends_after(step):
                self._stop_profile(step)
            if step < self.train.num_train_steps:
                self._run_due(state, step)
        self._stop_profile(step)
        self._save(state, step, force=True)
        return state, step

    def evaluate(self, state: TrainState, step: int) -> dict[str, dict[str, float]]:
        """Runs every eval program; metrics by data set."""
        self.train_program.drain()
        with self._besides("eval"):
            found = {p.name: p.run(state, step, self.observers) for p in self.eval_programs}
        self._record(step, found)
        return found

    def decode(self, state: TrainState, step: int) -> dict[str, list[dict[str, Any]]]:
        """Runs every decode program; records by data set."""
        self.train_program.drain()
        with self._besides("decode"):
            return {p.name: p.run(state, step, self.observers) for p in self.decode_programs}

    @contextlib.contextmanager
    def _besides(self, phase: str) -> Iterator[None]:
        """Around work that is no training step: its time counts as `phase`, and in no rate."""
        with self.throughput.pause(), self.goodput.phase(phase):
            yield

    def _start_profile_if_due(self, step: int) -> None:
        if self.profiler is not None and self.profiler.starts_before(step):
            self.train_program.drain()
            with self._besides("profile"):
                self.profiler.start(step)

    def _stop_profile(self, step: int) -> None:
        """Waits for all steps, and writes the trace of the last ones where there is one."""
        self.train_program.drain()
        if self.profiler is not None:
            with self._besides("profile"):
                self.profiler.stop(step)

    def _run_due(self, state: TrainState, step: int) -> None:
        if is_due(step, self.train.eval_interval_steps):
            self.evaluate(state, step)
        if is_due(step, self.train.decode_interval_steps):
            self.decode(state, step)

    def _record(self, step: int, found: Mapping[str, Mapping[str, float]]) -> None:
        """Lets the checkpoints know how good the weights are."""
        metrics = {
            f"{dataset}/{name}": value
            for dataset, values in found.items()
            for name, value in values.items()
        }
        wanted = self.train.save_best_metric
        if wanted is not None and wanted not in metrics:
            raise UsageError(
                f"task.train.save_best_metric={wanted!r} is no metric of an evaluation"
                f"{near_names(wanted, metrics)} There are {first_names(metrics)}."
            )
        if self.checkpoints is not None:
            self.checkpoints.record_evaluation(step, metrics)

    def _can_save_on_demand(self) -> bool:
        if self.checkpoints is None:
            self.observers.message("nothing is saved: this run has --noenable_checkpoint_saving")
        return self.checkpoints is not None

    def _save(self, state: TrainState, step: int, *, force: bool = False) -> None:
        if self.checkpoints is None:
            return
        self.train_program.drain()
        progress(f"saving step {step}", waits_for_others=True)
        self.observers.flush()
        with self._besides("save"):
            self.checkpoints.save(
                step,
                state,
                input_states=self._input_states(),
                metadata=self.metadata,
                force=force,
            )

    def _input_states(self) -> dict[str, Any]:
        """Where the inputs stand; an evaluation that reads a whole epoch starts anew each time."""
        rolling = {
            eval_input_key(program.name): program.dataset.get_state()
            for program in self.eval_programs
            if not program.dataset.reset_for_eval
        }
        return {"train": self.train_program.input_state(), **rolling}


def check_best_metric(train: TrainHParams, datasets: Iterable[str]) -> None:
    """Whether the metric by which the best checkpoints are told can be one of these data sets.

    Raises:
      UsageError: it names none of them.
    """
    wanted, datasets = train.save_best_metric, list(datasets)
    if wanted is None or any(wanted.startswith(f"{name}/") for name in datasets):
        return
    raise UsageError(
        f"task.train.save_best_metric={wanted!r} names no held-out data set"
        f"{near_names(wanted.split('/')[0], datasets)} It is written DATASET/METRIC, and the data"
        f" sets are {first_names(datasets) or 'none'}."
    )


def eval_input_key(name: str) -> str:
    """Under which a checkpoint holds the state of a held-out input."""
    return f"eval/{name}"


def is_due(step: int, interval: int | None) -> bool:
    """Whether something that happens every `interval` steps (None: never) happens at `step`."""
    return interval is not None and step % interval == 0
