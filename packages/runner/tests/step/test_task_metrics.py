"""Metrics of a task against NumPy: on every mesh, for any microbatches, over steps and batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.step_reports import Summary
from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError
from layerkit_inputs.base.indexed_input import IndexedInput
from layerkit_runner.data.host_inputs import make_input
from layerkit_runner.observers import Observer
from layerkit_runner.run.programs.eval_program import EvalProgram
from layerkit_runner.step.metrics import OverBatches
from layerkit_runner.step.task_metrics import Composite, Histogram, Max, Mean, step_metrics

METRICS = {
    "mean": Mean.HParams.config(value="outputs/errors"),
    "weighted": Mean.HParams.config(value="outputs/errors", weight="batch/weights"),
    "x": Composite.HParams.config(
        parts={
            "max": Max.HParams.config(value="batch/x", weight="batch/weights"),
            "spread": Histogram.HParams.config(value="batch/x", low=-1.0, high=2.0, num_bins=6),
        }
    ),
    "worst_loss": Max.HParams.config(value="metrics/loss"),
    "worst_norm": Max.HParams.config(value="scalars/learning/raw_grad_norm"),
    "smooth_loss": Mean.HParams.config(value="metrics/loss"),
}


def batch_of(seed: int, rows: int = 16) -> NestedMap:
    rng = np.random.default_rng(seed)
    weights = rng.uniform(0, 2, rows) * (rng.uniform(size=rows) < 0.6)
    weights[:2] = 0.0  # the whole share of a device
    return NestedMap(x=rng.normal(size=(rows, 2)), y=rng.normal(size=rows), weights=weights)


def expected(batches: list[NestedMap]) -> dict[str, Any]:
    """With w = (1, 1)."""
    x, y, weights = (np.concatenate([b[name] for b in batches]) for name in ("x", "y", "weights"))
    errors = 0.5 * np.square(x.sum(1) - y)
    losses = [np.average(0.5 * np.square(b.x.sum(1) - b.y), weights=b.weights) for b in batches]
    return {
        "mean": errors.mean(),
        "weighted": np.average(errors, weights=weights),
        "x/max": x[weights > 0].max(),
        "worst_loss": max(losses),
        "smooth_loss": np.average(losses, weights=[b.weights.sum() for b in batches]),
    }


@pytest.mark.parametrize(
    ("kind", "microbatches"),
    [
        pytest.param("one device", 1, marks=pytest.mark.slow),
        ("mesh", 1),
        pytest.param("mesh", 2, marks=pytest.mark.slow),
        pytest.param("pmap", 1, marks=pytest.mark.slow),
        ("pmap", 2),
    ],
)
def test_metrics_over_the_rows_of_two_steps(
    tiny: SimpleNamespace, start: Any, kind: str, microbatches: int
):
    batches = [batch_of(1), batch_of(2)]
    partitioner = start(kind)
    config = tiny.task_config(
        learner={"learning_rate": 0.0}, train={"gradient_accumulation_steps": microbatches}
    )
    task = config.set(metrics=METRICS).Instantiate()
    partitioner.bind(task)
    state = partitioner.init_fn(task)()
    step, reported, norms = partitioner.train_step_fn(task), OverBatches(), []
    for batch in batches:
        placed = partitioner.put_batch(batch.transform(np.float32))
        state, (metrics, scalars) = step(state, placed)
        reported.add(metrics)
        norms.append(float(scalars["learning/raw_grad_norm"]))
    result = reported.means()
    for name, value in expected(batches).items():
        assert result[name] == pytest.approx(value, rel=1e-5), name
    assert result["worst_norm"] == pytest.approx(max(norms))
    spread = reported.histograms()["x/spread"]
    values = np.concatenate([batch.x for batch in batches])
    np.testing.assert_array_equal(
        spread.counts, np.histogram(np.clip(values, -1, 2), 6, (-1, 2))[0]
    )
    assert float(spread.sum_of_squares) == pytest.approx(np.square(values).sum(), rel=1e-5)


class Recorder(Observer):
    def __init__(self) -> None:
        self.histograms_of: dict[str, Any] = {}

    def eval_histograms(self, step: int, dataset: str, histograms: Any) -> None:
        self.histograms_of[dataset] = dict(histograms)


class Numbers(IndexedInput):
    """Row n is x = (n, 0), y = 0, weight n."""

    def _num_rows(self) -> int:
        return 11

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        x = np.stack([rows, np.zeros_like(rows)], axis=1)
        numbers = NestedMap(x=x, y=np.zeros(len(rows)), weights=rows)
        return numbers.transform(lambda array: array.astype(np.float32))


def test_metrics_over_the_batches_of_an_evaluation(tiny: SimpleNamespace, start: Any):
    """The last batch holds 5 rows of padding."""
    partitioner = start("mesh")
    task = tiny.task_config().set(metrics=METRICS).Instantiate()
    partitioner.bind(task)
    numbers = Numbers.HParams.config(percore_batch_size=1.0)
    program = EvalProgram(task, partitioner, make_input(numbers, partitioner), "numbers")
    recorder = Recorder()
    result = program.run(partitioner.init_fn(task)(), 0, recorder)
    n = np.arange(11.0)
    assert result["mean"] == pytest.approx((n**2 / 2).mean())
    assert result["weighted"] == pytest.approx(np.average(n**2 / 2, weights=n))
    assert result["x/max"] == 10.0
    assert result["smooth_loss"] == pytest.approx(result["loss"])
    # Only training steps have a gradient.
    assert "worst_norm" not in result
    assert recorder.histograms_of["numbers"]["x/spread"].counts.sum() == 2 * 11


def test_histogram_of_a_layer_is_no_scalar(raises):
    scalars = {
        "summaries/logits": Summary(None, "histogram"),
        "summaries/norm": jnp.ones((), jnp.float32),
    }
    metric = Max.HParams.config(value="scalars/summaries/logits").Instantiate()
    with raises(ConfigError, value=metric.value, choices=("scalars/summaries/norm",)):
        step_metrics({"largest": metric}, {}, scalars)


@pytest.mark.parametrize(
    ("name", "metric", "value"),
    [
        ("error", {"value": "outputs/error"}, "outputs/error"),
        ("error", {"value": "metrics/los"}, "metrics/los"),
        ("error", {"value": "loss"}, "loss"),
        ("error", {"value": "batch/y", "weight": "batch/x"}, [16, 2]),
    ],
)
def test_metric_that_does_not_suit_the_model_is_an_error(
    tiny: SimpleNamespace, start: Any, raises, name: str, metric: Any, value: Any
):
    task = tiny.task_config().set(metrics={name: Mean.HParams.config(**metric)}).Instantiate()
    partitioner = start("one device")
    partitioner.bind(task)
    state = partitioner.abstract_state(task)
    with raises(ConfigError, value=value):
        partitioner.eval_step_fn(task)(state, batch_of(0).transform(np.float32))
