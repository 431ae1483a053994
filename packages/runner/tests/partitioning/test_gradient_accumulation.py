"""Gradients added up over microbatches are those of the whole batch, however it is spread."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from layerkit.config.nested_map import NestedMap
from layerkit.layers.basic.dots import replace_dots
from layerkit.layers.quantization.fp8 import Fp8Dot

MESH = [2, 2, 2]


def batch_of_32() -> NestedMap:
    """The second of four microbatches (rows 1, 5, …) has no weight, nor has the third shard."""
    rng = np.random.default_rng(1)
    weights = rng.uniform(0, 3, size=32)
    weights[1::4] = 0.0
    weights[8:12] = 0.0
    return NestedMap(x=rng.normal(size=(32, 8)), weights=weights).transform(np.float32)


def task_of(arrangements: Any, microbatches: int, *, fp8: bool = False) -> Any:
    model = arrangements.Hidden.HParams.config()
    if fp8:
        model = replace_dots(model, Fp8Dot.HParams.config(amax_history_length=3))
    task = arrangements.sgd_task(model)
    task.train.gradient_accumulation_steps = microbatches
    return task


@pytest.mark.parametrize("shape", [MESH, None], ids=["2 x 2 x 2", "pmap"])
def test_accumulated_step_equals_that_of_the_whole_batch(arrangements: Any, shape: Any):
    whole, step = (
        arrangements.run_step(task_of(arrangements, count), arrangements.start(mesh), batch_of_32())
        for count, mesh in ((1, arrangements.one_device), (4, shape))
    )
    assert whole.scalars["aux_loss"] > 0.1
    arrangements.assert_same_step(step, whole)


@pytest.mark.slow  # fp8 on a mesh is in test_fp8_and_adapters.py
@pytest.mark.parametrize("shape", [MESH, pytest.param(None, id="pmap")])
def test_fp8_scales_use_the_maximum_of_all_microbatches(arrangements: Any, shape: Any):
    states = []
    for microbatches in (1, 4):
        task = task_of(arrangements, microbatches, fp8=True)
        partitioner = arrangements.start(shape, task)
        state, _ = partitioner.train_step_fn(task)(
            partitioner.init_fn(task)(), partitioner.put_batch(batch_of_32())
        )
        states.append(jax.device_get(state.overwrite_with_gradient["feed_forward"]))
    whole, result = (state["linear"]["dot"] for state in states)
    for tensor in ("input", "kernel"):
        history = result[f"{tensor}_amax_history"]
        assert history.max() > 0.1
        np.testing.assert_allclose(history, whole[f"{tensor}_amax_history"], rtol=1e-5)


def test_accumulation_adds_no_communication_of_rows(arrangements: Any):
    """No rows are exchanged, and the sums of gradients are split like the weights."""
    task = task_of(arrangements, 4)
    partitioner = arrangements.start([1, 8, 1], task)
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
