"""`--mode=train`: trains or resumes a run, and reports the result.

While the training step compiles on a thread, evaluation and decoding are traced, FLOPs are counted,
and the first state is made or restored.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax

from layerkit_inputs.base.base_input import BaseInput
from layerkit_runner.checkpointing import CheckpointManager, RestoredCheckpoint, SaveTimeoutError
from layerkit_runner.checkpointing.errors import naming_damage
from layerkit_runner.config.requests import ResolvedExperiment
from layerkit_runner.data.host_inputs import peek_batch
from layerkit_runner.data.train_inputs import TrainInputs, check_same_data
from layerkit_runner.distributed.cluster import (
    distributed_state,
    from_process_0,
    gather_values,
)
from layerkit_runner.distributed.stop_signals import StopSignals
from layerkit_runner.distributed.watchdog import (
    before_forced_exit,
    forced_exit_on,
    phase,
    progress,
    training_is_complete,
)
from layerkit_runner.errors import StorageError, UsageError, as_usage_error
from layerkit_runner.observers import DECODE_PREFIX, RunInfo, StepWork, Throughput
from layerkit_runner.observers.step_profiler import StepProfiler, profiler_server
from layerkit_runner.optim.early_stopping import SKIPPED_STEPS, EarlyStop, SkippedSteps
from layerkit_runner.run.executor import EARLY_STOPPING, Executor, executor_class, inputs_by_key
from layerkit_runner.run.job import Job, no_checkpoint, start_job, versions
from layerkit_runner.run.job_folder import (
    check_no_sweep,
    check_restart,
    forget_checkpoint,
    only_trainer,
    write_config,
)
from layerkit_runner.run.programs.build_programs import (
    check_best_metric,
    check_metric_names,
    decode_programs,
    eval_programs,
    eval_train_programs,
    inputs_of,
    train_inputs,
    train_programs,
)
from layerkit_runner.run.programs.eval_program import BaseProgram
from layerkit_runner.run.programs.train_program import CompiledStep, StepReports, trace_step
from layerkit_runner.run.report import end_report
from layerkit_runner.run.report.start_report import (
    LayerNotes,
    compiled_lines,
    data_lines,
    report_start,
    train_run_info,
)
from layerkit_runner.run_options import RunOptions
from layerkit_runner.step.step_cost import model_flops_per_step
from layerkit_runner.step.train_state import RECORD, FirstState, TrainState


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
    check_no_sweep(job.given_directory)
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(signals or StopSignals())
        if jax.process_index() == 0:  # the only process that writes
            stack.enter_context(only_trainer(job.directory))
        stack.push(functools.partial(_close_observers, job, signals))
        stack.enter_context(before_forced_exit(job.observers.close))
        starting = stack.enter_context(contextlib.ExitStack())
        starting.enter_context(
            signals.leaving_at_once("no step was completed; run the same command to start again")
        )
        profiler = stack.enter_context(_step_profiler(job))
        stack.enter_context(profiler_server(options.jax_profiler_port))
        programs = _build_programs(job, stack)
        abstract_state = job.abstract_state()
        check_best_metric(job.task.train, programs.evals)
        check_metric_names(job.task, programs.evals, abstract_state)
        if signals.ends_process:
            stack.enter_context(forced_exit_on(SaveTimeoutError, exit_code=StorageError.exit_code))
        reads_only = not options.enable_checkpoint_saving
        checkpoints = stack.enter_context(job.checkpoints(read_only=reads_only))
        plan = _plan_if_new(job, checkpoints)
        _check_data(programs)
        prepared = _prepare(job, programs, abstract_state, checkpoints, plan)
        first = prepared.first
        info = train_run_info(job, programs.data, prepared.works, start_step=first.step)
        executor = _build_executor(job, programs, prepared, info, checkpoints, signals, profiler)
        _record_start(job, first, is_new=checkpoints.latest_step() is None)
        memory = compiled_lines([c.run for c in prepared.compiled if not c.is_jitted])
        compiled = [*prepared.notes, *memory]
        report_start(job, programs.data, prepared.about_data, first, info, compiled)
        if options.enable_checkpoint_saving:
            # The first save needs Orbax, which takes a second to import.
            threading.Thread(target=importlib.import_module, args=("orbax.checkpoint",)).start()
        starting.close()
        if jax.process_count() > 1:
            store = distributed_state().client
            signals.agree_by(store, jax.process_index(), jax.process_count())
        state, step = executor.run(first.state, first.step)
        job.goodput.outermost("other")
        _report_end(job, executor, state, step)
        return signals.exit_code


def _close_observers(
    job: Job, signals: StopSignals, error: type[BaseException] | None, *_: object
) -> None:
    """Close the observers; a first signal meanwhile ends the process at once."""
    with contextlib.ExitStack() as stack:
        if error is None and signals.exit_code == 0:
            stack.enter_context(training_is_complete())
        # The observers have a time limit of their own.
        stack.enter_context(phase("closing the observers", compiles=True))
        if signals.received is None:
            what = "the last reports of the observers may be missing"
            stack.enter_context(signals.leaving_at_once(what))
        job.observers.close()


def _step_profiler(job: Job) -> StepProfiler:
    """Return the profiler of this process's steps; raise if it would start after the last step."""
    train = job.task.train
    first, hosts = train.profiler_capture_step, train.profiler_max_num_hosts
    if first is not None and first > train.num_train_steps:
        raise UsageError(
            field="task.train.profiler_capture_step",
            value=first,
            expected=f"at most task.train.num_train_steps={train.num_train_steps}",
        )
    is_first = jax.process_index() == 0
    return StepProfiler(
        job.directory,
        capture_step=first,
        num_steps=train.profiler_num_steps,
        captures_by_step=hosts is None or jax.process_index() < hosts,
        report=job.observers.message if is_first else functools.partial(print, flush=True),
    )


@dataclasses.dataclass(frozen=True)
class _Programs:
    """The programs of a run before compilation."""

    data: TrainInputs
    evals: list[BaseProgram]
    decodes: list[BaseProgram]
    decode_interval_steps: int | None
    early_stop: EarlyStop | None
    make_executor: Callable[..., Executor]


def _build_programs(job: Job, stack: contextlib.ExitStack) -> _Programs:
    """Open the data sets and build the programs, before a file is written."""
    make_executor = executor_class(job.resolved)
    data = train_inputs(job)
    stack.callback(data.close)
    train = job.task.train
    if job.options.eval_on_test:
        evals = eval_programs(job, data)
    elif train.save_best_metric is None:
        evals = eval_train_programs(job, data)
    else:
        raise UsageError(
            "--noeval_on_test turns off the evaluations that choose the best checkpoints",
            field="task.train.save_best_metric",
            value=train.save_best_metric,
            expected="None with --noeval_on_test",
        )
    decodes = decode_programs(job)
    interval = train.decode_interval_steps
    if interval is None and job.options.decode_during_train:
        interval = train.save_interval_steps
    early_stop = None
    if job.task.early_stopping is not None:
        evaluated = [p.name for p in evals if p.interval_steps or train.eval_interval_steps]
        decoded = [DECODE_PREFIX + p.name for p in decodes if p.interval_steps or interval]
        job.task.early_stopping.check([*evaluated, *decoded])
        early_stop = EarlyStop(job.task.early_stopping)
    return _Programs(data, evals, decodes, interval, early_stop, make_executor)


def _check_data(programs: _Programs) -> None:
    """Read the first training batches, and compare the data sets among processes."""
    for each in programs.data.inputs:
        peek_batch(each.dataset)
    if jax.process_count() > 1:
        # Prefetched data sets have the positions of the delivered batches; their sources, which
        # have read further, are not compared.
        trained: dict[str, BaseInput] = {**programs.data.by_key()}
        check_same_data({**trained, **inputs_of(programs.evals)}, gather_values)
        check_same_data(inputs_of(programs.decodes), gather_values)


def _plan_if_new(job: Job, checkpoints: CheckpointManager) -> Callable[[], FirstState] | None:
    """Return the plan of a new run's first state; None if the run may resume or restore."""
    if from_process_0(checkpoints.latest_step) is not None:
        return None
    _check_restart(job, checkpoints)
    return None if job.options.restore_checkpoint_dir is not None else _plan_first_state(job)


def _check_restart(job: Job, checkpoints: CheckpointManager) -> None:
    options, report = job.options, job.observers.message
    if options.enable_checkpoint_saving:
        is_allowed = options.allow_restart_from_scratch
        check_restart(job.directory, checkpoints.directory, is_allowed=is_allowed, report=report)


def _plan_first_state(job: Job) -> Callable[[], FirstState]:
    """Check the sources of a new run's weights; return a function that makes the first state."""
    options, task = job.options, job.task
    if options.init_from is None and task.initial_weights is None:
        return lambda: FirstState(job.partitioner.init_fn(task)())
    # Imports the readers of all formats.
    from layerkit_runner.init_from import plan_first_state
    from layerkit_runner.init_from.settings import init_from_flags

    weights = None
    if options.init_from is not None:
        if task.initial_weights is not None:
            job.observers.message("--init_from replaces task.initial_weights")
        weights = init_from_flags(options.init_from, options.init_draw)
    return plan_first_state(job.partitioner, task, weights=weights, report=job.observers.message)


def _first_state(
    job: Job, checkpoints: CheckpointManager, plan: Callable[[], FirstState] | None
) -> FirstState:
    """Restore a checkpoint: the job's own, or that of --restore_checkpoint_dir; or run the plan."""
    options = job.options
    if options.restore_checkpoint_step is not None and options.restore_checkpoint_dir is None:
        raise UsageError(
            "a run resumes from its own newest checkpoint",
            field="--restore_checkpoint_step",
            value=options.restore_checkpoint_step,
            hint="To start from an older step, give this folder as --restore_checkpoint_dir and a"
            " new --job_log_dir.",
        )
    if plan is not None:
        return plan()
    own = job.restore_newest(checkpoints)
    if own is not None:
        if options.restore_checkpoint_dir is not None:
            job.observers.message(
                f"--restore_checkpoint_dir is ignored: {job.given_directory} has checkpoints"
            )
        return _restored(own, checkpoints, metadata=own.metadata)
    _check_restart(job, checkpoints)
    if options.restore_checkpoint_dir is None:
        return _plan_first_state(job)()
    with job.checkpoints(read_only=True, directory=options.restore_checkpoint_dir) as others:
        step = options.only_restore_step
        other = job.restore_newest(others) if step is None else job.restore(others, step)
        if other is None:
            raise no_checkpoint(others)
        return _restored(other, others)


def _restored(
    found: RestoredCheckpoint,
    checkpoints: CheckpointManager,
    *,
    metadata: Mapping[str, Any] | None = None,
) -> FirstState:
    return FirstState(
        found.state,
        found.step,
        restored_from=str(checkpoints.directory),
        input_states=found.input_states,
        metadata=metadata or {},
    )


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """The first state of a run, and the compiled step and work of each training data set."""

    first: FirstState
    compiled: list[CompiledStep]
    works: list[StepWork]
    # Eval and decode programs that are traced after the first step.
    untraced: list[BaseProgram]
    # Lines that layers logged while they were traced.
    notes: list[str]
    # Lines about the data of all training and evaluation programs.
    about_data: list[str]


def _prepare(
    job: Job,
    programs: _Programs,
    abstract_state: TrainState,
    checkpoints: CheckpointManager,
    plan: Callable[[], FirstState] | None,
) -> _Prepared:
    """Compile the training steps; meanwhile trace the other programs and get the first state."""
    progress("tracing the training step", compiles=True, waits_for_others=True)
    with LayerNotes() as notes, job.goodput.phase("compile"):
        traced = []
        for data in programs.data.inputs:
            on = "" if data.name is None else f" on {data.name}"
            with as_usage_error(ValueError, owner=f"{job.resolved.name}{on}"):
                batch = data.abstract_batch
                traced.append(trace_step(job.task, job.partitioner, abstract_state, batch))
    progress("compiling and restoring", compiles=True, waits_for_others=True)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        compiling = [pool.submit(compile_step) for compile_step in traced]
        works = [_step_work(job, data.dataset) for data in programs.data.inputs]
        evaluated = inputs_of(programs.evals)
        about_data = [*data_lines({**programs.data.by_name(), **evaluated})]
        first = _first_state(job, checkpoints, plan)
        with job.goodput.phase("compile"):
            # Programs that do not run before the job ends are not traced.
            train = job.task.train
            every = train.eval_at_end or train.eval_interval_steps
            evals = [program for program in programs.evals if every or program.interval_steps]
            untraced = [*evals, *programs.decodes]
            # With steps from the compilation cache, trace after the first step instead.
            while untraced and not all(f.done() and f.result().is_from_cache for f in compiling):
                _trace(job, untraced.pop(0), abstract_state)
            compiled = [each.result() for each in compiling]
        _restore_positions(job, programs, first)
    return _Prepared(first, compiled, works, untraced, notes.lines, about_data)


def _trace(job: Job, program: BaseProgram, abstract_state: TrainState) -> None:
    with as_usage_error(ValueError, owner=f"{job.resolved.name} on {program.name}"):
        program.trace(abstract_state)


def _step_work(job: Job, dataset: Any) -> StepWork:
    batch, rows = dataset.peek(), dataset.global_batch_size
    columns = batch.ids.shape[1] if "ids" in batch and batch.ids.ndim > 1 else 0
    flops = model_flops_per_step(job.resolved.task, batch, rows)
    return StepWork(examples=rows, tokens=rows * columns, flops=flops)


def _restore_positions(job: Job, programs: _Programs, first: FirstState) -> None:
    """Restore the input positions and the state of early stopping, before the first step."""
    report = job.observers.message
    if first.restored_from is not None:
        try:
            with as_usage_error():
                for key in programs.data.set_states(first.input_states):
                    report(
                        f"the checkpoint has no input position for {key}: reading from the"
                        " beginning"
                    )
                inputs = inputs_by_key(programs.evals, programs.decodes)
                for key in sorted(inputs.keys() & first.input_states.keys()):
                    inputs[key].set_state(first.input_states[key])
        except UsageError as error:
            folder = job.given_directory
            flags = f"A new run: --init_from={folder} with another --job_log_dir."
            error.hint = f"{error.hint} {flags}" if error.hint else flags
            raise
        # Reported once every input has accepted its position: data of another shape end the run.
        report(f"resuming from step {first.step} of {first.restored_from}")
        if job.options.init_from is not None:
            report(f"--init_from={job.options.init_from} is ignored: the run has a checkpoint")
    early_stop = programs.early_stop
    if early_stop is None or EARLY_STOPPING not in first.metadata:
        return
    with naming_damage(f"{first.restored_from}, step {first.step}, {EARLY_STOPPING}"):
        early_stop.restore(first.metadata[EARLY_STOPPING], report=report)
    if early_stop.stopped_at is not None:
        report(f"{early_stop.message()}. To continue, set task.early_stopping=None or change it.")


def _build_executor(
    job: Job,
    programs: _Programs,
    prepared: _Prepared,
    info: RunInfo,
    checkpoints: CheckpointManager,
    signals: StopSignals,
    profiler: StepProfiler,
) -> Executor:
    """Build the training programs on the compiled steps, and the executor that runs them."""
    train = job.task.train
    throughput = Throughput(info)
    reports = [StepReports(job.observers, throughput, w, job.goodput) for w in prepared.works]
    skipped = SkippedSteps(
        train.max_consecutive_skipped_steps,
        train.num_train_steps,
        train.max_skipped_steps_fraction,
        are_applied=not train.learner.skips_steps,
    )
    if SKIPPED_STEPS in prepared.first.metadata:
        first = prepared.first
        with naming_damage(f"{first.restored_from}, step {first.step}, {SKIPPED_STEPS}"):
            skipped.restore(first.metadata[SKIPPED_STEPS])

    def trace_rest() -> None:
        for program in prepared.untraced:
            _trace(job, program, job.abstract_state())

    return programs.make_executor(
        train=train,
        train_programs=train_programs(job, programs.data, prepared.compiled, reports, skipped),
        eval_programs=programs.evals,
        decode_programs=programs.decodes,
        checkpoints=checkpoints if job.options.enable_checkpoint_saving else None,
        metadata={"experiment": job.resolved.name, "versions": versions()},
        observers=job.observers,
        throughput=throughput,
        signals=signals,
        exit_after_ondemand_checkpoint=job.options.exit_after_ondemand_checkpoint,
        goodput=job.goodput,
        profiler=profiler,
        early_stop=programs.early_stop,
        decode_interval_steps=programs.decode_interval_steps,
        after_first_step=trace_rest,
    )


def _record_start(job: Job, first: FirstState, *, is_new: bool) -> None:
    """Write the configuration, and where first weights come from, into the job folder."""
    if jax.process_index() != 0:
        return
    report = job.observers.message
    write_config(job.directory, job.resolved, job.options, resumes=not is_new, report=report)
    if is_new and job.options.enable_checkpoint_saving:
        forget_checkpoint(job.directory)
    if first.provenance is not None:
        first.provenance.write(job.directory)
    elif first.restored_from is None:
        (job.directory / RECORD).unlink(missing_ok=True)


def _report_end(job: Job, executor: Executor, state: TrainState, step: int) -> None:
    """Wait for the last save; report the final model, or how to resume."""
    signals, checkpoints = executor.signals, executor.checkpoints
    if checkpoints is not None:
        checkpoints.wait_until_finished()
    if executor.is_over(step) and signals.exit_code == 0:
        repeats = "run the same command to repeat the rest of the report"
        with (
            training_is_complete(),
            signals.leaving_at_once(f"training ended at step {step}; {repeats}"),
        ):
            end_report.finish(job, executor, state, step)
    elif checkpoints is not None:
        job.observers.message(job.goodput.summary())
        job.observers.message(f"saved at step {step}; run the same command to resume")
