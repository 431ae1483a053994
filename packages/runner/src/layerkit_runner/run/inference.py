"""Evaluation and decoding of checkpoints, beside a training job or after it.

    --mode=eval, decode              each new checkpoint until the last; see `checkpoint_watcher`
    --mode=eval_once, decode_once    the newest one, or those of --restore_checkpoint_step
    --mode=lm_eval                   the same, or a Hugging Face folder by --init_from

A step's record and outputs are replaced if it is evaluated or decoded again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax

from layerkit.config.checks import check_choice
from layerkit_runner.checkpointing import CheckpointManager, StructureMismatchError
from layerkit_runner.checkpointing.folders import committed_steps, step_folder
from layerkit_runner.checkpointing.integrity import step_digest
from layerkit_runner.config.requests import ResolvedExperiment
from layerkit_runner.data.train_inputs import check_same_data
from layerkit_runner.distributed.cluster import gather_values, run_on_process_0
from layerkit_runner.distributed.stop_signals import StopSignals
from layerkit_runner.distributed.watchdog import phase, progress
from layerkit_runner.errors import UsageError
from layerkit_runner.files.atomic_write import atomic_write
from layerkit_runner.observers.metrics_log import encode
from layerkit_runner.run.checkpoint_watcher import watch_checkpoints
from layerkit_runner.run.end_report import ReportedMetric, sample_text
from layerkit_runner.run.job import Job, choose_step, start_job
from layerkit_runner.run.job_folder import check_same_experiment
from layerkit_runner.run.programs.build_programs import decode_programs, eval_programs, inputs_of
from layerkit_runner.run.programs.decode_program import DecodeProgram
from layerkit_runner.run.programs.eval_program import BaseProgram
from layerkit_runner.run.start_report import run_info
from layerkit_runner.run_options import FOLLOWING_MODES, RunOptions
from layerkit_runner.step.train_state import TrainState


def run_inference(mode: str, resolved: ResolvedExperiment, options: RunOptions) -> int:
    """Evaluate or decode in one of the four modes; return the exit code."""
    job = start_job(mode, resolved, options)
    with contextlib.closing(job.observers):
        reader = _checkpoint_reader(job)
        if mode in FOLLOWING_MODES:
            leaving, saving = "leaving after the current program", "this mode saves no checkpoint"
            with (
                StopSignals(leaving=leaving, saving=saving) as signals,
                reader.open() as checkpoints,
            ):
                reader.is_asked_to_stop = signals.agreed_now
                watch_checkpoints(
                    checkpoints.directory,
                    reader.process_newest,
                    own_last_step=job.task.train.num_train_steps,
                    timeout_secs=options.follow_timeout_secs,
                    signals=signals,
                    report=job.observers.message,
                )
            return signals.exit_code
        if options.init_from is not None:
            reader.process_first_state()
            return 0
        if options.restore_checkpoint_step is not None:
            reader.process_steps(options.restore_checkpoint_step)
            return 0
        # If the newest step is deleted while it is read, there is a newer one.
        while reader.process_newest() is None:
            with reader.open() as checkpoints:
                choose_step(checkpoints, None)
        return 0


def _checkpoint_reader(job: Job) -> CheckpointReader:
    """Open the data of the mode's programs, and compare them among processes."""
    name, decodes = job.resolved.name, job.mode.startswith("decode")
    evaluates = not decodes or job.options.eval_during_decode
    if job.mode == "lm_eval":
        # Imports lm-evaluation-harness.
        from layerkit_runner.run.programs.lm_eval_program import lm_eval_programs

        return CheckpointReader(job, lm_eval_programs(job), [])
    evals = eval_programs(job) if evaluates else []
    if evaluates and not evals:
        raise UsageError("there is no held-out data set to evaluate", owner=f"{name}.datasets()")
    decodings = decode_programs(job) if decodes else []
    if decodes and not decodings:
        raise UsageError("there is no data set to decode", owner=f"{name}.decode_datasets()")
    if jax.process_count() > 1:
        check_same_data(inputs_of(evals), gather_values)
        check_same_data(inputs_of(decodings), gather_values)
    return CheckpointReader(job, evals, decodings)


@dataclasses.dataclass
class CheckpointReader:
    """A reader that restores checkpoints and runs programs on them.

    `is_asked_to_stop` returns whether to start no further program; the same on all processes.
    """

    job: Job
    eval_programs: Sequence[BaseProgram]
    decode_programs: Sequence[BaseProgram]
    is_asked_to_stop: Callable[[], bool] = lambda: False
    # (step, digest) of the checkpoints that are processed.
    _done: set[tuple[int, str | None]] = dataclasses.field(default_factory=set, init=False)
    _has_started: bool = dataclasses.field(default=False, init=False)

    def open(self) -> CheckpointManager:
        """Open the checkpoints of this job's folder, or of --restore_checkpoint_dir."""
        return self.job.checkpoints(
            read_only=True, directory=self.job.options.restore_checkpoint_dir
        )

    def process_newest(self) -> int | None:
        """Run the programs on the newest intact checkpoint, unless they did; return its step.

        Return None if there is no checkpoint, or it was deleted while it was read.
        """
        progress("looking for the newest checkpoint", compiles=True, waits_for_others=True)
        with self.open() as checkpoints:
            step = checkpoints.newest_sound_step()
            return step if step is not None and self.process(checkpoints, step) else None

    def process_steps(self, steps: Sequence[int]) -> None:
        """Run the programs on the checkpoints of these steps."""
        with self.open() as checkpoints:
            folder = checkpoints.directory
            existing = run_on_process_0(lambda: committed_steps(folder))
            for step in steps:
                check_choice(str(folder), existing, **{"--restore_checkpoint_step": step})
            for step in steps:
                progress(f"reading step {step}", compiles=True, waits_for_others=True)
                if not self.process(checkpoints, step):
                    raise UsageError(f"step {step} was deleted from {folder} while it was read")

    def process_first_state(self) -> None:
        """Run the programs on the initial weights of the experiment, those of a folder."""
        from layerkit_runner.init_from import plan_first_state

        state = plan_first_state(self.job.partitioner, self.job.task)().state.for_inference()
        self.job.observers.start(run_info(self.job, start_step=0))
        for program in self.eval_programs:
            self._evaluate(program, state, 0, None)
        self.job.observers.flush()

    def process(self, checkpoints: CheckpointManager, step: int) -> bool:
        """Run the programs on a checkpoint; return False if it was deleted meanwhile."""
        if self.job.options.restore_checkpoint_dir is None:
            # The training job may have started after this one.
            check_same_experiment(self.job.directory, self.job.resolved)
        folder = checkpoints.directory
        digest = run_on_process_0(lambda: step_digest(step_folder(folder, step)))
        if (step, digest) in self._done:
            return True
        state = self._restore(checkpoints, step)
        if state is None:
            return False
        for program in self.eval_programs:
            if not self.is_asked_to_stop():
                self._evaluate(program, state, step, digest)
        for decoding in self.decode_programs:
            if not self.is_asked_to_stop():
                self._decode(decoding, state, step)
        self.job.observers.flush()
        self._done.add((step, digest))
        return True

    def _restore(self, checkpoints: CheckpointManager, step: int) -> TrainState | None:
        """Restore the state; return None if the training job deleted the step meanwhile."""
        problem: Exception | None = None
        try:
            state = self.job.restore(checkpoints, step, for_training=False).state
        except Exception as error:  # a deleted file may fail any call
            problem = error
        if any(gather_values(problem is not None)):
            is_other_model = isinstance(getattr(problem, "__cause__", None), StructureMismatchError)
            folder = checkpoints.directory
            newest = run_on_process_0(lambda: max(committed_steps(folder), default=-1))
            if problem is not None and (is_other_model or newest <= step):
                raise problem
            self.job.observers.message(
                f"the training job deleted step {step} while it was read; step {newest} is the"
                " newest"
            )
            return None
        if not self._has_started:
            self._has_started = True
            self.job.observers.start(run_info(self.job, start_step=step))
        return state

    def _evaluate(
        self, program: BaseProgram, state: TrainState, step: int, digest: str | None
    ) -> None:
        metrics = dict(self._run(program, state, step))
        if program.dataset is not None:
            metric = ReportedMetric.of(self.job.task, token_unit=program.dataset.token_unit)
            if metric.name in metrics:
                self.job.observers.message(metric.line(program.name, metrics[metric.name]))
        if program.folder is not None and jax.process_index() == 0:
            # `encode` replaces NaN, which JSON lacks.
            values = json.loads(encode(metrics))
            record = {"step": step, "metrics": values, "checkpoint": digest}
            path = program.folder / program.name / f"step_{step:08d}.json"
            atomic_write(path, json.dumps(record, indent=1) + "\n")

    def _decode(self, program: BaseProgram, state: TrainState, step: int) -> None:
        records = self._run(program, state, step)
        if isinstance(program, DecodeProgram):
            for record in records[:1]:
                self.job.observers.message(sample_text(program.name, record))
            self.job.observers.message(f"decoded step {step} to {program.output_path(step)}")

    def _run(self, program: BaseProgram, state: TrainState, step: int) -> Any:
        """Run a program on the same examples for each checkpoint."""
        # Training instead continues such an input from evaluation to evaluation.
        dataset = program.dataset
        if dataset is not None and not dataset.reset_for_eval:  # others reset themselves
            dataset.reset()
        with phase(f"running {program.name} on step {step}", waits_for_others=True):
            return program.run(state, step, self.job.observers)
