"""The training loop.

Each iteration saves if a checkpoint is due, stops if a signal asks for it, trains a step, runs the
evaluations and decodings that are due, and asks the rule for early stopping. The loop ends with a
save. The final model is evaluated and decoded afterwards, by the report at the end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from layerkit.errors import error_text
from layerkit_inputs.base.base_input import BaseInput
from layerkit_runner.checkpointing import (
    CheckpointManager,
    RestoredCheckpoint,
    SaveError,
    SaveTimeoutError,
)
from layerkit_runner.config.config_tree import check_class, check_required_fields
from layerkit_runner.config.requests import ResolvedExperiment
from layerkit_runner.data.train_inputs import TrainInputs
from layerkit_runner.distributed.cluster import run_on_process_0
from layerkit_runner.distributed.stop_signals import StopRequestedError, StopSignals
from layerkit_runner.distributed.watchdog import phase, progress
from layerkit_runner.errors import (
    UNREADABLE_DATA,
    NonFiniteError,
    StorageError,
    UsageError,
    exits_as_errors,
)
from layerkit_runner.observers import DECODE_PREFIX, Goodput, Observer, Throughput
from layerkit_runner.observers.step_profiler import StepProfiler
from layerkit_runner.optim.early_stopping import TRAIN_STEP, EarlyStop, join_metrics, program_of
from layerkit_runner.run.programs.eval_program import BaseProgram
from layerkit_runner.run.programs.skipped_steps import SKIPPED_STEPS
from layerkit_runner.run.programs.train_program import RollbackRequestedError, TrainPrograms
from layerkit_runner.step.train_hparams import TrainHParams
from layerkit_runner.step.train_state import TrainState

EARLY_STOPPING = "early_stopping"
"""Metadata key of the early-stopping state in a checkpoint."""

ENDED = "ended"
"""Metadata key that marks the last checkpoint of a job that ended before its last step."""


@dataclasses.dataclass
class Executor:
    """Runs programs in order until the last step, a signal or early stopping.

    An experiment may replace it by a derived class, returned by `executor()`, whose added fields
    the experiment sets. Derived classes override `is_over`, `evaluate`, `decode` or `run_due`,
    which is called after every step except the last one.

    Attributes:
      train: Number of steps and intervals.
      checkpoints: Checkpoints of the job; None saves nothing.
      stored_state: Function that brings a state into the form that checkpoints store.
      restore: Function that restores the newest checkpoint of the job; None without rollbacks.
      signals: Active signal handler (already entered as a context manager).
      profiler: Active profiler of steps; None captures nothing.
      early_stop: Rule that is asked after each step with an evaluation or, if it asks for that,
        after each step; None for no such rule.
      decode_interval_steps: Steps between two decodings; None decodes at the end only.
      after_first_step: Called once, after the first step of this process; None for nothing.
      after_eval: Called after the evaluations of a step; None for nothing.
    """

    train: TrainHParams
    train_programs: TrainPrograms
    eval_programs: Sequence[BaseProgram]
    decode_programs: Sequence[BaseProgram]
    checkpoints: CheckpointManager | None
    metadata: Mapping[str, Any]
    observers: Observer
    throughput: Throughput
    signals: StopSignals
    goodput: Goodput
    stored_state: Callable[[TrainState], TrainState] = lambda state: state
    restore: Callable[[], RestoredCheckpoint | None] | None = None
    exit_after_ondemand_checkpoint: bool = False
    profiler: StepProfiler | None = None
    early_stop: EarlyStop | None = None
    decode_interval_steps: int | None = None
    after_first_step: Callable[[], None] | None = None
    after_eval: Callable[[], None] | None = None
    # Error of a program that could not be traced after the first step.
    _refusal: UsageError | None = dataclasses.field(default=None, init=False)
    # (step, metrics by program) of the latest evaluations.
    _evaluated: tuple[int, dict[str, dict[str, float]]] = dataclasses.field(
        default_factory=lambda: (-1, {}), init=False
    )

    @property
    def has_stopped_early(self) -> bool:
        """True if early stopping ended the run, now or before it was resumed."""
        return self.early_stop is not None and self.early_stop.stopped_at is not None

    def run(self, state: TrainState, step: int) -> tuple[TrainState, int]:
        """Train from `step` completed steps; return the state and the number of completed steps.

        Raises:
          NonFiniteError: Too many steps were not valid, or the state is not finite.
          ExitError: Code of the run called `sys.exit`.
          Exception: A data set could not be read, or a program, metric or observer failed. A job of
            one process has saved the state first, unless a device failed.
        """
        with self.goodput.phase("steps"):
            return self._run(state, step)

    def _run(self, state: TrainState, step: int) -> tuple[TrainState, int]:
        skipped, first = self.train_programs.skipped, step
        if step >= self.train.num_train_steps:
            # A run that failed at its last step cannot recover in a later step.
            skipped.apply_limits(step, is_over=True)
        try:
            with exits_as_errors():
                if (
                    self.checkpoints is not None
                    and self.train.learner.rolls_back
                    and run_on_process_0(self.checkpoints.latest_step) is None
                ):
                    self._save(state, step, force=True)
                while True:
                    try:
                        if skipped.problem is not None or self._ends_before(state, step):
                            self.train_programs.drain()
                            self._stop_profile(state, step)
                            self._save(state, step, force=True)
                            break
                        state = self.train_programs.start_step(state, step + 1, self.signals)
                        step += 1
                        # The step took over the arrays of the state before it, so the state must
                        # be replaced before an observer can end the run.
                        self.train_programs.report_due()
                        self._work_after(state, step)
                    except StopRequestedError:
                        continue
                    except RollbackRequestedError as request:
                        with self.goodput.phase("other"):
                            state, step = self._roll_back(state, step, request.args[0])
        except (SaveError, NonFiniteError):
            raise  # another save would fail too
        except Exception as error:
            # After an error of the devices, the arrays of the state may not exist. A program that
            # cannot be traced leaves no checkpoint, whether it is traced before or after step 1.
            is_of_devices = isinstance(error, jax.errors.JaxRuntimeError)
            if step > first and not is_of_devices and error is not self._refusal:
                self._save_after(error, state, step)
            raise
        if step >= self.train.num_train_steps or self.has_stopped_early:
            skipped.apply_limits(step, is_over=True)
        if skipped.problem is not None:
            raise NonFiniteError(skipped.problem)
        return state, step

    def _ends_before(self, state: TrainState, step: int) -> bool:
        """Save and start a profile if they are due; return whether training ends after `step`."""
        while True:
            stops = self.signals.agreed(step)
            on_demand = self._save_if_due(state, step)
            if stops or (on_demand and self.exit_after_ondemand_checkpoint):
                return True
            progress(f"asking {type(self).__name__}.is_over after step {step}")
            if not self.is_over(step):
                break
            self.train_programs.drain()  # It may ask for a rollback, after which more steps follow.
            if self.signals.finish():
                return True
        if self.profiler is not None and self.profiler.starts_before(step + 1):
            # Without `drain`, after which this process alone would see a bad step early.
            jax.block_until_ready(state)
            with self.goodput.phase("profile"):
                self.profiler.start(step + 1)
        return False

    def _roll_back(
        self, state: TrainState, step: int, input_states: Mapping[str, Any]
    ) -> tuple[TrainState, int]:
        """Restore the newest checkpoint before a bad step, and return its state and step.

        The run continues with the data after the bad step, whose positions are `input_states`. All
        of this follows from the checkpoint and the steps after it. So a run that is killed
        meanwhile, or before it saves again, repeats the same steps and the same rollback.
        """
        programs, skipped = self.train_programs, self.train_programs.skipped
        assert skipped.rollback is not None
        bad_step = skipped.rollback["last_step"]
        progress(f"rolling back because of step {bad_step}", compiles=True, waits_for_others=True)
        programs.abandon()
        self._stop_profile(state, step)
        # The devices have no room for two states.
        for leaf in jax.tree.leaves(jax.block_until_ready(state)):
            leaf.delete()
        assert self.checkpoints is not None and self.restore is not None
        self.checkpoints.abandon_from(bad_step)
        if (restored := self.restore()) is None:
            raise NonFiniteError(f"training stopped: no checkpoint before step {bad_step} is left")
        others = inputs_by_key(self.eval_programs, self.decode_programs)
        positions = {**restored.input_states, **input_states}
        restore_positions(programs.inputs, others, positions, step=restored.step)
        if self.early_stop is not None:
            record = restored.metadata.get(EARLY_STOPPING)
            self.early_stop.restore(record, report=self.observers.message)
        self._evaluated = (-1, {})
        self.observers.rollback(restored.step, skipped.rollback)
        skipped.go_back(restored.step, restored.metadata.get(SKIPPED_STEPS))
        self.signals.go_back(step - restored.step)
        self.observers.message(
            f"rolled back to step {restored.step}: the data of steps {restored.step + 1} to"
            f" {bad_step} are left out (rollback {len(skipped.rollbacks)} of this run)"
        )
        return restored.state, restored.step

    def _save_if_due(self, state: TrainState, step: int) -> bool:
        """Save at an interval or on a signal; return whether a signal asked for it."""
        on_demand = self.signals.saves
        if on_demand and self.checkpoints is None:
            self.observers.message("not saved: the run has --noenable_checkpoint_saving")
            on_demand = False
        elif on_demand or (self.checkpoints is not None and self.checkpoints.should_save(step)):
            self._save(state, step, force=on_demand)
            if on_demand:
                self.observers.message(f"saved step {step} on SIGUSR1")
        self.signals.saves = False  # After a rollback, which `_save` may ask for, it is still True.
        return on_demand

    def _work_after(self, state: TrainState, step: int) -> None:
        """Run what is due after a step: the callback, the end of a profile, `run_due`."""
        if self.after_first_step is not None:
            try:
                with self.goodput.phase("compile"):
                    self.after_first_step()
            except UsageError as error:
                self._refusal = error
                raise
            self.after_first_step = None
        if self.profiler is not None and self.profiler.ends_after(step):
            self._stop_profile(state, step)
        if step < self.train.num_train_steps:
            with phase(f"{type(self).__name__}.run_due after step {step}", waits_for_others=True):
                self.run_due(state, step)

    def is_over(self, step: int) -> bool:
        """Return whether the job is complete after `step` steps."""
        return step >= self.train.num_train_steps or self.has_stopped_early

    def run_due(self, state: TrainState, step: int) -> None:
        """Run the evaluations and decodings that are due, and ask the early-stopping rule."""
        evals = due_programs(self.eval_programs, step, self.train.eval_interval_steps)
        decodes = due_programs(self.decode_programs, step, self.decode_interval_steps)
        metrics: dict[str, float] = {}
        if self.early_stop is not None and self.early_stop.rule.asks_each_step():
            self.train_programs.drain()
            metrics |= join_metrics({TRAIN_STEP: self.train_programs.last_metrics()})
        if evals:
            metrics |= join_metrics(self.evaluate(state, step, evals))
        if decodes:
            decoded = self.decode(state, step, decodes)
            metrics |= join_metrics(
                {DECODE_PREFIX + p.name: p.metrics for p in decodes if p.name in decoded}
            )
        if metrics and self.early_stop is not None and self.early_stop.asks_to_stop(metrics, step):
            self.observers.message(self.early_stop.message())

    def evaluate(
        self, state: TrainState, step: int, programs: Sequence[BaseProgram] | None = None
    ) -> dict[str, dict[str, float]]:
        """Run eval programs (None: all of them); return the metrics by program."""
        programs = self.eval_programs if programs is None else programs
        self.train_programs.drain()
        with self.goodput.phase("eval"):
            results = {p.name: dict(self._run_program(p, state, step)) for p in programs}
        self._evaluated = (step, self._evaluated_after(step) | results)
        self._record(step, results)
        if self.after_eval is not None:
            self.after_eval()
        return results

    def evaluate_rest(self, state: TrainState, step: int) -> dict[str, dict[str, float]]:
        """Run the eval programs that did not run after this step; return all metrics by program."""
        done = self._evaluated_after(step)
        rest = [program for program in self.eval_programs if program.name not in done]
        return done | (self.evaluate(state, step, rest) if rest else {})

    def decode(
        self, state: TrainState, step: int, programs: Sequence[BaseProgram] | None = None
    ) -> dict[str, list[dict[str, Any]]]:
        """Run decode programs (None: all of them); return the records by program.

        Before `decode_start_after_n_steps`, return an empty dict and run none, except at the last
        step of training.
        """
        programs = self.decode_programs if programs is None else programs
        first = min(self.train.decode_start_after_n_steps, self.train.num_train_steps)
        if step < first or not programs:
            return {}
        self.train_programs.drain()
        with self.goodput.phase("decode"):
            return {p.name: self._run_program(p, state, step) for p in programs}

    def _run_program(self, program: BaseProgram, state: TrainState, step: int) -> Any:
        with phase(f"running {program.name} after step {step}", waits_for_others=True):
            return program.run(state, step, self.observers)

    def _stop_profile(self, state: TrainState, step: int) -> None:
        jax.block_until_ready(state)
        if self.profiler is not None:
            with self.goodput.phase("profile"):
                self.profiler.stop(step)

    def _record(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        """Record evaluations for the choice of the best checkpoints."""
        metrics, best = join_metrics(results), self.train.save_best_metric
        names = {program.name for program in self.eval_programs}
        name = None if best is None else program_of(best, names | results.keys())
        if name in results and best not in metrics:
            field = "task.train.save_best_metric"
            raise UsageError("unknown metric", field=field, value=best, choices=metrics)
        if self.checkpoints is not None:
            self.checkpoints.record_evaluation(step, metrics)

    def _save(
        self, state: TrainState, step: int, *, force: bool = False, may_be_over: bool = True
    ) -> None:
        if self.checkpoints is None:
            return
        self.train_programs.drain()
        skipped = self.train_programs.skipped
        if skipped.problem is not None and not skipped.has_taken_any:
            # Otherwise the next start would resume from these untrained weights as the last step.
            return
        progress(f"saving step {step}", waits_for_others=True)
        self.observers.flush()
        with self.goodput.phase("save"):
            self.checkpoints.save(
                step,
                self.stored_state(state),
                input_states=self.train_programs.input_states() | self._program_input_states(),
                metadata=self._metadata(step, may_be_over=may_be_over),
                force=force,
            )

    def _save_after(self, error: Exception, state: TrainState, step: int) -> None:
        """Save the completed steps, and set the exit code of an error that followed them."""
        if isinstance(error, UsageError) and error.exit_code == UsageError.exit_code:
            is_storage = isinstance(error.__cause__, OSError)
            error.exit_code = UNREADABLE_DATA if is_storage else StorageError.exit_code
        # Other processes may have started the next step, which never ends.
        if jax.process_count() == 1 and self.checkpoints is not None:
            try:
                with exits_as_errors():
                    # The error may be that of `is_over`.
                    self._save(state, step, force=True, may_be_over=False)
                    self.checkpoints.wait_until_finished()
            except (SaveTimeoutError, NonFiniteError):
                self.observers.message(error_text(error))
                raise  # it ends the process, which would otherwise wait for the threads of the save
            except SaveError as failure:
                self.observers.message(str(failure))
            except Exception as failure:  # such as the report of the next step
                self.observers.message(f"step {step} is not saved: {error_text(failure)}")
            else:
                self.observers.message(f"saved step {step} after an error")

    def _metadata(self, step: int, *, may_be_over: bool) -> dict[str, Any]:
        metadata = dict(self.metadata)
        if self.early_stop is not None:
            metadata[EARLY_STOPPING] = self.early_stop.record()
        skipped = self.train_programs.skipped
        if skipped.in_all or skipped.rollbacks:
            metadata[SKIPPED_STEPS] = skipped.record()
        if may_be_over and step < self.train.num_train_steps and self.is_over(step):
            metadata[ENDED] = True
        return metadata

    def _evaluated_after(self, step: int) -> dict[str, dict[str, float]]:
        evaluated_at, results = self._evaluated
        return results if evaluated_at == step else {}

    def _program_input_states(self) -> dict[str, Any]:
        inputs = inputs_by_key(self.eval_programs, self.decode_programs)
        return {key: d.get_state() for key, d in inputs.items() if not d.reset_for_eval}


def executor_class(resolved: ResolvedExperiment) -> Callable[..., Executor]:
    """Return a function that makes the executor from the values of the fields of `Executor`."""
    config = resolved.executor
    if config is None:
        return Executor
    set_by_job = {field.name for field in dataclasses.fields(Executor) if field.init}
    check_class(config, "executor", Executor)
    check_required_fields(config, "executor", by_job=set_by_job)
    return config.Instantiate


def inputs_by_key(
    evals: Iterable[BaseProgram], decodes: Iterable[BaseProgram]
) -> dict[str, BaseInput]:
    """Return the inputs of programs by the checkpoint key of their position."""
    keys = {f"eval/{program.name}": program for program in evals}
    keys |= {DECODE_PREFIX + program.name: program for program in decodes}
    return {key: p.dataset for key, p in keys.items() if p.dataset is not None}


def restore_positions(
    inputs: TrainInputs, others: Mapping[str, BaseInput], states: Mapping[str, Any], *, step: int
) -> list[str]:
    """Restore the positions of inputs by checkpoint key for the steps after `step`.

    Returns:
      The keys of the training inputs without a position.
    """
    missing = inputs.set_states(states, step=step)
    for key in sorted(others.keys() & states.keys()):
        others[key].set_state(states[key])
    return missing


def due_programs(
    programs: Sequence[BaseProgram], step: int, interval: int | None
) -> list[BaseProgram]:
    """Return the programs due after `step` steps, by their own interval or by `interval`."""
    return [
        program
        for program in programs
        if (every := program.interval_steps or interval) is not None and step % every == 0
    ]
