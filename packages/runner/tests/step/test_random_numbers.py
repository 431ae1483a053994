"""The generator of random numbers is part of the configuration of a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from layerkit.config.nested_map import NestedMap
from layerkit_runner.config.flags import parse_flags
from layerkit_runner.errors import UsageError
from layerkit_runner.step.metrics import GLOBAL_BATCH

ROWS = NestedMap(x=jnp.ones((64, 2)), y=jnp.zeros(64), weights=jnp.ones(64))


@pytest.mark.parametrize(
    "impl",
    [
        pytest.param("threefry2x32", marks=pytest.mark.slow),
        "rbg",
        pytest.param("unsafe_rbg", marks=pytest.mark.slow),
    ],
)
def test_steps_draw_from_the_generator_of_the_task(tiny: SimpleNamespace, impl: str):
    def loss(step: int, **train: Any) -> float:
        task = tiny.task_config(dropout_rate=0.5, train=train).Instantiate()
        state = task.init_state(task.first_key()).replace(step=jnp.int32(step))
        step = jax.jit(task.train_step, static_argnums=2)
        _, (metrics, _) = step(state, ROWS, GLOBAL_BATCH)
        return float(metrics["loss"].value)

    ours, plain = loss(3, prng_impl=impl), loss(3)
    assert ours == loss(3, prng_impl=impl) != loss(4, prng_impl=impl)
    assert (ours == plain) == (impl == "threefry2x32")


def test_flag_of_pax_is_an_error_that_names_the_field(raises):
    with raises(UsageError, value="--globally_use_hardware_rng"):
        parse_flags(["--exp=x", "--job_log_dir=d", "--globally_use_hardware_rng"])
