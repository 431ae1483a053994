"""A loss that is a weighted sum of metrics, each with a weight of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.base_model import WeightedScalar
from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError
from layerkit_runner.step.gradients import LossAggregator, MultiLossAggregator
from layerkit_runner.step.metrics import GLOBAL_BATCH, OverBatches
from layerkit_runner.step.task_metrics import Mean


@pytest.fixture
def two_metrics(tiny: SimpleNamespace) -> Any:
    """The config of a task with the metrics `error`, a mean of rows, and `size`, of entries."""

    class TwoMetrics(tiny.Regression):
        def compute_loss(self, predictions: jax.Array, batch: Any) -> Any:
            metrics, outputs = super().compute_loss(predictions, batch)
            rows = jnp.float32(2 * len(predictions))
            size = WeightedScalar.of(jnp.sum(predictions) / rows, rows)
            return {"error": metrics["loss"], "size": size}, outputs

    return tiny.task_config(train={"gradient_accumulation_steps": 1}).set(
        model=TwoMetrics.HParams.config()
    )


# With w = (1, 1): predictions 3, 1, 1, so that error = (4.5·1 + 0.5·3 + 0.5·0)/4 = 1.5 with the
# gradient (6·1 + 1·3 + 0, 3·1 + 0·3 + 0)/4, and size = 5/6 with the gradient (3, 2)/6.
X = np.array([[2.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
BATCH = NestedMap(x=X, y=np.zeros(3), weights=np.array([1.0, 3.0, 0.0])).transform(np.float32)
ERROR, SIZE = np.array([9, 3]) / 4, np.array([3, 2]) / 6


@pytest.mark.parametrize("microbatches", [1, 3])
def test_weighted_loss_and_its_gradient(two_metrics: Any, microbatches: int):
    two_metrics.set(loss_weights={"error": 2.0, "size": -0.5})
    two_metrics.train.gradient_accumulation_steps = microbatches
    task = two_metrics.Instantiate()
    state = task.init_state(jax.random.key(0))
    after, (metrics, _) = task.train_step(state, BATCH, GLOBAL_BATCH)
    assert float(metrics["loss"].value) == pytest.approx(2 * 1.5 - 0.5 * 5 / 6)
    assert float(metrics["loss"].weight) == 4.0
    np.testing.assert_allclose(
        after.params["linear"]["w"][:, 0], 1 - (2 * ERROR - 0.5 * SIZE), rtol=1e-6
    )
    evaluated = task.eval_step(state, BATCH, GLOBAL_BATCH)[0]
    assert float(evaluated["loss"].value) == pytest.approx(float(metrics["loss"].value))


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("fields", ["loss_weights", "loss_aggregator"])
def test_evaluated_loss_does_not_depend_on_the_batch_size(two_metrics: Any, fields: str, rows: int):
    keys = {"error": 1.0, "size": 1.0}
    aggregator = MultiLossAggregator.HParams.config(loss_keys=[*keys])
    two_metrics.set(**{fields: keys if fields == "loss_weights" else aggregator})
    two_metrics.set(metrics={"same": Mean.HParams.config(value="metrics/loss")})
    task = two_metrics.Instantiate()
    state, reported = task.init_state(jax.random.key(0)), OverBatches()
    for start in range(0, 3, rows):
        # The weights of a batch are [1, 3, 0] for error, and 2 for each row of size.
        part = jax.tree.map(lambda x, start=start: x[start : start + rows], BATCH)
        reported.add(task.eval_step(state, part, GLOBAL_BATCH)[0])
    for name in ("loss", "same"):
        assert reported.means()[name] == pytest.approx(1.5 + 5 / 6)
    assert reported.weight("loss") == 4.0


def test_losses_of_aggregators_and_their_gradients(two_metrics: Any):
    for aggregator, loss, gradient in (
        (LossAggregator.HParams.config(loss_key="size"), 5 / 6, SIZE),
        (
            MultiLossAggregator.HParams.config(loss_keys=["error", "size"]),
            1.5 + 5 / 6,
            ERROR + SIZE,
        ),
    ):
        task = two_metrics.set(loss_aggregator=aggregator).Instantiate()
        state = task.init_state(jax.random.key(0))
        after, (metrics, _) = task.train_step(state, BATCH, GLOBAL_BATCH)
        assert float(metrics[task.loss_name].value) == pytest.approx(loss)
        np.testing.assert_allclose(after.params["linear"]["w"][:, 0], 1 - gradient, rtol=1e-6)


def test_aggregator_and_weights_contradict_each_other(raises, two_metrics: Any):
    aggregator = LossAggregator.HParams.config(loss_key="size")
    with raises(ConfigError, owner="task", field="loss_weights"):
        two_metrics.set(loss_aggregator=aggregator, loss_weights={"size": 1.0}).Instantiate()


def test_loss_weight_of_no_metric_of_the_model_is_an_error(raises, two_metrics: Any):
    task = two_metrics.set(loss_weights={"error": 1.0, "sizes": 1.0}).Instantiate()
    with raises(ConfigError, field="task.loss_weights", value="sizes"):
        task.train_step(task.init_state(jax.random.key(0)), BATCH, GLOBAL_BATCH)
