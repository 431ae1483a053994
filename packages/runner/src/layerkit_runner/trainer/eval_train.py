"""NextBatchEvalProgram: how good the model is on the batch that it trains on next.

Beside the held-out loss it tells how much of that is overfitting: the batch was not trained on in
this epoch, but is of the data that are. Training reads the same batches as without it.
"""

from __future__ import annotations

from collections.abc import Callable

import jax

from layerkit.nested_map import NestedMap
from layerkit_runner.observers import TOTAL_WEIGHT, Observer
from layerkit_runner.partitioning import Partitioner
from layerkit_runner.trainer.base import BaseProgram
from layerkit_runner.training.metrics import OverBatches, names_of_numbers
from layerkit_runner.training.task import SingleTask
from layerkit_runner.training.train_state import TrainState

NAME = "train"
"""What it is called in outputs: `train/loss`, and the folder `summaries/eval_train`."""


def name_beside(program: str | None) -> str:
    """What the evaluation of a training program's batches is called: `train`, or `train/web`."""
    return NAME if program is None else f"{NAME}/{program}"


class NextBatchEvalProgram(BaseProgram):
    """Evaluates the next training batch, as `eval_skip_train=False` asks.

    Args:
      task: The task, bound to the partitioner.
      partitioner: Started.
      next_batch: Tells the global batch that the next training step reads.
      abstract_batch: Tells its shapes, dtypes and shardings, also before data are restored.
      name: What it is called in outputs.
    """

    def __init__(
        self,
        task: SingleTask,
        partitioner: Partitioner,
        next_batch: Callable[[], NestedMap],
        abstract_batch: Callable[[], NestedMap],
        name: str = NAME,
    ) -> None:
        super().__init__(task, partitioner, None, name)
        self._next_batch = next_batch
        self._abstract_batch = abstract_batch
        self._step = partitioner.eval_step_fn(task)

    def run(self, state: TrainState, step: int, observers: Observer) -> dict[str, float]:
        """Reports and returns the metrics of model and task, and `total_weight`."""
        reported = OverBatches()
        reported.add(self._step(state, self._next_batch()))
        metrics = reported.means()
        metrics[TOTAL_WEIGHT] = reported.weight(self.task.loss_name)
        observers.eval_metrics(step, self.name, metrics)
        if histograms := reported.histograms():
            observers.eval_histograms(step, self.name, histograms)
        return metrics

    def metric_names(self, abstract_state: TrainState) -> set[str]:
        """Of what `run` reports."""
        # Not of the next batch itself: to send it is to begin with the data where they stand now.
        return names_of_numbers(jax.eval_shape(self._step, abstract_state, self._abstract_batch()))
