"""BaseProgram, the base of programs that run beside training, and the evaluation programs.

Metrics of an evaluation are means of what the model reports for its batches. A data set may define
further ones, computed from the model's score of each example.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from layerkit.base.base_model import WeightedScalar
from layerkit.base.step_reports import BinCounts
from layerkit.config.checks import check_sizes
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.base_input import BaseInput
from layerkit_inputs.base.evaluation import empty_batch, example_rows, num_rows_of
from layerkit_runner.data.host_inputs import (
    SKIPPED_RECORDS,
    eval_batches,
    peek_eval_batch,
    report_skipped,
)
from layerkit_runner.data.train_inputs import TrainInput
from layerkit_runner.distributed.cluster import gather_values, run_on_process_0
from layerkit_runner.errors import UsageError
from layerkit_runner.observers import TOTAL_WEIGHT, Histogram, Observer, check_scalar_names
from layerkit_runner.partitioning import Partitioner
from layerkit_runner.step.metrics import ByExample, LossSum, OverBatches, as_floats
from layerkit_runner.step.task import SingleTask
from layerkit_runner.step.train_state import TrainState


class BaseProgram:
    """A program that reads the state of a job at intervals; users may add their own.

    An experiment lists programs as configs, `Config(MyProgram, name="probe", interval_steps=50)`.
    The job passes `task`, `partitioner` and `folder`, and the data set and name of the config.

    Args:
      dataset: Input that the program reads; None for a program without data.
      folder: Folder for files of the program, visible to every process; None keeps nothing.
      interval_steps: Number of training steps between two runs of the program; None for
        `eval_interval_steps` or `decode_interval_steps` of the task.
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
        check_sizes(name, interval_steps=interval_steps)
        self.task = task
        self.partitioner = partitioner
        self.dataset = dataset
        self.name = name
        self.folder = folder
        self.interval_steps = interval_steps
        self.metrics: dict[str, float] = {}

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

    def _report(
        self, reported: OverBatches, others: Mapping[str, float], step: int, observers: Observer
    ) -> dict[str, float]:
        """Report and return the metrics over batches, their total weight and other metrics."""
        weight = reported.weight(self.task.loss_name)
        metrics = {**reported.means(), TOTAL_WEIGHT: weight, **others}
        observers.eval_metrics(step, self.name, metrics)
        if counts := reported.histograms():
            histograms = {name: Histogram.of(bins) for name, bins in counts.items()}
            observers.eval_histograms(step, self.name, histograms)
        return metrics

    def trace(self, abstract_state: TrainState) -> set[str] | None:
        """Trace the program on its first batch, to find errors before the first step.

        Nothing is computed on the devices, and the input position does not change.

        Returns:
          Names of the metrics that an evaluation reports; None if they are unknown until it runs.
        """
        return None


class EvalProgram(BaseProgram):
    """A program that evaluates one data set; see `BaseProgram` for the other arguments.

    Args:
      use_ema_states: True to evaluate the averaged weights; None for the setting of the task.
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
            expected = "False, since task.train.learner.ema_decay is not set"
            raise UsageError(owner=name, field="use_ema_states", value=True, expected=expected)
        self.use_ema_states = use_ema_states
        self._scores_examples = dataset.has_score_metrics
        self._step = partitioner.eval_step_fn(
            task, averaged=use_ema_states, with_scores=self._scores_examples
        )
        self._has_checked_padding = False

    def run(self, state: TrainState, step: int, observers: Observer) -> dict[str, float]:
        """Evaluate the weights after `step` steps; report and return the metrics.

        Metrics that the data set computes from scores are named `score/NAME`.
        """
        reported, scores = OverBatches(), ByExample[float](self.name)
        has_padding = False
        pending: collections.deque[Any] = collections.deque()

        def start(global_batch: NestedMap) -> tuple[Any, Any]:
            """Start a step; return metrics, and the scores of rows if the data set uses them."""
            outputs = self._step(state, global_batch)
            return outputs if self._scores_examples else (outputs, None)

        def collect() -> None:
            metrics, rows = pending.popleft()
            reported.add(metrics)
            if rows is not None:
                rows = jax.device_get(rows)
                scores.add(rows.provenance, rows.scores.tolist())

        for batch in eval_batches(self.dataset):
            global_batch = self.partitioner.put_batch(batch)
            is_example = example_rows(batch)
            has_padding |= is_example is not None and not is_example.all()
            pending.append(start(global_batch))
            if len(pending) > self.task.train.max_inflight_steps:
                collect()
        while pending:
            collect()
        if not reported.means():
            raise UsageError("the data set has no batches to evaluate", owner=self.name)
        if not self._has_checked_padding and any(gather_values(has_padding)):
            self._has_checked_padding = True
            padding = self.partitioner.put_batch(empty_batch(batch, num_rows_of(batch)))
            self._warn_of_padding(jax.device_get(start(padding)[0]), padding, observers)
        others: dict[str, float] = {}
        if self._scores_examples:
            metrics = run_on_process_0(lambda: as_floats(self.dataset.score_metrics(scores.values)))
            others = {f"score/{name}": value for name, value in metrics.items()}
        others |= report_skipped(self.dataset, self.name, observers)
        return self._report(reported, others, step, observers)

    def _warn_of_padding(
        self, metrics: Mapping[str, Any], padding: NestedMap, observers: Observer
    ) -> None:
        """Report metrics that count the rows of a batch of padding, which must have weight 0."""
        num_rows = num_rows_of(padding)
        names = [
            name
            for name, metric in metrics.items()
            if isinstance(metric, WeightedScalar | LossSum) and np.equal(metric.weight, num_rows)
        ]
        if names:
            model = type(self.task.model).__qualname__
            observers.message(
                f"warning: {self.name}: {', '.join(names)} counted rows of padding. Weight each row"
                f" by layerkit.models.example_weights(batch, num_rows) in {model}.compute_loss."
            )

    def trace(self, abstract_state: TrainState) -> set[str] | None:
        """Trace one step; None if `run` is overridden, or the data set uses scores."""
        if type(self).run is not EvalProgram.run:
            return None
        try:
            batch = peek_eval_batch(self.dataset)
        except StopIteration:
            return None
        abstract_batch = self.partitioner.abstract_batch(batch)
        reported = jax.eval_shape(self._step, abstract_state, abstract_batch)
        if self._scores_examples:
            return None
        return _scalar_names(reported) | {TOTAL_WEIGHT, SKIPPED_RECORDS}


class NextBatchEvalProgram(BaseProgram):
    """A program that evaluates the next training batch, used with `eval_skip_train=False`.

    The batch is that of the next training step, which trains on it afterwards.
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
        return self._report(reported, {}, step, observers)

    def trace(self, abstract_state: TrainState) -> set[str]:
        """Trace one step; see `BaseProgram.trace`."""
        # The feed would send the batch at the position before a restore.
        reported = jax.eval_shape(self._step, abstract_state, self._data.abstract_batch)
        return _scalar_names(reported) | {TOTAL_WEIGHT}


def _scalar_names(reported: Mapping[str, Any]) -> set[str]:
    """Return the names of an evaluation's scalar metrics, given the metrics of its step."""
    names = {name for name, metric in reported.items() if not isinstance(metric, BinCounts)}
    check_scalar_names(names)
    return names
