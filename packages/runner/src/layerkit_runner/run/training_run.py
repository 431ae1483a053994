"""`--mode=train`: trains or resumes a run, and reports the result.

`TrainingRun` has the phases of a run as methods, in their order.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import threading
from collections.abc import Callable

import jax

from layerkit.errors import error_text
from layerkit_runner.checkpointing import CheckpointManager, RestoredCheckpoint, SaveTimeoutError
from layerkit_runner.checkpointing.errors import naming_damage
from layerkit_runner.config.requests import ResolvedExperiment
from layerkit_runner.data.host_inputs import peek_batch
from layerkit_runner.data.train_inputs import TrainInputs, check_same_data
from layerkit_runner.distributed.cluster import distributed_state, gather_values, run_on_process_0
from layerkit_runner.distributed.stop_signals import StopSignals
from layerkit_runner.distributed.watchdog import (
    forced_exit_on,
    phase,
    progress,
    run_before_forced_exit,
    training_is_complete,
)
from layerkit_runner.errors import StorageError, UsageError, as_usage_error
from layerkit_runner.files.atomic_write import absolute
from layerkit_runner.observers import DECODE_PREFIX, Throughput
from layerkit_runner.observers.step_profiler import StepProfiler, profiler_server
from layerkit_runner.optim.early_stopping import EarlyStop
from layerkit_runner.run import end_report
from layerkit_runner.run.executor import (
    EARLY_STOPPING,
    Executor,
    executor_class,
    inputs_by_key,
    restore_positions,
)
from layerkit_runner.run.job import Job, no_checkpoint, start_job, versions
from layerkit_runner.run.job_folder import (
    forget_checkpoint,
    last_step_path,
    only_trainer,
    start_over,
    write_config,
)
from layerkit_runner.run.programs.build_programs import (
    check_metrics,
    decode_programs,
    eval_programs,
    eval_train_programs,
    inputs_of,
    train_inputs,
    train_programs,
)
from layerkit_runner.run.programs.eval_program import BaseProgram
from layerkit_runner.run.programs.skipped_steps import SKIPPED_STEPS
from layerkit_runner.run.programs.step_compiler import StepCompiler
from layerkit_runner.run.programs.train_program import (
    CompiledStep,
    StepReports,
)
from layerkit_runner.run.start_report import (
    StartFacts,
    compiled_lines,
    layer_notes,
    report_start,
    stage_lines,
)
from layerkit_runner.run_options import RunOptions
from layerkit_runner.step.train_state import RECORD, FirstState, TrainState

_ERROR_CHARACTERS = 2000


def run_train(
    resolved: ResolvedExperiment,
    options: RunOptions,
    *,
    signals: StopSignals | None = None,
    quiet: bool = False,
) -> int:
    """Train to the last step or until a signal; return the exit code.

    Args:
      resolved: Experiment.
      options: Flags of the run.
      signals: Signal handler, which the run enters; None for that of a process of its own.
      quiet: True to print neither progress nor messages.
    """
    job = start_job("train", resolved, options, quiet=quiet)
    run = TrainingRun(job, StopSignals() if signals is None else signals)
    with run.resources:
        run.open()
        run.compile()
        run.restore()
        run.record()
        run.loop()
        run.finish()
    return run.signals.exit_code


class TrainingRun:
    """A training run. Its methods are called once, in the order in which they stand here.

    `record` writes the first file of a new run, so a mistake that an earlier method finds leaves
    the job folder as it was.

    Attributes:
      resources: Context of the run, in which its methods are called.
      inputs: Training data sets, set by `open` as the attributes up to `abstract_state`.
      evals: Eval programs.
      decodes: Decode programs.
      early_stop: Rule for early stopping; None for none.
      checkpoints: Checkpoints of the job.
      abstract_state: Shapes, dtypes and shardings of the state.
      notes: Lines that layers logged while they were traced, set by `compile` as the next.
      facts: Facts for the start report.
      first: First state, set by `restore`.
      steps: Compiled step of each training data set, set by `restore`.
      executor: Executor, set by `record`.
      last: (State, number of completed steps) at the end, set by `loop`.
    """

    inputs: TrainInputs
    evals: list[BaseProgram]
    decodes: list[BaseProgram]
    early_stop: EarlyStop | None
    checkpoints: CheckpointManager
    abstract_state: TrainState
    notes: list[str]
    facts: StartFacts
    first: FirstState
    steps: list[CompiledStep]
    executor: Executor
    last: tuple[TrainState, int]

    def __init__(self, job: Job, signals: StopSignals) -> None:
        """Store the job and the signal handler, which `open` enters."""
        self.job = job
        self.signals = signals
        self.resources = contextlib.ExitStack()
        self._make_executor: Callable[..., Executor] = executor_class(job.resolved)
        self._likely_step = 0
        self._is_complete = False
        self._curve: end_report.LossCurve | None = None

    def open(self) -> None:
        """Lock the folder, open the data sets, and check what can be known before compilation."""
        job, enter = self.job, self.resources.enter_context
        enter(self.signals)
        if jax.process_index() == 0:  # the only process that writes
            enter(only_trainer(job.directory))
        self.resources.push(self._close_observers)
        enter(run_before_forced_exit(job.observers.close))
        self._starting = enter(contextlib.ExitStack())
        again = "no step was completed; run the same command to start again"
        self._starting.enter_context(self.signals.leaving_at_once(again))
        self._profiler = enter(self._step_profiler())
        enter(profiler_server(job.options.jax_profiler_port))
        self.inputs = train_inputs(job)
        self.resources.callback(self.inputs.close)
        self._build_programs()
        self.abstract_state = job.abstract_state()
        check_metrics(job.task, self.evals, self.abstract_state)
        if self.signals.ends_process:
            enter(forced_exit_on(SaveTimeoutError, exit_code=StorageError.exit_code))
        reads_only = not job.options.enable_checkpoint_saving
        if reads_only and job.task.train.learner.rolls_back:
            expected = "True, because the learner rolls back (on_nonfinite, on_spike)"
            raise UsageError(field="--enable_checkpoint_saving", value=False, expected=expected)
        self.checkpoints = enter(job.checkpoints(read_only=reads_only))
        self._plan = self._plan_if_new()
        self._read_first_batches()

    def compile(self) -> None:
        """Trace the training steps and start to compile them; collect the facts meanwhile.

        Of stages, only the one of the next step is compiled before training starts.
        """
        job = self.job
        progress("tracing the training step", compiles=True, waits_for_others=True)
        self._compiler = StepCompiler(job, self.inputs, self.abstract_state)
        self.resources.callback(self._compiler.close)
        with layer_notes() as self.notes, job.goodput.phase("compile"):
            self._compiler.trace_next(self._likely_step)
        progress("compiling and restoring", compiles=True, waits_for_others=True)
        trained = {data.input_name: data.dataset for data in self.inputs.inputs}
        self.facts = StartFacts.of(job, self.inputs, {**trained, **inputs_of(self.evals)})

    def restore(self) -> None:
        """Make or restore the first state, trace the other programs, and wait for the compiler."""
        self.first = self._first_state() if self._plan is None else self._plan()
        self._check_end(self.first.step)
        with self.job.goodput.phase("compile"):
            # Programs that do not run before the job ends are not traced.
            train = self.job.task.train
            all_run = train.eval_at_end or train.eval_interval_steps
            evals = [program for program in self.evals if all_run or program.interval_steps]
            self._compiler.trace_next(self.first.step)
            programs = [functools.partial(self._trace, one) for one in [*evals, *self.decodes]]
            self.steps = self._compiler.steps(programs)
        self._restore_positions()

    def record(self) -> None:
        """Write the configuration, and report the run and where its first weights come from."""
        job, first = self.job, self.first
        self.executor = self._build_executor()
        if jax.process_index() == 0:
            is_new, folder = self.checkpoints.latest_step() is None, job.directory
            report = job.observers.message
            write_config(folder, job.resolved, job.options, resumes=not is_new, report=report)
            if is_new and job.options.enable_checkpoint_saving:
                forget_checkpoint(folder)
            if first.provenance is not None:
                first.provenance.write(folder)
            elif first.restored_from is None:
                (folder / RECORD).unlink(missing_ok=True)
        stages = stage_lines(self.inputs, self.facts)
        memory = compiled_lines([step.run for step in self._compiler.first])
        report_start(job, self.inputs, self.facts, first, [*self.notes, *stages, *memory])

    def loop(self) -> None:
        """Train to the last step, a signal or early stopping; evaluate and save on the way."""
        self._starting.close()
        if jax.process_count() > 1:
            store = distributed_state().client
            self.signals.agree_by(store, jax.process_index(), jax.process_count())
        self.last = self.executor.run(self.first.state, self.first.step)

    def finish(self) -> None:
        """Wait for the last save; report the final model, or how to resume."""
        job, (state, step) = self.job, self.last
        job.goodput.outermost("other")
        saves = self.executor.checkpoints is not None
        if saves:
            self.checkpoints.wait_until_finished()
        self._is_complete = self.executor.is_over(step) and self.signals.exit_code == 0
        if self._is_complete:
            repeats = "run the same command to repeat the rest of the report"
            leaving = f"training ended at step {step}; {repeats}"
            with training_is_complete(), self.signals.leaving_at_once(leaving):
                end_report.finish(job, self.executor, state, step, self._curve)
        elif saves:
            job.observers.message(job.goodput.summary())
            job.observers.message(f"saved at step {step}; run the same command to resume")

    # Steps of `open`.

    def _close_observers(self, _: object, error: BaseException | None, __: object) -> None:
        """Close the observers; a first signal meanwhile ends the process at once."""
        with contextlib.ExitStack() as stack:
            reason = "finished" if self._is_complete else "stopped by a signal"
            if error is None and reason == "finished":
                stack.enter_context(training_is_complete())
            # The observers have a time limit of their own.
            stack.enter_context(phase("closing the observers", compiles=True))
            if self.signals.received is None:
                what = "the last reports of the observers may be missing"
                stack.enter_context(self.signals.leaving_at_once(what))
            if error is not None:
                reason = f"{type(error).__name__}: {error_text(error)[:_ERROR_CHARACTERS]}"
            self.job.observers.end(reason)
            self.job.observers.close()

    def _step_profiler(self) -> StepProfiler:
        train, report = self.job.task.train, self.job.observers.message
        hosts = train.profiler_max_num_hosts
        return StepProfiler(
            self.job.directory,
            capture_step=train.profiler_capture_step,
            num_steps=train.profiler_num_steps,
            captures_by_step=hosts is None or jax.process_index() < hosts,
            report=report if jax.process_index() == 0 else functools.partial(print, flush=True),
        )

    def _build_programs(self) -> None:
        """Build the programs that run beside training, and the rule for early stopping."""
        job, train = self.job, self.job.task.train
        build = eval_programs if job.options.eval_on_test else eval_train_programs
        self.evals = build(job, self.inputs)
        if job.options.eval_on_test and job.resolved.lm_eval_tasks:
            # Imports lm-evaluation-harness.
            from layerkit_runner.run.programs.lm_eval_program import lm_eval_programs

            self.evals += lm_eval_programs(job)
        self.decodes = decode_programs(job)
        self._decode_interval = train.decode_interval_steps
        if self._decode_interval is None and job.options.decode_during_train:
            self._decode_interval = train.save_interval_steps
        self.early_stop = None
        if job.task.early_stopping is not None:
            evals = [p.name for p in self.evals if p.interval_steps or train.eval_interval_steps]
            decodes = [p for p in self.decodes if p.interval_steps or self._decode_interval]
            names = [*evals, *(DECODE_PREFIX + program.name for program in decodes)]
            job.task.early_stopping.start(names)
            self.early_stop = EarlyStop(job.task.early_stopping)

    def _plan_if_new(self) -> Callable[[], FirstState] | None:
        """Return the plan of a new run's first state; None if the run may resume or restore."""
        options = self.job.options
        others = options.restore_checkpoint_dir and absolute(options.restore_checkpoint_dir)
        run_folders = (None, self.job.directory, self.checkpoints.directory)
        if options.restore_checkpoint_step is not None and others in run_folders:
            raise UsageError(
                "a run resumes from its own newest checkpoint",
                field="--restore_checkpoint_step",
                value=options.restore_checkpoint_step,
                hint="To start from an older step, give this folder as --restore_checkpoint_dir and"
                " a new --job_log_dir.",
            )
        if (newest := run_on_process_0(self.checkpoints.latest_step)) is not None:
            self._likely_step = newest
            self._check_end(newest)
            return None
        self._start_over()
        if options.restore_checkpoint_dir is None:
            return self._plan_first_state()
        with self.job.checkpoints(read_only=True, directory=others) as source:
            newest = options.only_restore_step
            if newest is None and (newest := run_on_process_0(source.latest_step)) is None:
                raise no_checkpoint(source)
        self._likely_step = newest
        return None

    def _check_end(self, step: int) -> None:
        """Raise `UsageError` if the state of `step` is beyond the last step of this run."""
        field, num_steps = "task.train.num_train_steps", self.job.task.train.num_train_steps
        if step > num_steps:
            problem = f"the run has already reached step {step}"
            path = last_step_path(self.job.resolved)
            longer = f"set a larger number, such as --fdl.{path}={2 * step}"
            hint = f"To continue training, {'add a stage to STAGES' if path is None else longer}."
            raise UsageError(problem, field=field, value=num_steps, hint=hint)

    def _start_over(self) -> None:
        options, report = self.job.options, self.job.observers.message
        if options.enable_checkpoint_saving:
            is_allowed = options.allow_restart_from_scratch
            folder, checkpoints = self.job.directory, self.checkpoints.directory
            start_over(folder, checkpoints, is_allowed=is_allowed, report=report)

    def _plan_first_state(self) -> Callable[[], FirstState]:
        """Check the sources of a new run's weights; return a function that makes the state."""
        options, task, report = self.job.options, self.job.task, self.job.observers.message
        if options.init_from is None and task.initial_weights is None:
            return lambda: FirstState(self.job.partitioner.init_fn(task)())
        # Imports the readers of all formats.
        from layerkit_runner.init_from import plan_first_state
        from layerkit_runner.init_from.settings import init_from_flags
        from layerkit_runner.init_from.sources import PeftFolder, recognize

        weights = None
        if options.init_from is not None:
            self.job.resolved.experiment.check_init_from(options.init_from)
            beside = task.initial_weights
            if beside is not None and not isinstance(recognize(options.init_from), PeftFolder):
                beside = beside.only(task.model.frozen_weights)
                kept = "" if beside is None else ", except for frozen weights"
                report(f"--init_from replaces task.initial_weights{kept}")
            weights = init_from_flags(options.init_from, options.init_draw, beside=beside)
        return plan_first_state(self.job.partitioner, task, weights=weights, report=report)

    def _read_first_batches(self) -> None:
        """Read the first training batches, and compare the data sets among processes."""
        for data in self.inputs.inputs:
            peek_batch(data.dataset)
        if jax.process_count() > 1:
            # Prefetched data sets have the positions of the delivered batches; their sources, which
            # have read further, are not compared.
            trained = {data.key: data.dataset for data in self.inputs.inputs}
            check_same_data({**trained, **inputs_of(self.evals)}, gather_values)
            check_same_data(inputs_of(self.decodes), gather_values)

    # Steps of `compile` and `restore`.

    def _trace(self, program: BaseProgram) -> None:
        with as_usage_error(ValueError, owner=program.name):
            program.trace(self.abstract_state)

    def _first_state(self) -> FirstState:
        """Restore the job's newest checkpoint, or that of another job; or make a new state."""
        job, options, report = self.job, self.job.options, self.job.observers.message
        newest = job.restore_newest(self.checkpoints)
        if newest is not None:
            if options.restore_checkpoint_dir is not None:
                report(
                    f"--restore_checkpoint_dir is ignored: {job.given_directory} has checkpoints"
                )
            return _restored(newest, self.checkpoints, resumes=True)
        self._start_over()
        if options.restore_checkpoint_dir is None:
            return self._plan_first_state()()
        with job.checkpoints(read_only=True, directory=options.restore_checkpoint_dir) as others:
            step = options.only_restore_step
            other = job.restore_newest(others) if step is None else job.restore(others, step)
            if other is None:
                raise no_checkpoint(others)
            return _restored(other, others)

    def _restore_positions(self) -> None:
        """Restore the input positions and the state of early stopping, before the first step."""
        first, report = self.first, self.job.observers.message
        if first.restored_from is not None:
            try:
                with as_usage_error():
                    inputs = inputs_by_key(self.evals, self.decodes)
                    states = first.input_states
                    for key in restore_positions(self.inputs, inputs, states, step=first.step):
                        report(
                            f"the checkpoint has no input position for {key}: reading from the"
                            " beginning"
                        )
            except UsageError as error:
                folder = os.path.dirname(first.restored_from)
                new = f"A new run: --init_from={folder} with another --job_log_dir."
                error.hint = f"{error.hint or ''} {new}".strip()
                raise
            # Reported once every input has accepted its position.
            report(f"resuming from step {first.step} of {first.restored_from}")
            if (source := self.job.options.init_from) is not None:
                report(f"--init_from={source} is ignored: the run has a checkpoint")
        elif first.step:  # of initial weights
            self.inputs.set_states({}, step=first.step)
            report(
                f"continuing from step {first.step} of the initial weights; inputs begin at their"
                " first batch, with the mixture of their stage"
            )
        if self.early_stop is None or EARLY_STOPPING not in first.metadata:
            return
        with self._naming_metadata(EARLY_STOPPING):
            self.early_stop.restore(first.metadata[EARLY_STOPPING], report=report)
        if self.early_stop.stopped_at is not None:
            message = self.early_stop.message()
            report(f"{message}. To continue, set task.early_stopping=None or change it.")

    def _naming_metadata(self, key: str) -> contextlib.AbstractContextManager[None]:
        return naming_damage(f"{self.first.restored_from}, step {self.first.step}, {key}")

    # A step of `record`.

    def _build_executor(self) -> Executor:
        """Build the training programs on the compiled steps, and the executor that runs them."""
        job, train = self.job, self.job.task.train
        if jax.process_index() == 0:
            self._curve = end_report.LossCurve(job, self.inputs.inputs[0].dataset.token_unit)
            self.resources.callback(self._curve.close)
        throughput, works = Throughput(self.facts.info, job.goodput), self.facts.works
        per_step = [work.tokens for work in works]
        tokens = functools.partial(self.inputs.total, per_step) if any(per_step) else None
        reports = [StepReports(job.observers, throughput, work, tokens) for work in works]
        programs = train_programs(job, self.inputs, self.steps, reports, self._compiler.news)
        if SKIPPED_STEPS in self.first.metadata:
            with self._naming_metadata(SKIPPED_STEPS):
                programs.skipped.restore(self.first.metadata[SKIPPED_STEPS])
        return self._make_executor(
            train=train,
            train_programs=programs,
            eval_programs=self.evals,
            decode_programs=self.decodes,
            checkpoints=self.checkpoints if job.options.enable_checkpoint_saving else None,
            restore=functools.partial(job.restore_newest, self.checkpoints),
            metadata={"experiment": job.resolved.name, "versions": versions()},
            observers=job.observers,
            throughput=throughput,
            signals=self.signals,
            stored_state=functools.partial(job.partitioner.stored_state, job.task),
            exit_after_ondemand_checkpoint=job.options.exit_after_ondemand_checkpoint,
            goodput=job.goodput,
            profiler=self._profiler,
            early_stop=self.early_stop,
            decode_interval_steps=self._decode_interval,
            after_first_step=self._after_first_step,
            after_eval=None if self._curve is None else self._curve.redraw,
        )

    def _after_first_step(self) -> None:
        if self.job.options.enable_checkpoint_saving:
            # The first save needs Orbax, which takes a second to import.
            threading.Thread(target=importlib.import_module, args=("orbax.checkpoint",)).start()
        self._compiler.trace_rest()


def _restored(
    checkpoint: RestoredCheckpoint, checkpoints: CheckpointManager, *, resumes: bool = False
) -> FirstState:
    return FirstState(
        checkpoint.state,
        checkpoint.step,
        restored_from=str(checkpoints.directory),
        input_states=checkpoint.input_states,
        metadata=checkpoint.metadata if resumes else {},
    )
