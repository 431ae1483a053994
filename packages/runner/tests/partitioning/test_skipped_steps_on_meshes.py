"""Labels outside the vocabulary: found at their step on every mesh, and the step is skipped."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest

from layerkit.config import Partial
from layerkit.layers.basic.dots import replace_dots
from layerkit.layers.quantization.fp8 import Fp8Dot


@pytest.mark.slow  # test_learner_on_meshes.py skips a step
@pytest.mark.parametrize(
    ("mesh", "microbatches"), [([2, 2, 2], 2), pytest.param(None, 1, id="pmap")]
)
def test_label_outside_the_vocabulary_skips_the_step(
    arrangements: Any, mesh: list[int] | None, microbatches: int
):
    model = replace_dots(
        arrangements.language_model(), Fp8Dot.HParams.config(amax_history_length=2)
    )
    task = arrangements.sgd_task(model, optimizer=Partial(optax.adam), ema_decay=0.9)
    task.train.gradient_accumulation_steps = microbatches
    partitioner = arrangements.start(mesh, task)
    step_fn = partitioner.train_step_fn(task)
    state = partitioner.init_fn(task)()
    batch = arrangements.unequal_batch()
    row, column = np.argwhere(batch.weights > 0)[-1]
    for label, weight, is_valid in (
        (batch.labels[row, column], 1.0, True),
        (10**6, 1.0, False),
        # Where nothing counts a label may be anything.
        (10**6, 0.0, True),
    ):
        batch.labels[row, column], batch.weights[row, column] = label, weight
        before = jax.device_get(state)
        state, (metrics, scalars) = step_fn(state, partitioner.put_batch(batch))
        assert bool(scalars["learning/is_valid_step"]) is is_valid
        assert bool(np.isfinite(metrics["loss"].value)) is is_valid
        # The gradient alone would not show it.
        assert np.isfinite(scalars["learning/raw_grad_norm"])
        after = jax.device_get(state)
        assert int(after.step) == int(before.step) + 1
        same = jax.tree.map(np.array_equal, after.replace(step=0), before.replace(step=0))
        for part in (same.params, same.opt_state, same.ema, same.overwrite_with_gradient):
            assert all(jax.tree.leaves(part)) is not is_valid
