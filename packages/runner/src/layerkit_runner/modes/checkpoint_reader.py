"""Runs evaluations and decodings on the checkpoints of a job, each at most once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from etils import epath

from layerkit_runner.checkpointing import CheckpointManager, StructureMismatchError
from layerkit_runner.checkpointing.folders import committed_steps, step_folder
from layerkit_runner.checkpointing.integrity import step_digest
from layerkit_runner.distributed.process_exchange import from_process_0, gather_values
from layerkit_runner.distributed.watchdog import progress
from layerkit_runner.errors import UsageError
from layerkit_runner.modes.end_report import sample_text
from layerkit_runner.modes.evaluation_records import (
    program_settings,
    read_record,
    record_path,
    write_record,
)
from layerkit_runner.modes.reported_metric import ReportedMetric
from layerkit_runner.modes.start_report import run_info
from layerkit_runner.modes.train import choose_step
from layerkit_runner.trainer import BaseProgram, DecodeProgram
from layerkit_runner.trainer.job import Job
from layerkit_runner.trainer.job_folder import check_same_experiment
from layerkit_runner.training.train_state import TrainState


@dataclasses.dataclass
class CheckpointReader:
    """Reads checkpoints and runs programs on them.

    Attributes:
      job: Started.
      eval_programs: Those whose metrics are recorded.
      decode_programs: Those that keep their outputs themselves.
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

    def look_at_newest(self) -> int | None:
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
