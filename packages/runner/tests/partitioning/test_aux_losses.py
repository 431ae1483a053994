"""Auxiliary losses are those of the whole batch, however its tokens are split."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.base_model import BaseModel, Metrics, WeightedScalar
from layerkit.config import sub_config_field
from layerkit.config.nested_map import NestedMap
from layerkit.layers import MoeFeedForward, TopKRouter
from layerkit.ops.losses.softmax import weighted_mean
from layerkit_runner.step.metrics import GLOBAL_BATCH, OverBatches

ROWS, LENGTH, DIMS, RATE = 32, 4, 4, 0.25
RNG = np.random.default_rng(0)
LENGTHS = np.arange(ROWS) % 4 * (np.arange(ROWS) % 8 != 5) + (np.arange(ROWS) >= 16)
BATCH = NestedMap(
    x=RNG.normal(size=(ROWS, LENGTH, DIMS)).astype(np.float32),
    is_token=np.arange(LENGTH) < LENGTHS[:, None],
)


class Experts(BaseModel):
    """Experts whose outputs tend to 1, and to 0 by an auxiliary loss of its own."""

    moe_tpl: Any = sub_config_field(
        MoeFeedForward.HParams,
        input_dims=DIMS,
        hidden_dims=4,
        num_experts=4,
        load_balance_weight=1.0,
        router_z_weight=1.0,
        router_tpl=TopKRouter.HParams.config(use_score_bias=True, score_bias_rate=RATE),
    )

    def setup(self) -> None:
        self.create_child("moe", self.moe_tpl)

    def compute_predictions(self, batch: NestedMap) -> jax.Array:
        output = self.moe(batch.x, is_token=batch.is_token)
        is_token = batch.is_token[..., None].astype(jnp.float32)
        size = weighted_mean(jnp.square(output), jnp.broadcast_to(is_token, output.shape))
        self.add_aux_loss("size", size, weight=jnp.sum(is_token))
        return output

    def compute_loss(self, predictions: jax.Array, batch: NestedMap) -> tuple[Metrics, NestedMap]:
        weights = batch.is_token.astype(jnp.float32)
        errors = jnp.mean(jnp.square(predictions - 1.0), axis=-1)
        total = jnp.sum(weights)
        return {"loss": WeightedScalar.of(weighted_mean(errors, weights), total)}, NestedMap()


def task_of(arrangements: Any, microbatches: int = 1, **moe: Any) -> Any:
    model = Experts.HParams.config()
    model.moe_tpl.set(**moe)
    task = arrangements.sgd_task(model)
    task.train.gradient_accumulation_steps = microbatches
    task.train.exact_aux_losses = microbatches > 1
    return task


def step_of(arrangements: Any, shape: Any, task: Any) -> tuple[Any, Any]:
    """Return (gradients and metrics, biases of the router) of one step."""
    partitioner = arrangements.start(shape)
    step = arrangements.run_step(task, partitioner, BATCH)
    state, _ = partitioner.train_step_fn(task)(
        partitioner.init_fn(task)(), partitioner.put_batch(BATCH)
    )
    # Summaries of parts are averaged.
    step.scalars = {k: v for k, v in step.scalars.items() if not k.startswith("summaries/")}
    return step, jax.device_get(state.non_trainable["moe"]["router"]["score_bias"])


@pytest.mark.parametrize(
    ("shape", "microbatches", "moe"),
    [
        ([1, 1, 1], 4, {}),
        pytest.param(
            *([1, 1, 1], 4, {"capacity_factor": 4.0, "balance_per_group": True}),
            marks=pytest.mark.slow,
        ),
        pytest.param(None, 1, {}, marks=pytest.mark.slow),
        pytest.param(None, 4, {}, marks=pytest.mark.slow),
        pytest.param([2, 2, 2], 4, {}, marks=pytest.mark.slow),
    ],
)
def test_step_equals_that_of_the_whole_batch(
    arrangements: Any, shape: Any, microbatches: int, moe: dict[str, Any]
):
    whole, bias = step_of(arrangements, [1, 1, 1], task_of(arrangements, **moe))
    step, own_bias = step_of(arrangements, shape, task_of(arrangements, microbatches, **moe))
    arrangements.assert_same_step(step, whole)
    # The sign of the load of the whole batch moves the bias once.
    assert {*np.abs(bias)} <= {0.0, RATE} and np.any(bias)
    np.testing.assert_allclose(own_bias, bias, atol=1e-6)


def test_means_over_tokens_are_exact_without_a_second_forward_pass(
    arrangements: Any, caplog: pytest.LogCaptureFixture
):
    task, parts = (task_of(arrangements, n, load_balance_weight=0.0) for n in (1, 4))
    parts.train.exact_aux_losses = False
    with caplog.at_level(logging.INFO, "layerkit"):
        whole, step = (
            arrangements.run_step(each, arrangements.start([1, 1, 1]), BATCH)
            for each in (task, parts)
        )
    assert "microbatch" not in caplog.text  # Nothing differs, the bias of the router included.
    arrangements.assert_close(step.scalars["aux_loss"], whole.scalars["aux_loss"])
    for name, gradient in whole.gradients.items():
        arrangements.assert_close(step.gradients[name], gradient, name=name)


def test_evaluated_loss_does_not_depend_on_the_batches(arrangements: Any):
    task = task_of(arrangements)
    state = task.init_state(jax.random.key(0))
    evaluate = jax.jit(lambda rows: task.eval_step(state, rows, GLOBAL_BATCH)[0])
    losses = []
    for size in (32, 8, 2):
        reported = OverBatches()
        for start in range(0, ROWS, size):
            rows = jax.tree.map(lambda x, start=start, n=size: x[start : start + n], BATCH)
            reported.add(evaluate(rows))
        losses.append(reported.means()["loss"])
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)
