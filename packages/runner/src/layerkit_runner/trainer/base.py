"""BaseProgram: the base of evaluations, decodings and other programs that run beside training."""

from __future__ import annotations

from typing import Any

from etils import epath

from layerkit.nested_map import NestedMap
from layerkit_inputs.base_input import BaseInput
from layerkit_runner.data.batch_checks import cast_text
from layerkit_runner.errors import UsageError
from layerkit_runner.observers import Observer
from layerkit_runner.partitioning import Partitioner
from layerkit_runner.training.task import SingleTask
from layerkit_runner.training.train_state import TrainState


class BaseProgram:
    """A program that reads the state of a job at intervals; users may add their own.

    An experiment lists programs as configs, `Config(MyProgram, name="probe", interval_steps=50)`.
    The job sets the first five arguments.

    Args:
      task: Task, bound to the partitioner.
      partitioner: Started partitioner.
      dataset: Input that the program reads; None for a program without data.
      name: Name of the program in outputs.
      folder: Folder for files of the program, visible to every process; None keeps nothing.
      interval_steps: Number of training steps between two runs of the program; None for
        `eval_interval_steps` or `decode_interval_steps` of the task.

    Attributes:
      metrics: Metrics of the records that a decoding made last.

    Raises:
      UsageError: `interval_steps` is below 1.
    """

    def __init__(
        self,
        task: SingleTask,
        partitioner: Partitioner,
        dataset: BaseInput | None,
        name: str,
        folder: epath.Path | None = None,
        *,
        interval_steps: int | None = None,
    ) -> None:
        """Store the arguments."""
        if interval_steps is not None and interval_steps < 1:
            raise UsageError(
                owner=name,
                field="interval_steps",
                value=interval_steps,
                expected="a positive integer",
            )
        self.task = task
        self.partitioner = partitioner
        self.dataset = dataset
        self.name = name
        self.folder = folder
        self.interval_steps = interval_steps
        self.metrics: dict[str, float] = {}
        self._has_reported_casts = False

    def run(self, state: TrainState, step: int, observers: Observer) -> Any:
        """Run on the state after `step` steps. Every process calls it.

        Args:
          state: State to read. The next training step deletes its buffers.
          step: Number of completed steps.
          observers: Observers of the job.

        Returns:
          For an evaluation, metrics by name, equal on all processes; early stopping and
          `save_best_metric` refer to them as `NAME/METRIC`. For a decoding, a list of records.
        """
        raise NotImplementedError(f"{type(self).__qualname__} must define run")

    def report_casts(self, batch: NestedMap, observers: Observer) -> None:
        """Report, once, which fields of a host-local batch JAX converts to floats of fewer bits."""
        if not self._has_reported_casts and (casts := cast_text(batch)):
            observers.message(f"{self.name}: cast {casts}")
        self._has_reported_casts = True

    def trace(self, abstract_state: TrainState) -> set[str] | None:
        """Trace the program on its first batch, to find errors before the first step.

        Nothing is computed on the devices, and the input position does not change.

        Args:
          abstract_state: Shapes, dtypes and shardings of the state on the devices.

        Returns:
          Names of the metrics that an evaluation reports; None if they are unknown until it runs.
        """
        return None
