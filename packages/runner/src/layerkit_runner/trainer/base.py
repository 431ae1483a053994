"""BaseProgram: what a job runs besides its training steps, such as one evaluation."""

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
    """Base of evaluations, decodings and what users add to them.

    An experiment lists programs as configs, `Config(MyProgram, name="probe", interval_steps=50)`;
    the first five arguments are given by the job.

    Args:
      task: The task, bound to the partitioner.
      partitioner: Started.
      dataset: What it reads; None for a program without data.
      name: What it is called in outputs.
      folder: Where it may keep files, in sight of every process; None keeps nothing.
      interval_steps: After every so many training steps it runs; None as often as the task says,
        `eval_interval_steps` or `decode_interval_steps`.

    Attributes:
      metrics: What a decoding reported of its last records, if anything.

    Raises:
      UsageError: an interval below 1.
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
        """Runs with the state after `step` steps; called by every process.

        Args:
          state: Not to be kept: the next training step consumes it.
          step: Completed steps.
          observers: Whom to report to.

        Returns:
          Of an evaluation, metrics by name, equal on all processes; early stopping and the choice
          of the best checkpoint know them as `NAME/METRIC`. Of a decoding, a list of records.
        """
        raise NotImplementedError(f"{type(self).__qualname__} must define run")

    def report_casts(self, batch: NestedMap, observers: Observer) -> None:
        """Report, once, which fields of a host-local batch JAX converts to floats of fewer bits."""
        if not self._told_of_casts and (casts := cast_text(batch)):
            observers.message(f"{self.name}: cast {casts}")
        self._told_of_casts = True

    def metric_names(self, abstract_state: TrainState) -> set[str] | None:
        """Names of the metrics that an evaluation reports, told without running it.

        Args:
          abstract_state: Shapes, dtypes and shardings of the state.

        Returns:
          None where only running it tells.
        """
        return None
