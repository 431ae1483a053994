"""Start-up of training, evaluation, decoding and export: devices, task, partitioner, observers."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import importlib.metadata
import platform
import socket
import subprocess
from collections.abc import Iterator

import jax
import numpy as np
from etils import epath

from layerkit.config.checks import check_sizes
from layerkit_runner.checkpointing import (
    CheckpointManager,
    CheckpointPolicy,
    DamagedCheckpointError,
    RestoredCheckpoint,
    StateFormat,
    StructureMismatchError,
    stored_state,
)
from layerkit_runner.checkpointing.folders import JOB_SUBFOLDER, checkpoints_folder, step_folder
from layerkit_runner.config.config_tree import check_class
from layerkit_runner.config.requests import ResolvedExperiment
from layerkit_runner.distributed.devices import (
    check_devices,
    enable_compilation_cache,
    start_devices,
)
from layerkit_runner.distributed.watchdog import phase
from layerkit_runner.errors import UsageError, as_usage_error
from layerkit_runner.files.atomic_write import absolute
from layerkit_runner.observers import (
    Goodput,
    GoodputLog,
    MetricsLog,
    Observer,
    Observers,
    Progress,
    TensorBoard,
)
from layerkit_runner.partitioning import Partitioner, PmapPartitioner
from layerkit_runner.run.job_folder import (
    changes_since_recorded,
    check_same_experiment,
    check_writable,
    record_checkpoint,
)
from layerkit_runner.run_options import RunOptions
from layerkit_runner.step.task import SingleTask
from layerkit_runner.step.train_state import TRAINING_ONLY, TrainState

_DISTRIBUTIONS = ("layerkit", "layerkit-runner", "jax", "flax", "optax", "orbax-checkpoint")


@dataclasses.dataclass(frozen=True)
class Job:
    """A started job: devices are initialized, and the task is built and bound."""

    mode: str
    resolved: ResolvedExperiment
    options: RunOptions
    directory: epath.Path
    task: SingleTask
    partitioner: Partitioner
    observers: Observer
    goodput: Goodput = dataclasses.field(default_factory=Goodput)

    @property
    def given_directory(self) -> epath.Path:
        """Job folder as written in `--job_log_dir`, for messages."""
        return epath.Path(self.options.job_log_dir or self.directory)

    def checkpoints(self, *, read_only: bool, directory: str | None = None) -> CheckpointManager:
        """Open the checkpoints of this job, or of another one by its folder."""
        folder = self.directory / JOB_SUBFOLDER
        if directory is not None:
            folder = checkpoints_folder(absolute(directory))
        train = self.task.train
        hours = train.save_keep_interval_hours
        policy = CheckpointPolicy(
            save_interval_steps=train.save_interval_steps,
            max_to_keep=train.save_max_to_keep,
            keep_interval=None if hours is None else datetime.timedelta(hours=hours),
            save_step_zero=train.save_step_zero,
            keep_interval_steps=train.save_keep_interval_steps,
            keep_steps=tuple(train.save_keep_steps),
            best_metric=train.save_best_metric,
            best_mode=train.save_best_mode,
            best_to_keep=train.save_best_to_keep,
        )
        is_pmap = isinstance(self.partitioner, PmapPartitioner)
        is_one_file = is_pmap and not self.options.pmap_use_tensorstore
        check_sizes(None, **{"--async_timeout_secs": self.options.async_timeout_secs})
        with as_usage_error(PermissionError, NotADirectoryError, owner=str(folder)):
            return CheckpointManager(
                folder,
                policy=policy,
                state_format=StateFormat.MSGPACK if is_one_file else StateFormat.TENSORSTORE,
                async_timeout_secs=self.options.async_timeout_secs,
                todelete_subdir=self.options.checkpoint_todelete_subdir,
                read_only=read_only,
                report=self.observers.message,
                on_commit=functools.partial(record_checkpoint, self.directory),
            )

    def abstract_state(self) -> TrainState:
        """Return the shapes, dtypes and shardings of the state on the devices."""
        with as_usage_error(ValueError):
            return self.partitioner.abstract_state(self.task)

    def abstract_stored_state(self) -> TrainState:
        """Return the shapes, dtypes and shardings of the state in a checkpoint."""
        with as_usage_error(ValueError):
            return self.partitioner.abstract_stored_state(self.task)

    def restore(
        self, checkpoints: CheckpointManager, step: int, *, for_training: bool = True
    ) -> RestoredCheckpoint:
        """Restore a checkpoint onto the devices.

        Args:
          checkpoints: Checkpoints to read.
          step: Step to restore.
          for_training: True to restore the optimizer state and the input positions too.

        Raises:
          NonFiniteError: `for_training` is set, and the state has values that are not finite.
          UsageError: The step does not exist, is damaged, or has the structure of another model.
        """
        abstract = self._target(for_training=for_training)
        unneeded = [part for part in TRAINING_ONLY if getattr(abstract, part) == ()]
        with self._naming_problems(checkpoints):
            restored = checkpoints.restore(
                step,
                abstract,
                leave_out=() if for_training else unneeded,
                cast_dtypes=self.options.restore_cast_dtypes,
                with_input_states=for_training,
            )
            return self._place(checkpoints, restored, for_training=for_training)

    def restore_newest(self, checkpoints: CheckpointManager) -> RestoredCheckpoint | None:
        """Restore the newest undamaged checkpoint for training, if any; see `restore`."""
        target, casts = self._target(for_training=True), self.options.restore_cast_dtypes
        with self._naming_problems(checkpoints):
            restored = checkpoints.restore_newest(target, cast_dtypes=casts)
            if restored is None:
                return None
            return self._place(checkpoints, restored, for_training=True)

    def _target(self, *, for_training: bool) -> TrainState:
        abstract = self.abstract_stored_state()
        return abstract if for_training else abstract.for_inference()

    def _place(
        self, checkpoints: CheckpointManager, restored: RestoredCheckpoint, *, for_training: bool
    ) -> RestoredCheckpoint:
        saved = int(np.asarray(restored.state.step.addressable_data(0)))
        if saved != restored.step:
            path = step_folder(checkpoints.directory, restored.step)
            raise DamagedCheckpointError(
                f"The checkpoint {path} is damaged: state/step={saved}. Expected {restored.step}."
                " Move it out of the folder to resume from an older one."
            )
        if for_training:
            stored_state.require_finite(
                f"cannot resume from step {restored.step} of {checkpoints.directory}",
                stored_state.named_leaves(restored.state),
                "`python -m layerkit_runner.tools.checkpoints verify` lists the finite steps;"
                " move newer ones out of this folder to resume from one of them.",
            )
        stored = restored.state
        if for_training:
            stored = self.task.set_config_numbers(stored)
        state = self.partitioner.device_state(self.task, stored)
        return dataclasses.replace(restored, state=state)

    @contextlib.contextmanager
    def _naming_problems(self, checkpoints: CheckpointManager) -> Iterator[None]:
        """Raise `UsageError` for steps that do not exist, are damaged or of another model."""
        try:
            yield
        except (FileNotFoundError, DamagedCheckpointError) as error:
            raise UsageError(str(error)) from error
        except StructureMismatchError as error:
            changed = changes_since_recorded(checkpoints.directory.parent, self.resolved)
            raise UsageError("\n".join([*changed, str(error)])) from error


def choose_step(checkpoints: CheckpointManager, step: int | None) -> int:
    """Return a given step, or else the newest undamaged one."""
    step = checkpoints.newest_sound_step() if step is None else step
    if step is None:
        raise no_checkpoint(checkpoints)
    return step


def no_checkpoint(checkpoints: CheckpointManager) -> UsageError:
    """Return the error of a folder without an undamaged checkpoint."""
    expected = "a folder with an undamaged checkpoint"
    return UsageError("found no checkpoint", owner=str(checkpoints.directory), expected=expected)


def start_job(
    mode: str, resolved: ResolvedExperiment, options: RunOptions, *, quiet: bool = False
) -> Job:
    """Start the devices and build partitioner, task and observers; `quiet` prints nothing."""
    goodput = Goodput()
    enable_compilation_cache(options.jax_compilation_cache)
    assert options.job_log_dir is not None  # a check of the flags
    directory = absolute(options.job_log_dir)
    start_devices()
    if jax.process_index() == 0:  # Only process 0 writes; two processes would collide.
        check_writable(directory)
    check_same_experiment(directory, resolved)
    check_devices(options, jax.devices()[0].device_kind)
    partitioner, task = build_parts(resolved)
    # Every process builds the observers, so that all processes fail if a field is wrong.
    for index, config in enumerate(resolved.observers):
        check_class(config, f"observers.{index}", Observer)
    with as_usage_error(ValueError, TypeError):
        observers = [config.Instantiate() for config in resolved.observers]
    partitioner.start()
    partitioner.bind(task)
    if jax.process_index() == 0:
        built_in = _built_in_observers(options, goodput, quiet=quiet)
        observers = [*built_in, *observers]
    else:
        observers = []
    watched = Observers(observers, phase=phase)
    return Job(mode, resolved, options, directory, task, partitioner, watched, goodput)


def _built_in_observers(options: RunOptions, goodput: Goodput, *, quiet: bool) -> list[Observer]:
    progress = Progress()
    observers: list[Observer] = [MetricsLog()] if quiet else [progress, MetricsLog()]
    if options.enable_summary_writer:
        observers.append(TensorBoard())
    observers.append(GoodputLog(goodput))
    projects = {"WeightsAndBiases": options.wandb_project, "Trackio": options.trackio_project}
    for name, project in projects.items():
        if project is not None:
            from layerkit_runner.observers import trackers

            observers.append(getattr(trackers, name)(project, report=progress.message))
    return observers


def build_parts(resolved: ResolvedExperiment) -> tuple[Partitioner, SingleTask]:
    """Build the partitioner and the task of an experiment."""
    with as_usage_error(ValueError, TypeError):
        return resolved.partitioner.Instantiate(), resolved.task.Instantiate()


def environment() -> dict[str, str]:
    """Return where a run takes place: versions, host, and the commit of the working folder."""
    facts = {**versions(), "python": platform.python_version(), "host": socket.gethostname()}
    # `-dirty` follows the commit if files differ from it. No program that the configuration of the
    # folder names watches its files.
    describe = "git -c core.fsmonitor=false describe --always --dirty --abbrev=12 --exclude=*"
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # no git, or no repository
        described = subprocess.run(
            describe.split(), capture_output=True, check=True, text=True, timeout=5
        )
        facts["git"] = described.stdout.strip()
    return facts


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of the packages that determine the numerical results of a run."""
    by_name = {}
    for name in _DISTRIBUTIONS:
        try:
            by_name[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            by_name[name] = "not installed as a distribution"
    return by_name
