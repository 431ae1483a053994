"""EvalProgram: the metrics of a model over one held-out data set."""

from __future__ import annotations

import collections

from layerkit.base_model import Metrics
from layerkit_inputs.base_input import BaseInput
from layerkit_runner.metrics import MeanOverBatches
from layerkit_runner.observers import Observer
from layerkit_runner.partitioning import Partitioner
from layerkit_runner.task import SingleTask
from layerkit_runner.train_state import TrainState


class EvalProgram:
    """Evaluates one data set.

    Args:
      task: The task, bound to the partitioner.
      partitioner: Started.
      dataset: Held-out batches; how many one evaluation takes is the input's own affair.
      name: What the data set is called in outputs.
    """

    def __init__(self, task: SingleTask, partitioner: Partitioner, dataset: BaseInput, name: str):
        self._partitioner = partitioner
        self._max_inflight = task.train.max_inflight_steps
        self._step = partitioner.eval_step_fn(task)
        self.dataset = dataset
        self.name = name

    def run(self, state: TrainState, step: int, observers: Observer) -> dict[str, float]:
        """Evaluates the weights after `step` steps, and reports and returns the means.

        Raises:
          ValueError: the data set is empty.
        """
        mean = MeanOverBatches()
        pending: collections.deque[Metrics] = collections.deque()
        for batch in self.dataset.eval_batches():
            pending.append(self._step(state, self._partitioner.put_batch(batch)))
            if len(pending) > self._max_inflight:
                mean.add(pending.popleft())
        while pending:
            mean.add(pending.popleft())
        means = mean.means()
        if not means:
            raise ValueError(f"the data set {self.name!r} has no batches to evaluate")
        observers.eval_metrics(step, self.name, means)
        return means
