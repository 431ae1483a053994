"""The state that a training run starts from: restored from a checkpoint, read or drawn."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from layerkit_runner.checkpointing import CheckpointManager
from layerkit_runner.errors import UsageError
from layerkit_runner.init_from.provenance import FirstState
from layerkit_runner.trainer.job import Job
from layerkit_runner.trainer.job_folder import check_restart


@dataclasses.dataclass(frozen=True)
class Start:
    """What a run starts from.

    Attributes:
      first: First state.
      input_states: Input positions of the checkpoint that was restored.
      own_metadata: Metadata of the job's own checkpoint that is resumed; empty for a new run.
      source: Folder of the checkpoints that were restored from; None for a new run.
    """

    first: FirstState
    input_states: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    own_metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    source: str | None = None


def plan_if_new(job: Job, checkpoints: CheckpointManager) -> Callable[[], FirstState] | None:
    """Return the plan of a new run's first state; None if the run may resume or restore.

    So mistakes in the sources of first weights are found before the training step is compiled.
    """
    if checkpoints.latest_step() is not None:
        return None
    _check_restart(job, checkpoints)
    return None if job.options.restore_checkpoint_dir is not None else _plan_first_state(job)


def _check_restart(job: Job, checkpoints: CheckpointManager) -> None:
    options, report = job.options, job.observers.message
    if options.enable_checkpoint_saving:
        is_allowed = options.allow_restart_from_scratch
        check_restart(job.directory, checkpoints.directory, is_allowed=is_allowed, report=report)


def _plan_first_state(job: Job) -> Callable[[], FirstState]:
    """Compare what a new run is to start from; return a function that reads or draws it."""
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


def first_state(
    job: Job, checkpoints: CheckpointManager, plan: Callable[[], FirstState] | None
) -> Start:
    """Restore the state of the checkpoint to start from, or else make the first state."""
    with _source_of_state(job, checkpoints) as (source, step):
        if source is None or step is None:
            return Start((plan or _plan_first_state(job))())
        restored = job.restore(source, step)
        first = FirstState(restored.state, step, is_restored=True)
        metadata = restored.metadata if source is checkpoints else {}
        return Start(first, restored.input_states, metadata, str(source.directory))


@contextlib.contextmanager
def _source_of_state(
    job: Job, checkpoints: CheckpointManager
) -> Iterator[tuple[CheckpointManager | None, int | None]]:
    """Open the checkpoint to start from: the job's own, else that of --restore_checkpoint_dir."""
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
    """Return the step to read: the one that is wanted, or else the newest sound one.

    Raises:
      UsageError: There is none.
    """
    step = checkpoints.newest_sound_step() if wanted is None else wanted
    if step is None:
        raise UsageError(f"no checkpoint in {checkpoints.directory}")
    return step
