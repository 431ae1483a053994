"""BaseProgram: an evaluation, a decoding or another program that runs beside training."""

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
    """Base of evaluations, decodings and programs that users add.

    An experiment lists programs as configs, `Config(MyProgram, name="probe", interval_steps=50)`.
    The job fills in the first five arguments.

    Args:
      task: Task, bound to the partitioner.
      partitioner: Started partitioner.
      dataset: Input that the program reads; None for a program without data.
      name: Name of the program in outputs.
      folder: Folder for files of the program, visible to every process; None keeps nothing.
      interval_steps: Number of training steps between two runs of the program; None for
        `eval_interval_steps` or `decode_interval_steps` of the task.

    Attributes:
      metrics: Metrics that a decoding reported of its last records.

    Raises:
      UsageError: An interval below 1.
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
        if interval_steps is not None and interval_steps < 1:
            raise UsageError(f"{name}: interval_steps={interval_steps} must be at least 1")
        self.task = task
        self.partitioner = partitioner
        self.dataset = dataset
        self.name = name
        self.folder = folder
        self.interval_steps = interval_steps
        self.metrics: dict[str, float] = {}
        self._told_of_casts = False

    def run(self, state: TrainState, step: int, observers: Observer) -> Any:
        """Run on the state after `step` steps; called by every process.

        Args:
          state: State to read. Do not keep it: the next training step consumes it.
          step: Number of completed steps.
          observers: Receiver of what the program reports.

        Returns:
          Metrics by name for an evaluation, equal on all processes; early stopping and the choice
          of the best checkpoint know them as `NAME/METRIC`. A list of records for a decoding.
        """
        raise NotImplementedError(f"{type(self).__qualname__} must define run")

    def report_casts(self, batch: NestedMap, observers: Observer) -> None:
        """Report, once, which fields of a host-local batch JAX converts to floats of fewer bits."""
        if not self._told_of_casts and (casts := cast_text(batch)):
            observers.message(f"{self.name}: cast {casts}")
        self._told_of_casts = True

    def trace(self, abstract_state: TrainState) -> set[str] | None:
        """Trace the program on its first batch, so that a mistake is found before the first step.

        Nothing is computed on the devices, and the position of the data set stays.

        Args:
          abstract_state: Shapes, dtypes and shardings of the state on the devices.

        Returns:
          Names of the metrics that an evaluation reports; None if only running it tells.
        """
        return None
