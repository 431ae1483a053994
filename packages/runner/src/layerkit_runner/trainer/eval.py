"""EvalProgram: the metrics of a model over one held-out data set.

Two kinds: means of what the model reports of its batches, and, where the data set defines them,
metrics over the scores that the model gave each of its examples.
"""

from __future__ import annotations

import collections
from typing import Any

import jax
from etils import epath

from layerkit.nested_map import NestedMap
from layerkit_inputs.base_input import BaseInput
from layerkit_runner.data.infeed import eval_batches, peek_batch
from layerkit_runner.data.skipped_records import SKIPPED_RECORDS, report_skipped
from layerkit_runner.distributed.process_exchange import from_process_0
from layerkit_runner.errors import UsageError
from layerkit_runner.observers import TOTAL_WEIGHT, Observer
from layerkit_runner.partitioning import Partitioner
from layerkit_runner.trainer.base import BaseProgram
from layerkit_runner.trainer.padding_check import PaddingCheck
from layerkit_runner.training.by_example import ByExample, as_floats, check_has_provenance
from layerkit_runner.training.metrics import OverBatches, names_of_numbers
from layerkit_runner.training.task import SingleTask
from layerkit_runner.training.train_state import TrainState

SCORE_PREFIX = "score/"


class EvalProgram(BaseProgram):
    """Evaluates one data set.

    Args:
      task: The task, bound to the partitioner.
      partitioner: Started.
      dataset: Held-out batches; how many one evaluation takes is the input's own affair.
      name: What the evaluation is called in outputs.
      folder: Not used.
      interval_steps: See `BaseProgram`.
      use_ema_states: Whether the averaged weights are evaluated; None as the task says.

    Raises:
      UsageError: averaged weights of a task that keeps none, or an interval below 1.
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
        super().__init__(task, partitioner, dataset, name, folder, interval_steps=interval_steps)
        if use_ema_states and task.train.learner.ema_decay is None:
            raise UsageError(
                f"{name}: use_ema_states=True needs averaged weights; set"
                " task.train.learner.ema_decay, such as 0.9999"
            )
        self.use_ema_states = use_ema_states
        self._scores_examples = dataset.has_score_metrics
        make_step = partitioner.score_step_fn if self._scores_examples else partitioner.eval_step_fn
        self._step = make_step(task, averaged=use_ema_states)
        self._told_of_padding = False

    def run(self, state: TrainState, step: int, observers: Observer) -> dict[str, float]:
        """Evaluates the weights after `step` steps, and reports and returns the metrics.

        Returns:
          The metrics of model and task; `total_weight`, the weight behind the loss; and what the
          data set makes of the scores of its examples, under `score/…`.

        Raises:
          ValueError: the data set is empty.
          UsageError: its data cannot be read, or it names an example twice that it wants a score
            of.
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
            raise ValueError(f"the data set {self.name!r} has no batches to evaluate")
        self._report_padding(padding, reported, state, observers)
        metrics[TOTAL_WEIGHT] = reported.weight(self.task.loss_name)
        if self._scores_examples:
            own = from_process_0(lambda: as_floats(self.dataset.score_metrics(scores.values)))
            metrics |= {f"{SCORE_PREFIX}{name}": value for name, value in own.items()}
        metrics |= report_skipped(self.dataset, self.name, observers)
        observers.eval_metrics(step, self.name, metrics)
        if histograms := reported.histograms():
            observers.eval_histograms(step, self.name, histograms)
        return metrics

    def metric_names(self, abstract_state: TrainState) -> set[str] | None:
        """Of what `run` reports.

        None where a derived class has a `run` of its own, the data set is read up, or it makes
        metrics of scores.
        """
        if type(self).run is not EvalProgram.run or self._scores_examples:
            return None
        try:
            batch = self.partitioner.abstract_batch(peek_batch(self.dataset))
        except StopIteration:
            return None
        reported = jax.eval_shape(self._step, abstract_state, batch)
        return names_of_numbers(reported) | {SKIPPED_RECORDS}

    def _put(self, batch: NestedMap) -> NestedMap:
        if self._scores_examples:
            check_has_provenance(batch, self.name)
        return self.partitioner.put_batch(batch)

    def _start(self, state: TrainState, global_batch: NestedMap) -> tuple[Any, Any]:
        """Metrics of a batch and, where they are wanted, scores of its rows; not yet computed."""
        found = self._step(state, global_batch)
        return found if self._scores_examples else (found, None)

    def _report_padding(
        self, padding: PaddingCheck, reported: OverBatches, state: TrainState, observers: Observer
    ) -> None:
        """Warn, once for each data set, of metrics that count the rows of padding."""
        if self._told_of_padding:
            return
        counted = padding.counted(
            reported.weights(), lambda batch: self._start(state, self._put(batch))[0]
        )
        if counted is None:
            return
        self._told_of_padding = True
        names, num_rows, num_examples = counted
        model = type(self.task.model).__qualname__
        observers.message(
            f"warning: {self.name}: {', '.join(names)} counted rows of padding: total weight"
            f" {num_rows}. Expected {num_examples}, the rows that count. Weight each row by"
            f" layerkit.models.example_weights.example_weights(batch, num_rows) in"
            f" {model}.compute_loss."
        )
