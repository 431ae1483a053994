"""Gradients added up over microbatches are those of the whole batch, however it is spread."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from layerkit.base_model import BaseModel, Metrics, WeightedScalar
from layerkit.config import sub_config_field
from layerkit.layers.linears import FeedForward
from layerkit.layers.products import with_dots
from layerkit.layers.quantization.fp8 import Fp8Dot
from layerkit.nested_map import NestedMap

SHAPES = {"2 x 2 x 2": [2, 2, 2], "pmap": None}


class Hidden(BaseModel):
    """Regression with an auxiliary loss on its hidden units."""

    feed_forward_tpl: Any = sub_config_field(FeedForward.HParams)

    def setup(self) -> None:
        self.create_child("feed_forward", self.feed_forward_tpl, input_dims=8, output_dims=16)

    def compute_predictions(self, batch: NestedMap) -> jax.Array:
        hidden = self.feed_forward(batch.x)
        self.add_aux_loss("size", 3.0 * (hidden**2).mean())
        self.add_summary("size", (hidden**2).mean())
        return hidden

    def compute_loss(self, predictions: jax.Array, batch: NestedMap) -> tuple[Metrics, NestedMap]:
        errors = ((predictions - 1.0) ** 2).mean(axis=-1)
        weight = batch.weights.sum()
        loss = (errors * batch.weights).sum() / jax.numpy.maximum(weight, 1e-9)
        return {"loss": WeightedScalar.of(loss, weight)}, NestedMap()


def batch_of_32() -> NestedMap:
    """The second of four microbatches (rows 1, 5, …) has no weight, nor has the third shard."""
    rng = np.random.default_rng(1)
    weights = rng.uniform(0, 3, size=32)
    weights[1::4] = 0.0
    weights[8:12] = 0.0
    return NestedMap(x=rng.normal(size=(32, 8)), weights=weights).transform(np.float32)


def task_of(arrangements: Any, microbatches: int, *, fp8: bool = False) -> Any:
    model = Hidden.HParams.config()
    if fp8:
        model = with_dots(model, Fp8Dot.HParams.config(amax_history_length=3))
    task = arrangements.sgd_task(model)
    task.train.gradient_accumulation_steps = microbatches
    return task


@pytest.mark.parametrize("shape", SHAPES)
def test_accumulated_step_equals_that_of_the_whole_batch(arrangements: Any, shape: str):
    whole = arrangements.run_step(
        task_of(arrangements, 1), arrangements.one_device(), batch_of_32()
    )
    partitioner = arrangements.make_partitioner(SHAPES[shape])
    step = arrangements.run_step(task_of(arrangements, 4), partitioner, batch_of_32())
    assert whole.scalars["aux_loss"] > 0.1
    arrangements.assert_same_step(step, whole)


@pytest.mark.parametrize("shape", ["2 x 2 x 2", pytest.param("pmap", marks=pytest.mark.slow)])
def test_fp8_scales_use_the_maximum_of_all_microbatches(arrangements: Any, shape: str):
    states = []
    for microbatches in (1, 4):
        partitioner = arrangements.make_partitioner(SHAPES[shape])
        task = task_of(arrangements, microbatches, fp8=True)
        partitioner.bind(task)
        state, _ = partitioner.train_step_fn(task)(
            partitioner.init_fn(task)(), partitioner.put_batch(batch_of_32())
        )
        states.append(jax.device_get(state.overwrite_with_gradient["feed_forward"]))
    whole, found = (state["linear"]["dot"] for state in states)
    for tensor in ("input", "kernel"):
        history = found[f"{tensor}_amax_history"]
        assert history.max() > 0.1
        np.testing.assert_allclose(history, whole[f"{tensor}_amax_history"], rtol=1e-5)


def test_accumulation_adds_no_communication_of_rows(arrangements: Any):
    """No rows are exchanged, and the sums of gradients are split like the weights."""
    partitioner = arrangements.make_partitioner([1, 8, 1])
    task = task_of(arrangements, 4)
    partitioner.bind(task)
    lowered = partitioner.train_step_fn(task).lower(
        partitioner.abstract_state(task), partitioner.abstract_batch(batch_of_32())
    )
    text = lowered.compile().as_text()
    assert "all-to-all" not in text
    assert "collective-permute" not in text
    carried = [line.split(" while(")[0] for line in text.splitlines() if " while(" in line]
    # The weight [8, 16] is split eightfold along its first axis. XLA gathers it once, before the
    # loop, so one whole copy may be there, but no whole sum.
    assert any("f32[1,16]" in types for types in carried)
    assert all(types.count("f32[8,16]") <= 1 for types in carried)
