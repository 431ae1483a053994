"""A loss that is a weighted sum of metrics, each with a weight of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base_model import WeightedScalar
from layerkit.nested_map import NestedMap
from layerkit_runner.training.metrics import GLOBAL_BATCH


@pytest.fixture
def two_metrics(tiny: SimpleNamespace) -> Any:
    """Of a task whose model reports `error`, a mean over rows, and `size`, one over entries."""

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
BATCH = NestedMap(x=[[2.0, 1.0], [1.0, 0.0], [0.0, 1.0]], y=[0.0] * 3, weights=[1.0, 3.0, 0.0])
BATCH = BATCH.transform(np.float32)
ERROR, SIZE = np.array([9, 3]) / 4, np.array([3, 2]) / 6


@pytest.mark.parametrize("microbatches", [1, 3])
def test_value_and_gradient(two_metrics: Any, microbatches: int):
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
    evaluated = task.eval_step(state, BATCH, GLOBAL_BATCH)
    assert float(evaluated["loss"].value) == pytest.approx(float(metrics["loss"].value))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "task.loss_weights={}: expected a factor other than 0 for one metric at least"),
        ({"error": 0.0}, "task.loss_weights={'error': 0.0}: expected a factor other than 0"),
        (
            {"error": 1.0, "sizes": 1.0},
            "task.loss_weights='sizes' is not a metric of the model; it reports error, size",
        ),
    ],
)
def test_wrong_terms_are_refused(two_metrics: Any, fields: dict[str, float], text: str):
    def step() -> None:
        task = two_metrics.set(loss_weights=fields).Instantiate()
        task.train_step(task.init_state(jax.random.key(0)), BATCH, GLOBAL_BATCH)

    with pytest.raises(ValueError) as caught:
        step()
    assert text in str(caught.value)


def test_the_sum_needs_a_name_of_its_own(tiny: SimpleNamespace):
    task = tiny.task_config().set(loss_weights={"loss": 2.0}).Instantiate()
    with pytest.raises(ValueError) as caught:
        task.train_step(task.init_state(jax.random.key(0)), BATCH, GLOBAL_BATCH)
    assert str(caught.value) == (
        "task.loss_name='loss' is to be the sum of loss, but the model reports that already; choose"
        " another name"
    )
