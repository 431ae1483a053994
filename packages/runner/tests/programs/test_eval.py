"""EvalProgram: means over a whole data set, whose last batch is filled up with padding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from layerkit_runner.infeed import make_input
from layerkit_runner.observers import Observer
from layerkit_runner.partitioning import Partitioner, PmapPartitioner, SpmdPartitioner
from layerkit_runner.programs import EvalProgram


class Recorder(Observer):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.evals: list[tuple[int, str, dict[str, float]]] = []

    def eval_metrics(self, step: int, dataset: str, scalars: Any) -> None:
        self.evals.append((step, dataset, dict(scalars)))


def evaluate(tiny: SimpleNamespace, partitioner: Partitioner, *, num_rows: int) -> list[Any]:
    partitioner.start()
    config = tiny.task_config()
    config.model.linear_tpl.weight_axes = (None, None)
    task = config.Instantiate()
    partitioner.bind(task)
    points = tiny.Points.HParams.config(num_rows=num_rows, percore_batch_size=1.0)
    program = EvalProgram(task, partitioner, make_input(points, partitioner), "points")
    recorder = Recorder()
    state = partitioner.init_fn(task)()
    for step in (3, 4):
        means = program.run(state, step, recorder)
        assert recorder.evals[-1] == (step, "points", means)
    return recorder.evals


@pytest.mark.parametrize("num_rows", [5, 8, 19])
@pytest.mark.parametrize("partitioner", [SpmdPartitioner, PmapPartitioner])
def test_every_row_counts_once(tiny: SimpleNamespace, partitioner: Any, num_rows: int):
    rows = np.arange(num_rows)
    losses = 0.5 * np.square(rows % 5 + 1 - rows % 3)
    for _, _, means in evaluate(tiny, partitioner(), num_rows=num_rows):
        assert means == {"loss": pytest.approx(losses.mean(), rel=1e-6)}
