"""`--mode=train`: trains, or goes on training, and says at the end what came of it.

Start-up is arranged so that nothing waits that need not: the training step compiles on a thread
while the first state is made (or restored), the FLOPs are counted and the data are opened.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from layerkit_inputs.base_input import BaseInput
from layerkit_inputs.prefetch import Prefetch
from layerkit_runner.checkpointing import CheckpointManager, SaveTimeoutError
from layerkit_runner.config.flags import RunOptions
from layerkit_runner.config.resolve import ResolvedExperiment
from layerkit_runner.data.data_agreement import check_same_data
from layerkit_runner.data.infeed import peek_batch, told_in_one_line
from layerkit_runner.distributed.forced_exit import before_forced_exit, forced_exit_on
from layerkit_runner.distributed.process_exchange import coordinator_store, gather_values
from layerkit_runner.distributed.stop_signals import StopSignals
from layerkit_runner.errors import StorageError, UsageError, layer_error_text
from layerkit_runner.init_from.provenance import FirstState, write_record
from layerkit_runner.modes import end_report
from layerkit_runner.modes.metric_checks import check_best_metric, check_metric_names
from layerkit_runner.modes.start_report import LayerNotes, compiled_lines, run_info, start_lines
from layerkit_runner.observers import DECODE_PREFIX, RunInfo, StepWork, Throughput, peak_flops
from layerkit_runner.observers.step_profiler import StepProfiler, profiler_server
from layerkit_runner.optim.early_stopping import EarlyStop
from layerkit_runner.trainer import BaseProgram, TrainPrograms
from layerkit_runner.trainer.build_programs import (
    decode_programs,
    eval_programs,
    eval_train_programs,
    inputs_of,
    train_programs,
)
from layerkit_runner.trainer.executor import (
    EARLY_STOPPING,
    eval_input_key,
    executor_class,
)
from layerkit_runner.trainer.job import Job, start_job, versions
from layerkit_runner.trainer.job_folder import (
    check_no_sweep,
    last_step_path,
    only_trainer,
    write_config,
)
from layerkit_runner.trainer.restart_check import check_restart, forget_checkpoint
from layerkit_runner.trainer.skipped_steps import SKIPPED_STEPS
from layerkit_runner.training.step_flops import model_flops_per_step


def run_train(resolved: ResolvedExperiment, options: RunOptions) -> int:
    """Trains to the last step, or until a signal; returns the exit code."""
    job = start_job("train", resolved, options)
    check_no_sweep(job.given_directory)
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(StopSignals())
        if jax.process_index() == 0:  # the only one that writes
            stack.enter_context(only_trainer(job.directory))
        stack.callback(job.observers.close)
        stack.enter_context(before_forced_exit(job.observers.close))
        starting = stack.enter_context(contextlib.ExitStack())
        starting.enter_context(
            signals.leaving_at_once("no step was done, and the same command starts again")
        )
        profiler = stack.enter_context(_step_profiler(job))
        stack.enter_context(profiler_server(options.jax_profiler_port))
        # Built before anything is written, since they may refuse their fields.
        make_executor = executor_class(resolved)
        programs = train_programs(job)
        stack.callback(programs.close)
        job.abstract_state()  # refused fields are told in the name of the experiment
        _decode_during_train(job)
        evals, decodes = _evaluations(job, programs), decode_programs(job)
        early_stop = _early_stop(job, evals, decodes)
        check_best_metric(job.task.train, evals)
        check_metric_names(job.task, evals, job.abstract_state())
        eval_inputs, decode_inputs = inputs_of(evals), inputs_of(decodes)
        saves = options.enable_checkpoint_saving
        stack.enter_context(forced_exit_on(SaveTimeoutError, exit_code=StorageError.exit_code))
        checkpoints = stack.enter_context(job.checkpoints(read_only=not saves))

        if checkpoints.latest_step() is None:
            _check_restart(job, checkpoints)
        plan = None
        if checkpoints.latest_step() is None and options.restore_checkpoint_dir is None:
            plan = _plan_first_state(job)
        _check_readable(programs)
        if jax.process_count() > 1:
            # Prefetch tells what was delivered; its source runs ahead by another amount everywhere.
            trained = {programs.input_key(each): each.dataset for each in programs.programs}
            check_same_data({**trained, **eval_inputs}, gather_values)
            check_same_data(decode_inputs, gather_values)
        prepared = _prepare(job, programs, eval_inputs, checkpoints, plan, early_stop)
        _write_start(job, prepared.first, goes_on=checkpoints.latest_step() is not None)
        throughput = Throughput(_tell_start(job, programs, prepared))
        for program, compiled, work in zip(
            programs.programs, prepared.compiled, prepared.works, strict=True
        ):
            program.start(compiled, job.observers, throughput, job.goodput, work)
        if saves:
            # The first save needs Orbax, which takes a second to import.
            threading.Thread(target=importlib.import_module, args=("orbax.checkpoint",)).start()
        executor = make_executor(
            train=job.task.train,
            train_programs=programs,
            eval_programs=evals,
            decode_programs=decodes,
            checkpoints=checkpoints if saves else None,
            metadata={"experiment": resolved.name, "versions": versions()},
            observers=job.observers,
            throughput=throughput,
            signals=signals,
            exit_after_ondemand_checkpoint=options.exit_after_ondemand_checkpoint,
            goodput=job.goodput,
            profiler=profiler,
            early_stop=early_stop,
        )
        starting.close()
        _agree_on_signals(signals)
        state, step = executor.run(prepared.first.state, prepared.first.step)
        job.goodput.outermost("other")
        if executor.is_over(step) and signals.exit_code == 0:
            if saves:
                checkpoints.wait_until_finished()
            with signals.leaving_at_once(
                f"step {step} was the last; the same command makes the rest of the report"
            ):
                end_report.finish(job, executor, state, step)
        elif saves:
            checkpoints.wait_until_finished()
            job.observers.message(job.goodput.summary())
            job.observers.message(f"saved at step {step}; the same command goes on from there")
        return signals.exit_code


def _agree_on_signals(signals: StopSignals) -> None:
    if jax.process_count() > 1:
        signals.agree_by(coordinator_store(), jax.process_index(), jax.process_count())


def _check_restart(job: Job, checkpoints: CheckpointManager) -> None:
    """Raise an error if training would begin anew unasked; see `check_restart`."""
    options = job.options
    if options.enable_checkpoint_saving:
        check_restart(
            job.directory,
            checkpoints.directory,
            is_allowed=options.allow_restart_from_scratch,
            report=job.observers.message,
        )


def _evaluations(job: Job, programs: TrainPrograms) -> list[BaseProgram]:
    """What evaluates; held-out data not, where --noeval_on_test leaves them to another job."""
    wanted = job.task.train.save_best_metric
    if job.options.eval_on_test:
        return eval_programs(job, programs)
    if wanted is not None:
        raise UsageError(
            f"--noeval_on_test leaves out the evaluations by which task.train.save_best_metric="
            f"{wanted!r} tells the best checkpoints; those of --mode=eval beside this job do not"
            " reach it. Keep one of the two."
        )
    return eval_train_programs(job, programs)


def _decode_during_train(job: Job) -> None:
    """Has --decode_during_train decode as often as is saved, where no field says how often."""
    train = job.task.train
    if job.options.decode_during_train and train.decode_interval_steps is None:
        train.decode_interval_steps = train.save_interval_steps


def _check_readable(programs: TrainPrograms) -> None:
    """Reads the first batches, where data that are not there come to light."""
    for program in programs.programs:
        peek_batch(program.dataset)


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """What a run begins with; of each training program, in their order, a step and its work."""

    first: FirstState
    compiled: list[Any]
    # What layers said while they were traced.
    notes: list[str]
    works: list[StepWork]


def _prepare(
    job: Job,
    programs: TrainPrograms,
    eval_inputs: Mapping[str, BaseInput],
    checkpoints: CheckpointManager,
    plan: Callable[[], FirstState] | None,
    early_stop: EarlyStop | None,
) -> _Prepared:
    """Compiles the steps while the first state is read or made."""
    abstract = job.abstract_state()
    lowered = []
    with LayerNotes() as notes, job.goodput.phase("compile"):
        for program in programs.programs:
            try:
                lowered.append(program.lower(abstract))
            except ValueError as error:
                on = "" if program.name is None else f" on {program.name}"
                raise UsageError(f"{job.resolved.name}{on}: {layer_error_text(error)}") from error
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        compiling = [pool.submit(each.compile) for each in lowered]
        works = [_step_work(job, program.dataset) for program in programs.programs]
        with _source_of_state(job, checkpoints) as (source, step):
            if source is None or step is None:
                first = (plan or _plan_first_state(job))()
            else:
                restored = job.restore(source, step)
                first = FirstState(restored.state, step, is_restored=True)
                _set_input_states(job, programs, eval_inputs, restored.input_states)
                if source is checkpoints:
                    if early_stop is not None:
                        _restore_early_stop(job, early_stop, restored.metadata)
                    programs.skipped.restore(restored.metadata.get(SKIPPED_STEPS))
                job.observers.message(f"goes on from step {step} of {source.directory}")
                if job.options.init_from is not None:
                    job.observers.message(
                        f"--init_from={job.options.init_from} is not used: this run has begun"
                    )
        with job.goodput.phase("compile"):
            compiled = [each.result() for each in compiling]
        return _Prepared(first, compiled, notes.lines, works)


def _step_work(job: Job, dataset: Prefetch) -> StepWork:
    batch, rows = dataset.peek(), dataset.global_batch_size
    columns = batch.ids.shape[1] if "ids" in batch else 0
    flops = model_flops_per_step(job.resolved.task, batch, rows)
    return StepWork(examples=rows, tokens=rows * columns, flops=flops)


def _early_stop(
    job: Job, evals: Sequence[BaseProgram], decodes: Sequence[BaseProgram]
) -> EarlyStop | None:
    """The rule that may end the run, if there is one; see `StoppingRule.check`."""
    rule, train = job.task.early_stopping, job.task.train
    if rule is None:
        return None
    evaluated = [p.name for p in evals if p.interval_steps or train.eval_interval_steps]
    decoded = [p.name for p in decodes if p.interval_steps or train.decode_interval_steps]
    rule.check([*evaluated, *(DECODE_PREFIX + name for name in decoded)])
    return EarlyStop(rule)


def _restore_early_stop(job: Job, early_stop: EarlyStop, metadata: Mapping[str, Any]) -> None:
    if EARLY_STOPPING in metadata:
        early_stop.restore(metadata[EARLY_STOPPING], report=job.observers.message)
    if early_stop.stopped_at is not None:
        job.observers.message(
            f"{early_stop.message()}; it trains on with task.early_stopping=None or other settings"
        )


def _step_profiler(job: Job) -> StepProfiler:
    """What captures traces of this process's steps.

    Raises:
      UsageError: the capture that is asked for lies after the last step.
    """
    train = job.task.train
    first, hosts = train.profiler_capture_step, train.profiler_max_num_hosts
    if first is not None and first > train.num_train_steps:
        raise UsageError(
            f"task.train.profiler_capture_step={first} comes after the last step,"
            f" {train.num_train_steps}"
        )
    speaks = jax.process_index() == 0
    return StepProfiler(
        job.directory,
        capture_step=first,
        num_steps=train.profiler_num_steps,
        captures_by_step=hosts is None or jax.process_index() < hosts,
        report=job.observers.message if speaks else functools.partial(print, flush=True),
    )


def _plan_first_state(job: Job) -> Callable[[], FirstState]:
    """Compare what a new run is to start from; return a function that reads or draws it."""
    job.abstract_state()  # refused fields are told in the name of the experiment
    options, task = job.options, job.task
    if options.init_from is None and task.initial_weights is None:
        return lambda: FirstState(job.partitioner.init_fn(task)())
    # Only runs that start from stored weights need the readers of all formats.
    from layerkit_runner.init_from import plan_first_state
    from layerkit_runner.init_from.settings import init_from_flags

    weights = None
    if options.init_from is not None:
        if task.initial_weights is not None:
            job.observers.message("--init_from takes the place of task.initial_weights")
        weights = init_from_flags(options.init_from, options.init_draw)
    return plan_first_state(job.partitioner, task, weights=weights, report=job.observers.message)


def _set_input_states(
    job: Job,
    programs: TrainPrograms,
    eval_inputs: Mapping[str, BaseInput],
    states: Mapping[str, Any],
) -> None:
    with told_in_one_line():
        for program in programs.set_input_states(states):
            job.observers.message(
                "the checkpoint does not tell a position of"
                f" {programs.input_key(program)}, which is read from its start"
            )
        for name, dataset in eval_inputs.items():
            if eval_input_key(name) in states:
                dataset.set_state(states[eval_input_key(name)])


@contextlib.contextmanager
def _source_of_state(
    job: Job, checkpoints: CheckpointManager
) -> Iterator[tuple[CheckpointManager | None, int | None]]:
    """The checkpoint to start from: the job's own newest, else that of --restore_checkpoint_dir."""
    options = job.options
    if options.restore_checkpoint_step is not None and options.restore_checkpoint_dir is None:
        raise UsageError(
            "--restore_checkpoint_step needs --restore_checkpoint_dir: a run goes on from the"
            " newest of its own checkpoints. To go on from an older one, give that folder as"
            " --restore_checkpoint_dir and a new --job_log_dir."
        )
    own = checkpoints.newest_sound_step()
    if own is not None:
        if options.restore_checkpoint_dir is not None:
            job.observers.message(
                f"--restore_checkpoint_dir is not used: {job.given_directory} has checkpoints of"
                " its own"
            )
        yield checkpoints, own
        return
    _check_restart(job, checkpoints)
    if options.restore_checkpoint_dir is None:
        yield None, None
        return
    with job.checkpoints(read_only=True, directory=options.restore_checkpoint_dir) as other:
        yield other, choose_step(other, options.only_restore_step)


def choose_step(checkpoints: CheckpointManager, wanted: int | None) -> int:
    """The step to read: the one wanted, else the newest sound one.

    Raises:
      UsageError: there is none.
    """
    step = checkpoints.newest_sound_step() if wanted is None else wanted
    if step is None:
        raise UsageError(f"no checkpoint in {checkpoints.directory}")
    return step


def _write_start(job: Job, first: FirstState, *, goes_on: bool) -> None:
    """Records in the folder of the job what runs, and where its weights come from."""
    if jax.process_index() != 0:
        return
    report = job.observers.message
    write_config(job.directory, job.resolved, job.options, goes_on=goes_on, report=report)
    if not goes_on and job.options.enable_checkpoint_saving:
        forget_checkpoint(job.directory)
    if not first.is_restored:
        write_record(job.directory, first.provenance)


def _tell_start(job: Job, programs: TrainPrograms, prepared: _Prepared) -> RunInfo:
    """Says what will run, and lets the observers begin."""
    first, train = prepared.first, job.task.train
    if jax.process_index() == 0:
        for line in [
            *start_lines(job, first.state, programs, start_step=first.step),
            *(first.provenance.lines() if first.provenance is not None else []),
            *prepared.notes,
            *compiled_lines(prepared.compiled),
        ]:
            job.observers.message(line)
    if first.step > train.num_train_steps:
        job.observers.message(_nothing_to_train(job, first.step))
    info = _run_info(job, programs, prepared.works, start_step=first.step)
    job.observers.start(info)
    missed = train.profiler_capture_step
    if missed is not None and missed <= first.step:
        job.observers.message(
            f"no profile: task.train.profiler_capture_step={missed} is done, and this run begins"
            f" after step {first.step}"
        )
    return info


def _nothing_to_train(job: Job, step: int) -> str:
    path = last_step_path(job.resolved)
    return (
        f"nothing is trained: step {step} is already beyond"
        f" task.train.num_train_steps={job.task.train.num_train_steps}; to go on, give more than"
        f" {step} steps, as in --fdl.{path}={2 * step}"
    )


def _run_info(
    job: Job, programs: TrainPrograms, works: list[StepWork], *, start_step: int
) -> RunInfo:
    """What is known of the run; of several programs, the mean over their turns."""
    known = run_info(job, start_step=start_step)
    shares = [programs.share(program) for program in programs.programs]

    def mean(values: list[Any]) -> Any:
        return values[0] if len(values) == 1 else sum(map(operator.mul, shares, values))

    return dataclasses.replace(
        known,
        tokens_per_step=mean([work.tokens for work in works]),
        examples_per_step=mean([work.examples for work in works]),
        flops_per_step=mean([work.flops for work in works]),
        peak_flops_per_device=_peak_flops(job.options, known.device_kind),
        train_programs=tuple(program.name for program in programs.programs if program.name),
    )


def _peak_flops(options: RunOptions, device_kind: str) -> float | None:
    if options.peak_tflops_per_device is not None:
        return options.peak_tflops_per_device * 1e12
    return peak_flops(device_kind)
