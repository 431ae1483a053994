"""BaseProgram, the base of programs that run beside training, and the evaluation programs.

An evaluation reports metrics over a held-out data set, or over the next training batch. They are
means of what the model reports for its batches. A data set may define further ones, computed from
the model's score of each example.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from layerkit.base_model import WeightedScalar
from layerkit.nested_map import NestedMap
from layerkit_inputs.base_input import BaseInput
from layerkit_inputs.eval_padding import empty_batch, example_rows, num_rows_of
from layerkit_runner.data.infeed import (
    SKIPPED_RECORDS,
    cast_text,
    eval_batches,
    peek_eval_batch,
    report_skipped,
)
from layerkit_runner.data.training_data import TrainInput
from layerkit_runner.distributed.process_exchange import from_process_0, gather_values
from layerkit_runner.errors import UsageError
from layerkit_runner.observers import TOTAL_WEIGHT, Observer
from layerkit_runner.partitioning import Partitioner
from layerkit_runner.training.metrics import (
    ByExample,
    OverBatches,
    as_floats,
    check_has_provenance,
    names_of_numbers,
)
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


_SCORE_PREFIX = "score/"


class EvalProgram(BaseProgram):
    """A program that evaluates one data set.

    Args:
      task: Task, bound to the partitioner.
      partitioner: Started partitioner.
      dataset: Held-out input, which determines the number of batches of one evaluation.
      name: Name of the evaluation in outputs.
      folder: Unused.
      interval_steps: See `BaseProgram`.
      use_ema_states: True to evaluate the averaged weights; None for the setting of the task.

    Raises:
      UsageError: `use_ema_states` is set and the task keeps no averaged weights, or
        `interval_steps` is below 1.
    """

    dataset: BaseInput

    def __init__(
        self,
        task: SingleTask,
        partitioner: Partitioner,
        dataset: BaseInput,
        name: str,
        folder: epath.Path | None = None,
        *,
        interval_steps: int | None = None,
        use_ema_states: bool | None = None,
    ) -> None:
        """Build the evaluation step."""
        super().__init__(task, partitioner, dataset, name, folder, interval_steps=interval_steps)
        if use_ema_states and task.train.learner.ema_decay is None:
            raise UsageError(
                "the task keeps no averaged weights",
                owner=name,
                field="use_ema_states",
                value=True,
                hint="Set task.train.learner.ema_decay, such as 0.9999.",
            )
        self.use_ema_states = use_ema_states
        self._scores_examples = dataset.has_score_metrics
        make_step = partitioner.score_step_fn if self._scores_examples else partitioner.eval_step_fn
        self._step = make_step(task, averaged=use_ema_states)
        self._has_reported_padding = False

    def run(self, state: TrainState, step: int, observers: Observer) -> dict[str, float]:
        """Evaluate the weights after `step` steps; report and return the metrics.

        Returns:
          Metrics of model and task; `total_weight`, the total weight of the loss; and metrics that
          the data set computes from scores, as `score/NAME`.

        Raises:
          UsageError: The data set is empty or cannot be read, or an example that needs a score
            occurs twice.
        """
        reported, scores = OverBatches(), ByExample[float](self.name)
        padding = PaddingCheck(self.dataset)
        pending: collections.deque[Any] = collections.deque()

        def collect() -> None:
            metrics, rows = pending.popleft()
            reported.add(metrics)
            if rows is not None:
                rows = jax.device_get(rows)
                scores.add(rows.provenance, rows.scores.tolist())

        for batch in eval_batches(self.dataset):
            self.report_casts(batch, observers)
            global_batch = self._put(batch)
            padding.add(batch, global_rows=jax.tree.leaves(global_batch)[0].shape[0])
            pending.append(self._start(state, global_batch))
            if len(pending) > self.task.train.max_inflight_steps:
                collect()
        while pending:
            collect()
        metrics = reported.means()
        if not metrics:
            raise UsageError("the data set has no batches to evaluate", owner=self.name)
        self._report_padding(padding, reported, state, observers)
        metrics[TOTAL_WEIGHT] = reported.weight(self.task.loss_name)
        if self._scores_examples:
            own = from_process_0(lambda: as_floats(self.dataset.score_metrics(scores.values)))
            metrics |= {f"{_SCORE_PREFIX}{name}": value for name, value in own.items()}
        metrics |= report_skipped(self.dataset, self.name, observers)
        observers.eval_metrics(step, self.name, metrics)
        if histograms := reported.histograms():
            observers.eval_histograms(step, self.name, histograms)
        return metrics

    def trace(self, abstract_state: TrainState) -> set[str] | None:
        """Trace one step on the first batch; see `BaseProgram.trace`.

        Returns:
          None if a derived class overrides `run`, or the data set has ended or uses scores.
        """
        if type(self).run is not EvalProgram.run:
            return None
        try:
            batch = peek_eval_batch(self.dataset)
        except StopIteration:
            return None
        if self._scores_examples:
            check_has_provenance(batch, self.name)
        abstract_batch = self.partitioner.abstract_batch(batch)
        reported = jax.eval_shape(self._step, abstract_state, abstract_batch)
        return None if self._scores_examples else names_of_numbers(reported) | {SKIPPED_RECORDS}

    def _put(self, batch: NestedMap) -> NestedMap:
        if self._scores_examples:
            check_has_provenance(batch, self.name)
        return self.partitioner.put_batch(batch)

    def _start(self, state: TrainState, global_batch: NestedMap) -> tuple[Any, Any]:
        """Start a step; return metrics, and the scores of the rows if the data set uses them."""
        found = self._step(state, global_batch)
        return found if self._scores_examples else (found, None)

    def _report_padding(
        self, padding: PaddingCheck, reported: OverBatches, state: TrainState, observers: Observer
    ) -> None:
        """Warn once about metrics that count rows of padding."""
        if self._has_reported_padding:
            return
        counted = padding.counted(
            reported.weights(), lambda batch: self._start(state, self._put(batch))[0]
        )
        if counted is None:
            return
        self._has_reported_padding = True
        names, num_rows, num_examples = counted
        model = type(self.task.model).__qualname__
        observers.message(
            f"warning: {self.name}: {', '.join(names)} counted rows of padding: total weight"
            f" {num_rows}. Expected {num_examples}, the rows that count. Weight each row by"
            f" layerkit.models.example_weights.example_weights(batch, num_rows) in"
            f" {model}.compute_loss."
        )


class NextBatchEvalProgram(BaseProgram):
    """A program that evaluates the next training batch, used with `eval_skip_train=False`.

    The difference to the held-out loss shows overfitting, since this epoch has not trained on the
    batch yet. Training reads the same batches as without this program.

    Args:
      task: Task, bound to the partitioner.
      partitioner: Started partitioner.
      data: Training data set.
    """

    def __init__(self, task: SingleTask, partitioner: Partitioner, data: TrainInput) -> None:
        """Build the evaluation step."""
        name = "train" if data.name is None else f"train/{data.name}"
        super().__init__(task, partitioner, None, name)
        self._data = data
        self._step = partitioner.eval_step_fn(task)

    def run(self, state: TrainState, step: int, observers: Observer) -> dict[str, float]:
        """Evaluate the next batch; report and return the metrics and `total_weight`."""
        reported = OverBatches()
        reported.add(self._step(state, self._data.feed.peek()))
        metrics = reported.means()
        metrics[TOTAL_WEIGHT] = reported.weight(self.task.loss_name)
        observers.eval_metrics(step, self.name, metrics)
        if histograms := reported.histograms():
            observers.eval_histograms(step, self.name, histograms)
        return metrics

    def trace(self, abstract_state: TrainState) -> set[str]:
        """Trace one step; see `BaseProgram.trace`."""
        # The feed would send the batch at the position before a restore.
        reported = jax.eval_shape(self._step, abstract_state, self._data.abstract_batch)
        return names_of_numbers(reported)


@dataclasses.dataclass
class PaddingCheck:
    """A detector of metrics that count the rows of padding.

    A metric is suspected if its weight is the number of all rows. To exclude a coincidence, the
    step then runs on a batch of padding alone, in which every metric must have weight 0.

    Attributes:
      dataset: Held-out data set.
    """

    dataset: BaseInput
    _is_marked: bool = dataclasses.field(default=True, init=False)
    _num_rows: int = dataclasses.field(default=0, init=False)
    _num_examples_here: int = dataclasses.field(default=0, init=False)
    _global_rows: int = dataclasses.field(default=0, init=False)
    _batch: NestedMap | None = dataclasses.field(default=None, init=False)

    def add(self, batch: NestedMap, *, global_rows: int) -> None:
        """Count the rows of a host-local batch, a part of a global batch of `global_rows` rows."""
        rows = example_rows(batch)
        if rows is None:
            self._is_marked = False
            return
        self._num_rows += global_rows
        self._num_examples_here += int(rows.sum())
        self._global_rows, self._batch = global_rows, batch

    def counted(
        self, weights: Mapping[str, float], evaluate: Callable[[NestedMap], Mapping[str, Any]]
    ) -> tuple[list[str], int, int] | None:
        """Return the metrics that count padding; None if there are none.

        Every process must call it with the same weights.

        Args:
          weights: Total weight of each metric over the evaluation, by name.
          evaluate: Function that returns the metrics of a global batch, given its host-local part.

        Returns:
          (names of the metrics, number of all rows, number of rows that count).
        """
        suspects = [name for name, weight in weights.items() if weight == self._num_rows]
        if not self._is_marked or self._batch is None or not suspects:
            return None
        # Hosts with the same index feed the same rows, which count once.
        hosts = gather_values([self.dataset.infeed_host_index, self._num_examples_here])
        num_examples = sum(dict(hosts).values())
        if num_examples == self._num_rows:
            return None
        padding = empty_batch(self._batch, num_rows_of(self._batch))
        metrics = jax.device_get(dict(evaluate(padding)))
        names = [
            name
            for name in suspects
            if isinstance(metrics[name], WeightedScalar)
            and np.equal(metrics[name].weight, self._global_rows)
        ]
        return (names, self._num_rows, num_examples) if names else None
