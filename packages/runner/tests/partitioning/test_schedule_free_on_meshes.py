"""Schedule-free averages are evaluated on every mesh, from what inference keeps of a state."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from optax import contrib


def evaluated(arrangements: Any, partitioner: Any) -> tuple[float, float]:
    """Losses of a batch after three steps: at the averages, and at the weights that are trained."""
    task = arrangements.sgd_task(
        arrangements.language_model(),
        optimizer=contrib.schedule_free_adamw(0.01),
        learning_rate=None,
    )
    partitioner.bind(task)
    step_fn, eval_fn = partitioner.train_step_fn(task), partitioner.eval_step_fn(task)
    state = partitioner.init_fn(task)()
    batch = partitioner.put_batch(arrangements.unequal_batch())
    for _ in range(3):
        state, _ = step_fn(state, batch)
    found = float(eval_fn(state.for_inference(), batch)["loss"].value)
    _, (metrics, _) = step_fn(state, batch)
    return found, float(metrics["loss"].value)


@pytest.mark.parametrize("mesh", [[2, 2, 2], pytest.param(None, id="pmap", marks=pytest.mark.slow)])
def test_evaluation_at_the_averages_equals_that_of_one_device(
    arrangements: Any, mesh: list[int] | None
):
    assert len(jax.devices()) == 8
    found = evaluated(arrangements, arrangements.make_partitioner(mesh))
    expected = evaluated(arrangements, arrangements.one_device())
    np.testing.assert_allclose(found, expected, rtol=2e-5)
    assert abs(found[0] - found[1]) > 1e-3
