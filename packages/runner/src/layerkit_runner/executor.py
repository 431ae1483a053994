"""The loop of a training job.

Each turn: save if due → leave if asked → train a step → evaluate if due → decode if due. At the end
a forced save, then evaluation and decoding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from layerkit_runner.checkpoints import CheckpointManager
from layerkit_runner.observers import Observer, Throughput
from layerkit_runner.programs import DecodeProgram, EvalProgram, TrainProgram
from layerkit_runner.stop_signals import StopSignals
from layerkit_runner.task import TrainHParams
from layerkit_runner.train_state import TrainState


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

    def run(self, state: TrainState, step: int) -> tuple[TrainState, int]:
        """Trains from `step` completed steps on.

        Returns:
          (state, number of completed steps): all of `num_train_steps` unless a signal came.
        """
        while True:
            if self.checkpoints is not None and self.checkpoints.should_save(step):
                self._save(state, step)
            if self.signals.agreed(step) or step >= self.train.num_train_steps:
                break
            state = self.train_program.run_step(state, step + 1)
            step += 1
            if step < self.train.num_train_steps:
                self._run_due(state, step)
        self.train_program.drain()
        self._save(state, step, force=True)
        return state, step

    def evaluate(self, state: TrainState, step: int) -> dict[str, dict[str, float]]:
        """Runs every eval program; metrics by data set."""
        self.train_program.drain()
        with self.throughput.pause():
            return {p.name: p.run(state, step, self.observers) for p in self.eval_programs}

    def decode(self, state: TrainState, step: int) -> dict[str, list[dict[str, Any]]]:
        """Runs every decode program; records by data set."""
        self.train_program.drain()
        with self.throughput.pause():
            return {p.name: p.run(state, step, self.observers) for p in self.decode_programs}

    def _run_due(self, state: TrainState, step: int) -> None:
        if is_due(step, self.train.eval_interval_steps):
            self.evaluate(state, step)
        if is_due(step, self.train.decode_interval_steps):
            self.decode(state, step)

    def _save(self, state: TrainState, step: int, *, force: bool = False) -> None:
        if self.checkpoints is None:
            return
        self.train_program.drain()
        self.observers.flush()
        with self.throughput.pause():
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


def eval_input_key(name: str) -> str:
    """Under which a checkpoint holds the state of a held-out input."""
    return f"eval/{name}"


def is_due(step: int, interval: int | None) -> bool:
    """Whether something that happens every `interval` steps (None: never) happens at `step`."""
    return interval is not None and step % interval == 0
