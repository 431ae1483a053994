"""Learning-rate schedules that Optax does not have as a whole: `step -> learning rate`.

A linear warmup starts at 0, unless it says otherwise, so the first step changes only the
optimizer's statistics; `warmup_steps=0` starts at the peak instead. Steps out of order
and numbers out of range raise `ConfigError`. Schedules of Optax are used directly, such as
`Config(optax.linear_schedule, 0.0, 1.0, 100)`:

    constant          optax.constant_schedule(value), or a plain number
    linear            optax.linear_schedule(init_value, end_value, transition_steps)
    polynomial        optax.polynomial_schedule(init_value, end_value, power, transition_steps)
    exponential       optax.exponential_decay(init_value, transition_steps, decay_rate)
    cosine            optax.cosine_decay_schedule(init_value, decay_steps, alpha)
    warm restarts     optax.sgdr_schedule(cosine_kwargs)
    one cycle         optax.cosine_onecycle_schedule(transition_steps, peak_value)
    one after another optax.join_schedules(schedules, boundaries)
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax

from layerkit.config.checks import (
    check_choice,
    check_non_negative,
    check_positive,
    check_sizes,
    require,
)
from layerkit.errors import ConfigError

PolynomialOrigin = Literal["start", "limit"]
"""Origin of the polynomial; see `linear_warmup_polynomial_decay`."""
RateShape = Literal["linear", "cosine", "sqrt", "constant"]
"""Curve of the rate in a stage; see `staged`."""
_SHAPES: dict[RateShape, Callable[[jax.Array], jax.Array]] = {
    "linear": lambda part: part,
    "cosine": lambda part: (1.0 - jnp.cos(jnp.pi * part)) / 2.0,
    "sqrt": jnp.sqrt,
    "constant": jnp.ones_like,
}


def linear_warmup_exponential_decay(
    peak: float, *, warmup_steps: int, decay_start: int, decay_end: int, min_ratio: float
) -> optax.Schedule:
    """Return a linear warmup to `peak`, then a flat part, then exponential decay to peak·min_ratio.

    Args:
      peak: Highest rate.
      warmup_steps: Step at which the peak is reached; 0 for no warmup.
      decay_start: Step at which the decay begins, at least `warmup_steps`.
      decay_end: Step at which the rate reaches peak·min_ratio and stays.
      min_ratio: Ratio of the last rate to the peak, in (0, 1].
    """
    owner = "linear_warmup_exponential_decay"
    check_positive(owner, min_ratio=min_ratio)
    _check_decay(owner, peak, warmup_steps, decay_start, decay_end, min_ratio)
    decay = optax.exponential_decay(
        peak, decay_end - decay_start, min_ratio, end_value=peak * min_ratio
    )
    return _prepend_warmup(peak, warmup_steps, decay_start, decay)


def linear_warmup_cosine_decay(
    peak: float, *, warmup_steps: int, decay_start: int, decay_end: int, min_ratio: float = 0.0
) -> optax.Schedule:
    """Return a linear warmup to `peak`, then a flat part, then half a cosine to peak·min_ratio.

    The arguments are those of `linear_warmup_exponential_decay`, with `min_ratio` in [0, 1].
    """
    _check_decay(
        "linear_warmup_cosine_decay", peak, warmup_steps, decay_start, decay_end, min_ratio
    )
    decay = optax.cosine_decay_schedule(peak, decay_end - decay_start, alpha=min_ratio)
    return _prepend_warmup(peak, warmup_steps, decay_start, decay)


def linear_warmup_polynomial_decay(
    peak: float,
    *,
    warmup_steps: int,
    decay_start: int,
    decay_end: int,
    min_ratio: float = 0.0,
    power: float = 1.0,
    origin: PolynomialOrigin = "limit",
) -> optax.Schedule:
    """Return a linear warmup to `peak`, then a flat part, then a power decay to peak·min_ratio.

    With a long flat part and power 1 this is warmup-stable-decay (Hu et al., "MiniCPM", 2024,
    arXiv:2404.06395).

    Args:
      peak: Highest rate.
      warmup_steps: Step at which the peak is reached; 0 for no warmup.
      decay_start: Step at which the decay begins, at least `warmup_steps`.
      decay_end: Step at which the rate reaches peak·min_ratio and stays.
      min_ratio: Ratio of the last rate to the peak, in [0, 1].
      power: Exponent of the polynomial, above 0.
      origin: End of the decay at which a power above 1 is flat. With u from 0 to 1 in the decay,
        the part of peak·(1 - min_ratio) that is left is (1 - u)^power for `limit`, as in Optax
        and TensorFlow, and 1 - u^power for `start`, as in Pax's `LinearRampupPolynomialDecay`.
    """
    owner = "linear_warmup_polynomial_decay"
    check_positive(owner, power=power)
    check_choice(owner, get_args(PolynomialOrigin), origin=origin)
    _check_decay(owner, peak, warmup_steps, decay_start, decay_end, min_ratio)
    num_steps = decay_end - decay_start
    if origin == "limit":
        decay = optax.polynomial_schedule(peak, peak * min_ratio, power, num_steps)
        return _prepend_warmup(peak, warmup_steps, decay_start, decay)

    def decay_from_start(step: jax.typing.ArrayLike) -> jax.Array:
        part = jnp.clip(jnp.asarray(step, jnp.float32) / num_steps, 0.0, 1.0)
        return peak * (1.0 - (1.0 - min_ratio) * part**power)

    return _prepend_warmup(peak, warmup_steps, decay_start, decay_from_start)


def linear_warmup_sqrt_decay(peak: float, *, warmup_steps: int) -> optax.Schedule:
    """Return a linear warmup to `peak`, then peak·√(warmup_steps / step).

    Step 0 has the rate of step 1, as in Pax's `LinearRampupSqrtDecay`.

    Args:
      peak: Highest rate.
      warmup_steps: Step at which the peak is reached, at least 1.
    """
    owner = "linear_warmup_sqrt_decay"
    check_non_negative(owner, **concrete_numbers(peak=peak))
    check_sizes(owner, warmup_steps=warmup_steps)

    def rate(step: jax.typing.ArrayLike) -> jax.Array:
        part = jnp.maximum(jnp.asarray(step, jnp.float32), 1.0) / warmup_steps
        return peak * jnp.minimum(part, jax.lax.rsqrt(jnp.maximum(part, 1.0)))

    return rate


def sqrt_decay(peak: float, *, decay_start: int, offset: float = 0.0) -> optax.Schedule:
    """Return `peak` up to a step, then peak·√(decay_start / (step - offset)).

    Pax's `SqrtDecay` multiplies by a `multiplier` instead, which is peak·√decay_start.

    Args:
      peak: Highest rate.
      decay_start: Number of steps after `offset` at which the decay begins, at least 1.
      offset: Number of steps by which the schedule is late.
    """
    owner = "sqrt_decay"
    check_non_negative(owner, **concrete_numbers(peak=peak))
    check_sizes(owner, decay_start=decay_start)

    def rate(step: jax.typing.ArrayLike) -> jax.Array:
        part = (jnp.asarray(step, jnp.float32) - offset) / decay_start
        return peak * jax.lax.rsqrt(jnp.maximum(part, 1.0))

    return rate


def piecewise_constant(*, boundaries: Sequence[int], values: Sequence[float]) -> optax.Schedule:
    """Return values[0] before boundaries[0], values[1] from there to boundaries[1], and so on.

    `optax.piecewise_constant_schedule` takes factors between the values instead.

    Args:
      boundaries: Steps, each larger than the one before.
      values: Rates, one more than boundaries.
    """
    owner, boundaries, values = "piecewise_constant", tuple(boundaries), tuple(values)
    expected = f"{len(boundaries) + 1} values, one more than boundaries={boundaries}"
    require(len(values) == len(boundaries) + 1, owner, "values", values, expected)
    rates = {f"values[{index}]": value for index, value in enumerate(values)}
    check_non_negative(owner, **concrete_numbers(**rates))
    _check_boundaries(owner, boundaries)
    return optax.join_schedules([*map(optax.constant_schedule, values)], boundaries)


def staged(
    peak: float,
    *,
    boundaries: Sequence[int],
    ratios: Sequence[float],
    shapes: Sequence[RateShape] | None = None,
) -> optax.Schedule:
    """Return a schedule that goes from the rate of each stage to that of the next, from 0.

    Args:
      peak: Factor of the ratios.
      boundaries: Steps at which stages end, each larger than the one before.
      ratios: Rate at the end of each stage, relative to `peak`. The last one stays.
      shapes: Curve of each stage; None for lines. With u from 0 to 1 in a stage, the part of the
        change that is done is u for `linear`, (1 - cos πu) / 2 for `cosine`, √u for `sqrt` (Hägele
        et al., 2024, arXiv:2405.18392) and 1 for `constant`.
    """
    owner, boundaries = "staged", tuple(boundaries)
    if shapes is None:
        shapes = ["linear" for _ in boundaries]
    expected = f"one for each of {len(boundaries)} boundaries"
    require(len(ratios) == len(boundaries), owner, "ratios", ratios, expected)
    require(len(shapes) == len(boundaries), owner, "shapes", shapes, expected)
    check_non_negative(owner, **concrete_numbers(peak=peak), smallest_ratio=min(ratios))
    check_choice(owner, _SHAPES, **{f"shapes[{i}]": shape for i, shape in enumerate(shapes)})
    _check_boundaries(owner, boundaries)

    def stage(first: float, last: float, num_steps: int, shape: RateShape) -> optax.Schedule:
        def rate(step: jax.typing.ArrayLike) -> jax.Array:
            part = jnp.clip(jnp.asarray(step, jnp.float32) / num_steps, 0.0, 1.0)
            return peak * (first + (last - first) * _SHAPES[shape](part))

        return rate

    sizes = [end - begin for begin, end in itertools.pairwise((0, *boundaries))]
    stages = map(stage, (0.0, *ratios), ratios, sizes, shapes)
    return optax.join_schedules([*stages], boundaries[:-1])


def cycle(
    schedules: Sequence[optax.Schedule],
    *,
    boundaries: Sequence[int],
    counts_all_steps: bool = False,
) -> optax.Schedule:
    """Return a schedule that runs several schedules in turn and then begins with the first again.

    Args:
      schedules: Schedules, each of which counts steps from its own beginning.
      boundaries: Increasing steps at which each ends; at the last, the first begins again.
      counts_all_steps: True if schedules count the steps of the run instead, as those of Pax's
        `CycleSchedule`.
    """
    owner, schedules, boundaries = "cycle", tuple(schedules), tuple(boundaries)
    expected = f"one boundary for each of {len(schedules)} schedules"
    require(len(schedules) == len(boundaries), owner, "boundaries", boundaries, expected)
    _check_boundaries(owner, boundaries)
    if not counts_all_steps:
        one_round = optax.join_schedules(schedules, boundaries[:-1])
        return lambda step: one_round(jnp.asarray(step) % boundaries[-1])

    def rate(step: jax.typing.ArrayLike) -> jax.Array:
        index = jnp.searchsorted(
            jnp.array(boundaries), jnp.asarray(step) % boundaries[-1], side="right"
        )
        return jnp.stack([jnp.asarray(schedule(step)) for schedule in schedules])[index]

    return rate


def transformer(*, warmup_steps: int, model_dims: int, scale: float = 1.0) -> optax.Schedule:
    """Return scale·√(1/model_dims)·min((step + 1)/warmup_steps^1.5, 1/√(step + 1)).

    The rate is linear up to `warmup_steps`, then falls with the inverse square root (Vaswani et
    al., 2017, arXiv:1706.03762, equation 3, counting steps from 0).

    Args:
      warmup_steps: Step at which the highest rate is reached.
      model_dims: Size of the model dimension.
      scale: Factor of the rate.
    """
    check_sizes("transformer", warmup_steps=warmup_steps, model_dims=model_dims)
    check_non_negative("transformer", **concrete_numbers(scale=scale))

    def rate(step: jax.typing.ArrayLike) -> jax.Array:
        count = jnp.asarray(step, jnp.float32) + 1.0
        return scale * model_dims**-0.5 * jnp.minimum(count * warmup_steps**-1.5, count**-0.5)

    return rate


def longest_warmup(num_steps: int) -> int:
    """Return the longest warmup that suits a run of `num_steps`: a tenth, and fewer than all."""
    return min(max(1, num_steps // 10), num_steps - 1)


def concrete_numbers(**fields: Any) -> dict[str, float | None]:
    """Return the values of numbers and of arrays with one, to be checked; None for others."""
    numbers: dict[str, float | None] = dict.fromkeys(fields)
    for name, value in fields.items():
        if not isinstance(value, (jax.core.Tracer, str)):
            with contextlib.suppress(TypeError, ValueError):
                numbers[name] = float(value)
    return numbers


def _prepend_warmup(
    peak: float, warmup_steps: int, decay_start: int, decay: optax.Schedule
) -> optax.Schedule:
    flat = optax.constant_schedule(peak)
    if warmup_steps == 0:  # A linear schedule of no steps would stay at 0.
        return optax.join_schedules([flat, decay], [decay_start])
    warmup = optax.linear_schedule(0.0, peak, warmup_steps)
    return optax.join_schedules([warmup, flat, decay], [warmup_steps, decay_start])


def _check_decay(
    owner: str, peak: float, warmup_steps: int, decay_start: int, decay_end: int, min_ratio: float
) -> None:
    check_non_negative(owner, **concrete_numbers(peak=peak))
    require(0 <= min_ratio <= 1, owner, "min_ratio", min_ratio, "a number in [0, 1]")
    if not 0 <= warmup_steps <= decay_start < decay_end:
        raise ConfigError(
            owner=owner,
            field="(warmup_steps, decay_start, decay_end)",
            value=(warmup_steps, decay_start, decay_end),
            expected="0 <= warmup_steps <= decay_start < decay_end",
            hint="A shorter run needs a shorter warmup.",
        )


def _check_boundaries(owner: str, boundaries: Sequence[int]) -> None:
    is_increasing = all(a < b for a, b in zip((0, *boundaries), boundaries, strict=False))
    require(is_increasing, owner, "boundaries", boundaries, "positive and increasing steps")
