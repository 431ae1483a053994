"""Evaluation and decoding of checkpoints, beside a training job or after it.

    --mode=eval, decode              each new checkpoint, until the last; see `following.py`
    --mode=eval_once, decode_once    the newest one, or those of --restore_checkpoint_step

Nothing is done twice: evaluations leave records (`evaluation_records.py`), and finished outputs of
decoding are kept. So a job that was killed takes up where it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from etils import epath

from layerkit_runner.checkpointing import CheckpointManager, StructureMismatchError
from layerkit_runner.checkpointing.folders import committed_steps, step_folder
from layerkit_runner.checkpointing.integrity import step_digest
from layerkit_runner.config.flags import RunOptions
from layerkit_runner.config.resolve import ResolvedExperiment
from layerkit_runner.data.training_data import check_same_data
from layerkit_runner.distributed.process_exchange import from_process_0, gather_values
from layerkit_runner.distributed.stop_signals import StopRequestedError, StopSignals
from layerkit_runner.distributed.watchdog import progress
from layerkit_runner.errors import UsageError
from layerkit_runner.files.atomic_write import atomic_write
from layerkit_runner.modes.end_report import ReportedMetric, sample_text
from layerkit_runner.modes.following import follow
from layerkit_runner.modes.start_report import run_info
from layerkit_runner.modes.start_state import choose_step
from layerkit_runner.observers.metrics_log import encode
from layerkit_runner.run_options import FOLLOWING_MODES
from layerkit_runner.trainer import BaseProgram, DecodeProgram
from layerkit_runner.trainer.build_programs import decode_programs, eval_programs, inputs_of
from layerkit_runner.trainer.job import Job, start_job
from layerkit_runner.trainer.job_folder import check_same_experiment
from layerkit_runner.trainer.provenance import describe_settings, differences
from layerkit_runner.training.train_state import TrainState


def run_inference(mode: str, resolved: ResolvedExperiment, options: RunOptions) -> int:
    """Evaluates or decodes as one of the four modes says; returns the exit code.

    Raises:
      UsageError: there is nothing to evaluate or to decode, no such checkpoint, or one of another
        model.
    """
    job = start_job(mode, resolved, options)
    with contextlib.closing(job.observers):
        reader = _reader(job)
        if mode in FOLLOWING_MODES:
            return _follow(reader)
        if options.restore_checkpoint_step is not None:
            reader.look_at(options.restore_checkpoint_step)
        else:
            # A newest one that was deleted while it was read has made way for a newer one.
            while reader.poll_newest() is None:
                reader.check_there_is_one()
    return 0


def _follow(reader: CheckpointReader) -> int:
    job = reader.job
    leaving, saving = "leaving once the work at hand is done", "there is nothing to save here"
    with StopSignals(leaving=leaving, saving=saving) as signals:
        reader.is_asked_to_stop = signals.agreed_now
        try:
            follow(
                reader.directory,
                reader.poll_newest,
                has_outputs=reader.has_outputs,
                own_last_step=job.task.train.num_train_steps,
                timeout_secs=job.options.follow_timeout_secs,
                signals=signals,
                report=job.observers.message,
            )
        except StopRequestedError:
            job.observers.message("the work at hand is given up, since its input does not answer")
            signals.agreed_now()
    return signals.exit_code


def _reader(job: Job) -> CheckpointReader:
    """What the mode does with a checkpoint; its data are opened, and compared among processes."""
    name, decodes = job.resolved.name, job.mode.startswith("decode")
    evaluates = not decodes or job.options.eval_during_decode
    evals = eval_programs(job) if evaluates else []
    if evaluates and not evals:
        raise UsageError(f"{name}.datasets() has no held-out input to evaluate")
    decodings = decode_programs(job) if decodes else []
    if decodes and not decodings:
        raise UsageError(f"{name}.decode_datasets() has nothing to decode")
    if jax.process_count() > 1:
        check_same_data(inputs_of(evals), gather_values)
        check_same_data(inputs_of(decodings), gather_values)
    return CheckpointReader(job, evals, decodings)


@dataclasses.dataclass
class CheckpointReader:
    """Reads checkpoints and runs programs on them.

    Attributes:
      job: Started.
      eval_programs: Programs whose metrics are recorded.
      decode_programs: Programs that keep their outputs themselves.
      is_asked_to_stop: Whether to leave out what is not begun yet; all processes agree.
    """

    job: Job
    eval_programs: Sequence[BaseProgram]
    decode_programs: Sequence[BaseProgram]
    is_asked_to_stop: Callable[[], bool] = lambda: False
    _settings: dict[str, dict[str, Any]] = dataclasses.field(init=False)
    _done: set[tuple[int, str | None]] = dataclasses.field(default_factory=set, init=False)
    _has_begun: bool = dataclasses.field(default=False, init=False)

    def __post_init__(self) -> None:
        self._settings = {p.name: program_settings(p) for p in self.eval_programs}

    def open(self) -> CheckpointManager:
        """The checkpoints to read, of this job's folder or of that of --restore_checkpoint_dir."""
        return self.job.checkpoints(
            read_only=True, directory=self.job.options.restore_checkpoint_dir
        )

    @property
    def directory(self) -> epath.Path:
        """The folder of the checkpoints."""
        with self.open() as checkpoints:
            return checkpoints.directory

    def poll_newest(self) -> int | None:
        """Does what is to be done with the newest sound checkpoint.

        Returns:
          Its step; None if there is none, or it was deleted while it was read.
        """
        progress("looking for the newest checkpoint", compiles=True, waits_for_others=True)
        with self.open() as checkpoints:
            step = checkpoints.newest_sound_step()
            if step is None or not self.look_into(checkpoints, step):
                return None
            return step

    def check_there_is_one(self) -> None:
        """Refuses a folder without a checkpoint that can be read.

        Raises:
          UsageError: there is none.
        """
        with self.open() as checkpoints:
            choose_step(checkpoints, None)

    def look_at(self, steps: Sequence[int]) -> None:
        """Does what is to be done with the checkpoints of these steps.

        Raises:
          UsageError: one of them is not there; nothing is done then.
        """
        with self.open() as checkpoints:
            folder = checkpoints.directory
            there = from_process_0(lambda: committed_steps(folder))
            for step in steps:
                if step not in there:
                    raise UsageError(
                        f"{folder} has no checkpoint of step {step}; it has"
                        f" {', '.join(map(str, there)) or 'none'}."
                    )
            for step in steps:
                progress(f"reading step {step}", compiles=True, waits_for_others=True)
                if not self.look_into(checkpoints, step):
                    raise UsageError(f"step {step} was deleted from {folder} while it was read")

    def has_outputs(self, step: int) -> bool:
        """Whether every program has left something of this step, whatever it was made from."""
        paths = [record_path(program, step) for program in self.eval_programs]
        decodings = [p for p in self.decode_programs if isinstance(p, DecodeProgram)]
        paths += [program.output_path(step) for program in decodings]
        return all(path is not None and path.exists() for path in paths)

    def look_into(self, checkpoints: CheckpointManager, step: int) -> bool:
        """Does what is to be done with one checkpoint, and is not done yet.

        Returns:
          False if it was deleted while it was read.

        Raises:
          UsageError: it is damaged, or of another experiment or model.
        """
        if self.job.options.restore_checkpoint_dir is None:
            # The training job may have begun after this one, and with another experiment.
            check_same_experiment(self.job.directory, self.job.resolved)
        folder = checkpoints.directory
        digest = from_process_0(lambda: step_digest(step_folder(folder, step)))
        if (step, digest) in self._done:
            return True
        pending = [p for p in self.eval_programs if not self._is_recorded(p, step, digest)]
        if pending or self.decode_programs:
            state = self._read(checkpoints, step)
            if state is None:
                return False
            for program in pending:
                if not self.is_asked_to_stop():
                    self._evaluate(program, state, step, digest)
            for decoding in self.decode_programs:
                if not self.is_asked_to_stop():
                    self._decode(decoding, state, step)
            self.job.observers.flush()
        self._done.add((step, digest))
        return True

    def _is_recorded(self, program: BaseProgram, step: int, digest: str | None) -> bool:
        """Whether that evaluation is done; if so, says what it found."""
        path = record_path(program, step)
        if path is None:
            return False
        made_from = self._made_from(program, digest)
        metrics = from_process_0(lambda: read_record(path, made_from))
        if metrics is None:
            return False
        self.job.observers.message(
            f"step {step} was evaluated on {program.name} before: {path}. Its checkpoint, fields"
            " and data set are the same; code is not compared. Delete this file to evaluate again."
        )
        self._say(program, metrics)
        return True

    def _made_from(self, program: BaseProgram, digest: str | None) -> dict[str, Any]:
        return {"checkpoint": digest, **self._settings[program.name]}

    def _read(self, checkpoints: CheckpointManager, step: int) -> TrainState | None:
        """The state to look at; None if its files went while they were read.

        A job deletes a checkpoint once it has newer ones, whoever reads it at that moment.
        """
        problem: Exception | None = None
        try:
            state = self.job.restore(checkpoints, step, for_training=False).state
        except Exception as error:  # a folder that goes may fail any call, and is told from others
            problem = error
        if any(gather_values(problem is not None)):
            is_other_model = isinstance(getattr(problem, "__cause__", None), StructureMismatchError)
            folder = checkpoints.directory
            newest = from_process_0(lambda: max(committed_steps(folder), default=-1))
            if problem is not None and (is_other_model or newest <= step):
                raise problem
            self.job.observers.message(
                f"step {step} was deleted by the training job while it was read; step {newest} is"
                " the newest"
            )
            return None
        if not self._has_begun:
            self._has_begun = True
            self.job.observers.start(run_info(self.job, start_step=step))
        return state

    def _evaluate(
        self, program: BaseProgram, state: TrainState, step: int, digest: str | None
    ) -> None:
        _start_over(program)
        metrics = dict(program.run(state, step, self.job.observers))
        self._say(program, metrics)
        path = record_path(program, step)
        if path is not None and jax.process_index() == 0:
            write_record(path, step, metrics, self._made_from(program, digest))

    def _say(self, program: BaseProgram, metrics: dict[str, float]) -> None:
        if program.dataset is None:
            return
        metric = ReportedMetric.of(self.job.task, token_unit=program.dataset.token_unit)
        if metric.name in metrics:
            self.job.observers.message(metric.line(program.name, metrics[metric.name]))

    def _decode(self, program: BaseProgram, state: TrainState, step: int) -> None:
        _start_over(program)
        records = program.run(state, step, self.job.observers)
        if isinstance(program, DecodeProgram):
            for record in records[:1]:
                self.job.observers.message(sample_text(program.name, record))
            self.job.observers.message(f"decoded step {step} to {program.output_path(step)}")


def _start_over(program: BaseProgram) -> None:
    """Puts the data back to their start, from which each checkpoint is given the same ones.

    Data of which an evaluation takes the next few batches are read on in training alone, where what
    has been read is kept in the checkpoint.
    """
    dataset = program.dataset
    if dataset is not None and not dataset.reset_for_eval:  # the others start over by themselves
        dataset.reset()


# Counted up when metrics change their meaning, so that older records do not count.
_FORMAT = 1
# What names a program or says when it runs while training.
_PLACE_FIELDS = ("name", "interval_steps")
_PLAIN = (bool, int, float, str, type(None))


def record_path(program: BaseProgram, step: int) -> epath.Path | None:
    """Where it is kept what a program found after `step` steps; None if it keeps nothing."""
    if program.folder is None:
        return None
    return program.folder / program.name / f"step_{step:08d}.json"


def program_settings(program: BaseProgram) -> dict[str, Any]:
    """What decides the metrics of an evaluation besides the checkpoint, as JSON values.

    To be asked before the program runs: an input may read on from where it ended.
    """
    fields = {
        name: value
        for name, value in vars(program).items()
        if isinstance(value, _PLAIN) and not name.startswith("_") and name not in _PLACE_FIELDS
    }
    return {
        "program": {"class": type(program).__qualname__, **fields},
        "averaged weights": program.task.train.eval_use_ema_states,
        **describe_settings(program.task, program.dataset),
        "record format": _FORMAT,
    }


def write_record(
    path: epath.Path, step: int, metrics: Mapping[str, float], made_from: Mapping[str, Any]
) -> None:
    """Keeps the metrics of a finished evaluation."""
    # By way of `encode`, since JSON has no NaN.
    record = {"step": step, "metrics": json.loads(encode(metrics)), "made_from": made_from}
    atomic_write(path, json.dumps(record, indent=1) + "\n")


def read_record(path: epath.Path, made_from: dict[str, Any]) -> dict[str, float] | None:
    """The metrics that stand there, if they were made from the same; else None."""
    try:
        record = json.loads(path.read_text())
        if differences(record["made_from"], made_from):
            return None
        return {name: float(value) for name, value in record["metrics"].items()}
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None
