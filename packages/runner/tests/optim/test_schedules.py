"""Learning-rate schedules against values computed by hand."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from layerkit.errors import ConfigError
from layerkit_runner.optim.schedules import (
    cycle,
    linear_warmup_cosine_decay,
    linear_warmup_exponential_decay,
    linear_warmup_polynomial_decay,
    linear_warmup_sqrt_decay,
    piecewise_constant,
    sqrt_decay,
    staged,
    transformer,
)

STEPS = {"warmup_steps": 100, "decay_start": 200, "decay_end": 300}


def cosine(peak: float = 1.0, **fields: Any) -> Any:
    return linear_warmup_cosine_decay(peak, **{**STEPS, "min_ratio": 0.01, **fields})


def polynomial(peak: float = 2.0, **fields: Any) -> Any:
    return linear_warmup_polynomial_decay(peak, **{**STEPS, "min_ratio": 0.1, **fields})


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        # Pax's LinearRampupCosineDecay example: the cosine's middle is (1 + 0.01) / 2.
        (cosine(), {0: 0.0, 1: 0.01, 50: 0.5, 100: 1.0, 150: 1.0, 200: 1.0, 250: 0.505}),
        (cosine(), {225: 0.01 + 0.99 * (1 + math.cos(math.pi / 4)) / 2, 300: 0.01, 10_000: 0.01}),
        (cosine(3.0, min_ratio=0), {7: 0.21, 120: 3.0, 250: 1.5, 300: 0.0, 400: 0.0}),
        (
            linear_warmup_exponential_decay(
                2.5, warmup_steps=4000, decay_start=4001, decay_end=300_000, min_ratio=0.1
            ),
            # 4001 → 300000 falls to a tenth: halfway, in the geometric sense, at √0.1.
            {0: 0.0, 2000: 1.25, 4000: 2.5, 4001: 2.5, 4001 + 295_999 / 2: 2.5 * math.sqrt(0.1)}
            | {300_000: 0.25, 10**6: 0.25},
        ),
        (polynomial(), {0: 0.0, 50: 1.0, 100: 2.0, 200: 2.0, 225: 1.55, 300: 0.2, 999: 0.2}),
        (polynomial(power=2.0), {250: 0.2 + 1.8 / 4}),
        (polynomial(power=0.5), {275: 0.2 + 0.9}),
        (
            linear_warmup_sqrt_decay(3.0, warmup_steps=100),
            {0: 0.03, 1: 0.03, 100: 3.0, 400: 1.5, 2500: 0.6},
        ),
        (
            # Warmup, constant, 1 - √u to a tenth, a jump, and half a cosine back.
            staged(
                2.0,
                boundaries=[100, 200, 300, 400, 500],
                ratios=[1.0, 1.0, 0.1, 0.5, 1.0],
                shapes=["linear", "linear", "sqrt", "constant", "cosine"],
            ),
            {0: 0.0, 25: 0.5, 100: 2.0, 200: 2.0, 225: 1.1, 300: 1.0, 399: 1.0}
            | {425: 1 + (1 - math.cos(math.pi / 4)) / 2, 450: 1.5, 500: 2.0, 900: 2.0},
        ),
    ],
)
def test_schedule_equals_its_formula(schedule: Any, rates: dict[float, float]):
    result = [schedule(step) for step in rates]
    np.testing.assert_allclose(result, list(rates.values()), rtol=1e-6, atol=1e-8)


# The first two are those of Pax for the sizes of the paper.
@pytest.mark.parametrize(
    ("step", "rate"), [(0, 1.74693e-7), (4000, 6.98684e-4), (3999, (512 * 4000) ** -0.5)]
)
def test_transformer_schedule_has_the_published_values(step: int, rate: float):
    schedule = transformer(warmup_steps=4000, model_dims=512)
    assert float(schedule(step)) == pytest.approx(rate, rel=2e-6)
    doubled = transformer(warmup_steps=4000, model_dims=512, scale=2.0)
    assert float(doubled(step)) == pytest.approx(2 * rate, rel=2e-6)


@pytest.mark.parametrize("steps", [(-1, 5, 10), (6, 5, 10), (5, 10, 10)])
def test_steps_out_of_order_are_an_error(raises, steps: tuple[int, int, int]):
    names = ("warmup_steps", "decay_start", "decay_end")
    with raises(ConfigError, value=steps):
        linear_warmup_cosine_decay(1.0, **dict(zip(names, steps, strict=True)))


@pytest.mark.parametrize(
    "schedule",
    [linear_warmup_cosine_decay, linear_warmup_exponential_decay, linear_warmup_polynomial_decay],
)
@pytest.mark.parametrize("decay_start", [0, 5])
def test_without_warmup_the_rate_starts_at_its_peak(schedule: Any, decay_start: int):
    rates = schedule(2.0, warmup_steps=0, decay_start=decay_start, decay_end=10, min_ratio=0.1)
    assert [float(rates(step)) for step in (0, decay_start)] == [2.0, 2.0]
    warmed = schedule(2.0, warmup_steps=1, decay_start=5, decay_end=10, min_ratio=0.1)
    if decay_start == 5:
        np.testing.assert_allclose(
            [rates(step) for step in range(1, 12)], [warmed(step) for step in range(1, 12)]
        )
    assert float(rates(decay_start + 1)) < 2.0
    assert float(rates(10)) == pytest.approx(0.2)
    assert float(jax.jit(rates)(jnp.int32(0))) == 2.0


# The values of paxml 1.4.0's LinearRampupPolynomialDecay with max=2 at the steps of `_PAX_STEPS`.
_PAX_STEPS = [0, 50, 100, 200, 225, 250, 290, 300, 999]
_PAX_RATES = {
    2: [0.0, 1.0, 2.0, 2.0, 1.8875, 1.55, 0.542, 0.2, 0.2],
    3: [0.0, 1.0, 2.0, 2.0, 1.971875, 1.775, 0.6878, 0.2, 0.2],
}


@pytest.mark.parametrize("power", _PAX_RATES)
def test_polynomial_decay_from_the_start_equals_that_of_pax(power: int):
    schedule = polynomial(power=power, origin="start")
    np.testing.assert_allclose(
        jax.vmap(schedule)(jnp.array(_PAX_STEPS)), _PAX_RATES[power], rtol=1e-6
    )
    assert float(polynomial(power=power)(250)) < float(schedule(250))


# Pax's SqrtDecay(decay_start=100, multiplier=30, offset=20), whose peak is 30 / √100.
@pytest.mark.parametrize(
    ("step", "rate"), [(0, 3.0), (119, 3.0), (120, 3.0), (420, 1.5), (2520, 0.6)]
)
def test_square_root_decay_after_a_constant_part(step: int, rate: float):
    schedule = sqrt_decay(3.0, decay_start=100, offset=20)
    assert float(schedule(step)) == pytest.approx(rate, rel=1e-6)


def test_piecewise_constant_changes_at_its_boundaries():
    schedule = piecewise_constant(boundaries=[3, 5], values=[1.0, 0.5, 0.0])
    steps = jnp.arange(7)
    expected = [1.0, 1.0, 1.0, 0.5, 0.5, 0.0, 0.0]
    np.testing.assert_array_equal(jax.vmap(schedule)(steps), expected)
    np.testing.assert_array_equal([schedule(int(step)) for step in steps], expected)


def test_cycle_begins_again_after_its_last_boundary():
    falling = optax.linear_schedule(1.0, 0.0, 2)
    schedule = cycle([falling, optax.constant_schedule(7.0)], boundaries=[2, 3])
    expected = [1.0, 0.5, 7.0] * 3
    np.testing.assert_array_equal(jax.vmap(schedule)(jnp.arange(9)), expected)


def test_cycle_of_schedules_that_count_all_steps_equals_that_of_pax():
    parts = [
        optax.linear_schedule(1.0, 0.0, 10),
        optax.constant_schedule(7.0),
        optax.linear_schedule(0.0, 2.0, 20),
    ]
    schedule = cycle(parts, boundaries=[2, 3, 5], counts_all_steps=True)
    # CycleSchedule.value_at of Praxis 1.4.0 with steps=[2, 1, 2] and the same parts.
    expected = [1.0, 0.9, 7.0, 0.3, 0.4, 0.5, 0.4, 7.0, 0.8, 0.9, 0.0, 0.0]
    np.testing.assert_allclose(jax.vmap(schedule)(jnp.arange(12)), expected, rtol=1e-6, atol=1e-7)
