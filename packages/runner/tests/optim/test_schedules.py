"""Learning-rate schedules against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from layerkit_runner.errors import UsageError
from layerkit_runner.optim.schedules import (
    cycle,
    linear_warmup_cosine_decay,
    linear_warmup_exponential_decay,
    linear_warmup_polynomial_decay,
    linear_warmup_sqrt_decay,
    piecewise_constant,
    transformer,
)

# Pax's LinearRampupCosineDecay example: the cosine's middle is (1 + 0.01) / 2.
COSINE = {"warmup_steps": 100, "decay_start": 200, "decay_end": 300, "min_ratio": 0.01}


@pytest.mark.parametrize(
    ("step", "rate"),
    [(0, 0.0), (1, 0.01), (50, 0.5), (100, 1.0), (150, 1.0), (200, 1.0), (250, 0.505)]
    + [(225, 0.01 + 0.99 * (1 + math.cos(math.pi / 4)) / 2), (300, 0.01), (10_000, 0.01)],
)
def test_cosine(step: int, rate: float):
    assert float(linear_warmup_cosine_decay(1.0, **COSINE)(step)) == pytest.approx(rate, abs=1e-6)


@pytest.mark.parametrize(
    ("step", "rate"),
    # 4001 → 300000 falls to a tenth: halfway, in the geometric sense, at √0.1.
    [(0, 0.0), (2000, 1.25e-4), (4000, 2.5e-4), (4001, 2.5e-4), (300_000, 2.5e-5)]
    + [(4001 + 295_999 / 2, 2.5e-4 * math.sqrt(0.1)), (10**6, 2.5e-5)],
)
def test_exponential(step: float, rate: float):
    schedule = linear_warmup_exponential_decay(
        2.5e-4, warmup_steps=4000, decay_start=4001, decay_end=300_000, min_ratio=0.1
    )
    assert float(schedule(step)) == pytest.approx(rate, rel=1e-5, abs=1e-12)


# The first two are those of Pax for the sizes of the paper.
@pytest.mark.parametrize(
    ("step", "rate"), [(0, 1.74693e-7), (4000, 6.98684e-4), (3999, (512 * 4000) ** -0.5)]
)
def test_transformer(step: int, rate: float):
    schedule = transformer(warmup_steps=4000, model_dims=512)
    assert float(schedule(step)) == pytest.approx(rate, rel=2e-6)
    doubled = transformer(warmup_steps=4000, model_dims=512, scale=2.0)
    assert float(doubled(step)) == pytest.approx(2 * rate, rel=2e-6)


def test_sizes_below_one_are_refused():
    with pytest.raises(UsageError, match="warmup_steps=0 must be at least 1"):
        transformer(warmup_steps=0, model_dims=512)


def test_peak_scales_everything():
    for step in (7, 120, 260, 400):
        one = linear_warmup_cosine_decay(1.0, **COSINE)(step)
        assert float(linear_warmup_cosine_decay(3.0, **COSINE)(step)) == pytest.approx(3 * one)


@pytest.mark.parametrize("schedule", [linear_warmup_cosine_decay, linear_warmup_exponential_decay])
@pytest.mark.parametrize(
    ("steps", "flags"),
    [
        ((-1, 5, 10), {"warmup_steps": 1, "decay_start": 1}),
        ((6, 5, 10), {"warmup_steps": 1, "decay_start": 1}),
        ((5, 10, 10), {"warmup_steps": 1, "decay_start": 1}),
        ((2000, 2000, 100), {"warmup_steps": 10}),
        ((5, 5, 1), {"warmup_steps": 1, "decay_end": 2}),
    ],
)
def test_steps_out_of_order_are_refused(
    schedule, steps: tuple[int, int, int], flags: dict[str, int]
):
    names = ("warmup_steps", "decay_start", "decay_end")
    given = dict(zip(names, steps, strict=True))
    with pytest.raises(UsageError) as caught:
        schedule(1.0, **given, min_ratio=0.1)
    warmup, start, end = steps
    advice = ", ".join(f"{name}={value}" for name, value in flags.items())
    assert str(caught.value) == (
        f"schedule: 0 <= warmup_steps={warmup} <= decay_start={start} < decay_end={end} does not"
        f" hold. A shorter run needs a shorter warmup, such as {advice}."
    )
    followed = dict(flags)
    if "decay_start" not in followed:  # which the recipes then take from the warmup
        followed["decay_start"] = followed["warmup_steps"]
    schedule(1.0, **{**given, **followed}, min_ratio=0.1)


@pytest.mark.parametrize(
    "schedule",
    [
        linear_warmup_cosine_decay,
        linear_warmup_exponential_decay,
        linear_warmup_polynomial_decay,
    ],
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


def test_ratios_out_of_range_are_refused():
    with pytest.raises(UsageError, match="min_ratio=0 must be above 0"):
        linear_warmup_exponential_decay(1.0, **{**COSINE, "min_ratio": 0})
    with pytest.raises(UsageError, match="min_ratio=-0.1 must be from 0 to 1"):
        linear_warmup_cosine_decay(1.0, **{**COSINE, "min_ratio": -0.1})
    assert float(linear_warmup_cosine_decay(1.0, **{**COSINE, "min_ratio": 0})(300)) == 0.0


@pytest.mark.parametrize(
    ("power", "step", "rate"),
    [(1.0, 0, 0.0), (1.0, 50, 1.0), (1.0, 100, 2.0), (1.0, 200, 2.0), (1.0, 225, 1.55)]
    + [(1.0, 300, 0.2), (1.0, 999, 0.2), (2.0, 250, 0.2 + 1.8 / 4), (0.5, 275, 0.2 + 0.9)],
)
def test_polynomial(power: float, step: int, rate: float):
    schedule = linear_warmup_polynomial_decay(2.0, **{**COSINE, "min_ratio": 0.1}, power=power)
    assert float(schedule(step)) == pytest.approx(rate, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(
    ("step", "rate"), [(0, 0.0), (1, 0.03), (100, 3.0), (400, 1.5), (2500, 0.6)]
)
def test_square_root(step: int, rate: float):
    schedule = linear_warmup_sqrt_decay(3.0, warmup_steps=100)
    assert float(schedule(step)) == pytest.approx(rate, rel=1e-6, abs=1e-12)


def test_constant_pieces():
    schedule = piecewise_constant(boundaries=[3, 5], values=[1.0, 0.5, 0.0])
    steps = jnp.arange(7)
    expected = [1.0, 1.0, 1.0, 0.5, 0.5, 0.0, 0.0]
    np.testing.assert_array_equal(jax.vmap(schedule)(steps), expected)
    np.testing.assert_array_equal([schedule(int(step)) for step in steps], expected)


def test_cycles_begin_again():
    falling = optax.linear_schedule(1.0, 0.0, 2)
    schedule = cycle([falling, optax.constant_schedule(7.0)], boundaries=[2, 3])
    expected = [1.0, 0.5, 7.0] * 3
    np.testing.assert_array_equal(jax.vmap(schedule)(jnp.arange(9)), expected)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: piecewise_constant(boundaries=[3], values=[1.0]),
            "schedule: values=(1.0,) must be one more than boundaries=(3,)",
        ),
        (
            lambda: piecewise_constant(boundaries=[3, 3], values=[1.0, 2.0, 3.0]),
            "schedule: boundaries=(3, 3) must rise from above 0",
        ),
        (
            lambda: cycle([optax.constant_schedule(1.0)], boundaries=[0]),
            "schedule: boundaries=(0,) must rise from above 0",
        ),
        (
            lambda: cycle([optax.constant_schedule(1.0)], boundaries=[2, 4]),
            "schedule: a cycle of 1 schedules needs as many boundaries, not (2, 4)",
        ),
        (
            lambda: linear_warmup_sqrt_decay(1.0, warmup_steps=0),
            "schedule: warmup_steps=0 must be at least 1",
        ),
        (
            lambda: linear_warmup_polynomial_decay(1.0, **COSINE, power=0.0),
            "schedule: power=0.0 must be above 0 and finite",
        ),
        (
            lambda: linear_warmup_polynomial_decay(1.0, **{**COSINE, "min_ratio": 2}),
            "schedule: min_ratio=2 must be from 0 to 1",
        ),
    ],
)
def test_what_makes_no_schedule_is_refused(make: Any, text: str):
    with pytest.raises(UsageError) as caught:
        make()
    assert str(caught.value) == text
