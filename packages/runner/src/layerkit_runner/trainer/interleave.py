"""TrainPrograms: the training programs of a job, which take turns at one state.

Whose turn it is follows from the number of the step alone, so a run that was resumed anywhere goes
on as if it had never stopped. The host runs at most `max_inflight_steps` ahead of the devices, over
all programs together, and steps are reported in the order in which they were started.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from layerkit_runner.distributed.stop_signals import StopSignals
from layerkit_runner.errors import UsageError
from layerkit_runner.trainer.skipped_steps import SkippedSteps
from layerkit_runner.trainer.train import TrainProgram
from layerkit_runner.training.train_state import TrainState

_TRAINING = "train/"

# How many steps ahead batches are sent to the devices.
_STEPS_AHEAD = 2


class TrainPrograms:
    """Runs each training step by the program whose turn it is.

    Args:
      programs: At least one; the first begins. Each trains as many steps in a row as its `steps`
        says, then the next has its turn, and after the last the first again.
      max_inflight_steps: How many steps may be started and not reported.
      skipped: Counts of the steps that were not valid; None counts without a limit.

    Raises:
      UsageError: a turn without steps.
    """

    def __init__(
        self,
        programs: Sequence[TrainProgram],
        *,
        max_inflight_steps: int,
        skipped: SkippedSteps | None = None,
    ) -> None:
        for program in programs:
            if program.steps < 1:
                raise UsageError(
                    f"{program.dataset_name}: steps={program.steps} must be at least 1"
                )
        self.programs = tuple(programs)
        self.skipped = SkippedSteps() if skipped is None else skipped
        self._turns = [*itertools.accumulate(program.steps for program in programs)]
        self._max_inflight_steps = max_inflight_steps
        # Of each step that is not reported yet, its program.
        self._started: collections.deque[TrainProgram] = collections.deque()
        self._has_reported = False

    @property
    def num_turn_steps(self) -> int:
        """After how many steps it is the first program's turn again."""
        return self._turns[-1]

    def of_step(self, step: int) -> TrainProgram:
        """The program of a step; the first step is number 1."""
        place = (step - 1) % self.num_turn_steps
        return next(p for p, end in zip(self.programs, self._turns, strict=True) if place < end)

    def share(self, program: TrainProgram) -> float:
        """Which fraction of the steps is a program's."""
        return program.steps / self.num_turn_steps

    def run_step(
        self, state: TrainState, step: int, signals: StopSignals | None = None
    ) -> TrainState:
        """Start step number `step` (from 1) and return its state, not yet computed.

        Raises:
          StopRequestedError: One of the `signals` came before the step was started.
        """
        program = self.of_step(step)
        state = program.start_step(state, step, self._is_idle, signals)
        self._started.append(program)
        for later in range(step + 1, step + 1 + _STEPS_AHEAD):
            self.of_step(later).fill_feed()
        # The first step is waited for, so that its loss is seen as soon as there is one.
        limit = self._max_inflight_steps if self._has_reported else 0
        while len(self._started) > limit:
            self._report_oldest()
        return state

    def drain(self) -> None:
        """Waits for all steps and reports them."""
        while self._started:
            self._report_oldest()

    def stored_state(self, state: TrainState) -> TrainState:
        """What a checkpoint holds of a state; see `TrainProgram.stored_state`."""
        return self.programs[0].stored_state(state)

    def input_states(self) -> dict[str, Any]:
        """Where the inputs stand after the steps that were started, by `input_key`."""
        return {self.input_key(program): program.input_state() for program in self.programs}

    def set_input_states(self, states: Mapping[str, Any]) -> list[TrainProgram]:
        """Puts the inputs where a checkpoint says they stood, before the first step.

        Returns:
          The programs of whose data the checkpoint says nothing; they begin at their start.
        """
        # Without a name: what there was before there were several.
        known = [key for key in states if key == "train" or key.startswith(_TRAINING)]
        if len(known) == len(self.programs) == 1:
            # It may have got another name since.
            self.programs[0].dataset.set_state(states[known[0]])
            return []
        unknown = []
        for program in self.programs:
            key = self.input_key(program)
            if key in states:
                program.dataset.set_state(states[key])
            else:
                unknown.append(program)
        return unknown

    def input_key(self, program: TrainProgram) -> str:
        """Under which a checkpoint holds where the data set of a program stands."""
        return _TRAINING + program.dataset_name

    def close(self) -> None:
        """Ends the reading."""
        for program in self.programs:
            program.dataset.close()

    def _is_idle(self) -> bool:
        return all(program.is_idle() for program in self.programs)

    def _report_oldest(self) -> None:
        self._started.popleft().report_oldest(self.skipped)
        self._has_reported = True
