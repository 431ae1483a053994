"""Job: what every mode of `runner` needs before it can do its work."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import importlib.metadata
from collections.abc import Iterator

import jax
import numpy as np
from etils import epath

from layerkit_runner.checkpointing import (
    CheckpointManager,
    CheckpointPolicy,
    DamagedCheckpointError,
    RestoredCheckpoint,
    SaveError,
    StateFormat,
    StructureMismatchError,
    structure,
)
from layerkit_runner.checkpointing.folders import step_folder
from layerkit_runner.config.config_text import config_json
from layerkit_runner.config.flags import RunOptions
from layerkit_runner.config.resolve import ResolvedExperiment
from layerkit_runner.distributed.devices import (
    check_devices,
    enable_compilation_cache,
    start_devices,
)
from layerkit_runner.errors import UsageError, to_usage_error
from layerkit_runner.files.atomic_write import absolute
from layerkit_runner.observers import (
    Goodput,
    GoodputLog,
    MetricsLog,
    Observer,
    Observers,
    Progress,
    TensorBoard,
    build_observers,
)
from layerkit_runner.partitioning import Partitioner, PmapPartitioner
from layerkit_runner.trainer.job_folder import (
    changes_since_recorded,
    check_same_experiment,
    check_writable,
    record_checkpoint,
)
from layerkit_runner.training.task import SingleTask
from layerkit_runner.training.train_state import TRAINING_ONLY, TrainState

_DISTRIBUTIONS = ("layerkit", "layerkit-runner", "jax", "flax", "optax", "orbax-checkpoint")


@dataclasses.dataclass(frozen=True)
class Job:
    """A started job: devices arranged, task built and bound.

    Attributes:
      mode: What `--mode` says.
      resolved: The experiment and its configs.
      options: The other flags.
      directory: Where outputs go, absolute.
      task: Built, and bound to the partitioner.
      partitioner: Started.
      observers: Whom to report to.
      goodput: What becomes of the time, from the start of the job on.
    """

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
        """The same as it was given, for messages."""
        return epath.Path(self.options.job_log_dir or self.directory)

    def checkpoints(self, *, read_only: bool, directory: str | None = None) -> CheckpointManager:
        """The checkpoints of this job, or those of another job's folder.

        Raises:
          UsageError: a flag is out of range, or the folder's record of evaluations is damaged.
        """
        folder = self.directory / "checkpoints"
        if directory is not None:
            folder = checkpoint_folder(absolute(directory))
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
        one_file = isinstance(self.partitioner, PmapPartitioner)
        one_file = one_file and not self.options.pmap_use_tensorstore
        try:
            return CheckpointManager(
                folder,
                policy=policy,
                state_format=StateFormat.MSGPACK if one_file else StateFormat.TENSORSTORE,
                async_timeout_secs=self.options.async_timeout_secs,
                read_only=read_only,
                report=self.observers.message,
                on_commit=None
                if read_only
                else functools.partial(record_checkpoint, self.directory),
            )
        except SaveError:
            raise
        except ValueError as error:
            raise UsageError(str(error)) from error
        except OSError as error:
            raise UsageError(
                f"{folder} cannot be read: {error}. Expected a folder of checkpoints that this"
                " user can read. Correct its permissions, or give another folder."
            ) from error

    def abstract_state(self) -> TrainState:
        """Return the state on the devices as shapes, dtypes and shardings.

        Raises:
          UsageError: A layer refuses its fields, or the mesh does not divide a weight.
        """
        with self._naming_experiment():
            return self.partitioner.abstract_state(self.task)

    def abstract_stored_state(self) -> TrainState:
        """Return the state as a checkpoint holds it; see `abstract_state`."""
        with self._naming_experiment():
            return self.partitioner.abstract_stored_state(self.task)

    @contextlib.contextmanager
    def _naming_experiment(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise to_usage_error(error, owner=self.resolved.name) from error

    def restore(
        self, checkpoints: CheckpointManager, step: int, *, for_training: bool = True
    ) -> RestoredCheckpoint:
        """Reads a checkpoint, placed as this job's partitioner wants it.

        Args:
          checkpoints: Where to read.
          step: Which one.
          for_training: Whether to read what only training needs: the state of the optimizer, and
            where the inputs stood.

        Raises:
          NonFiniteError: the state is to be trained and holds values that are not finite.
          UsageError: there is no such step, or it is damaged, or of another model.
        """
        abstract = self.abstract_stored_state()
        try:
            if not for_training:
                abstract = abstract.for_inference()
            restored = checkpoints.restore(
                step,
                abstract,
                leave_out=[part for part in TRAINING_ONLY if getattr(abstract, part) == ()],
                cast_dtypes=self.options.restore_cast_dtypes,
                with_input_states=for_training,
            )
            _check_step(restored.state, checkpoints.directory, step)
            if for_training:
                structure.require_finite(
                    f"{checkpoints.directory} cannot be resumed from step {step}",
                    structure.named_leaves(restored.state),
                    "`python -m layerkit_runner.tools.checkpoints verify` says which steps are"
                    " finite; move the newer ones out of this folder to resume from one of them.",
                )
            state = self.partitioner.device_state(self.task, restored.state)
            return dataclasses.replace(restored, state=state)
        except (FileNotFoundError, DamagedCheckpointError) as error:
            raise UsageError(str(error)) from error
        except StructureMismatchError as error:
            folder = checkpoints.directory.parent
            changed = changes_since_recorded(folder, self.resolved)
            raise UsageError("\n".join([*changed, str(error)])) from error


def _check_step(state: TrainState, directory: epath.Path, step: int) -> None:
    """Raise an error if a checkpoint holds the state of another step than its folder says."""
    saved = int(np.asarray(state.step.addressable_data(0)))
    if saved != step:
        raise DamagedCheckpointError(
            f"The checkpoint {step_folder(directory, step)} is damaged: state/step={saved}."
            f" Expected {step}. Move it out of the folder to resume from an older one."
        )


def start_job(mode: str, resolved: ResolvedExperiment, options: RunOptions) -> Job:
    """Builds task and partitioner and starts the devices.

    Raises:
      UsageError: fields or flags that do not fit together or do not fit the devices.
    """
    goodput = Goodput()
    enable_compilation_cache(options.jax_compilation_cache)
    if options.job_log_dir is None:
        raise UsageError(f"--mode={mode} needs a folder to write to: --job_log_dir=DIR")
    directory = absolute(options.job_log_dir)
    start_devices()
    if jax.process_index() == 0:  # the only one that writes, and two would try at once
        check_writable(directory)
    check_same_experiment(directory, resolved)
    check_devices(options, jax.devices()[0].device_kind)
    partitioner, task = build_parts(resolved)
    if options.pmap_use_tensorstore and not isinstance(partitioner, PmapPartitioner):
        raise UsageError(
            "--pmap_use_tensorstore is for experiments under pmap; this one runs under"
            f" {type(partitioner).__name__}, which always writes TensorStore checkpoints."
        )
    # Built in every process, so that all of them refuse wrong fields.
    observers = build_observers(resolved.observers)
    partitioner.start()
    partitioner.bind(task)
    if jax.process_index() == 0:
        observers = [*_built_in_observers(resolved, options, goodput), *observers]
    else:
        observers = []
    together = Observers(observers)
    return Job(mode, resolved, options, directory, task, partitioner, together, goodput)


def _built_in_observers(
    resolved: ResolvedExperiment, options: RunOptions, goodput: Goodput
) -> list[Observer]:
    """Return the observers of every run, and those that flags ask for."""
    progress = Progress()
    observers: list[Observer] = [progress, MetricsLog()]
    if options.enable_summary_writer:
        observers.append(TensorBoard())
    observers.append(GoodputLog(goodput))
    if options.wandb_project is not None:
        from layerkit_runner.observers.weights_and_biases import WeightsAndBiases

        config = config_json(resolved)["config"]
        observers.append(
            WeightsAndBiases(options.wandb_project, config=config, report=progress.message)
        )
    return observers


def build_parts(resolved: ResolvedExperiment) -> tuple[Partitioner, SingleTask]:
    """The partitioner and the task of an experiment.

    Raises:
      UsageError: a field is refused when they are built.
    """
    try:
        return resolved.partitioner.Instantiate(), resolved.task.Instantiate()
    except (ValueError, TypeError) as error:
        raise UsageError(f"{resolved.name}: {error}") from error


def checkpoint_folder(directory: epath.Path) -> epath.Path:
    """Where the checkpoints of another job are, given its folder or the one they are in."""
    return directory if directory.name == "checkpoints" else directory / "checkpoints"


def versions() -> dict[str, str]:
    """Versions of what decides the numbers of a run."""
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed as a distribution"
    return found
