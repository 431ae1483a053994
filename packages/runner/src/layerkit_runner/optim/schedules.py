"""Learning-rate schedules that Optax has only in parts: `step -> learning rate`.

A linear warmup starts at 0, so the first step changes only the optimizer's statistics;
`warmup_steps=0` starts at the peak instead. Schedules that Optax has are used directly, such as
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

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from layerkit_runner.errors import UsageError

# Largest int32, in which a training state counts its steps.
_LAST_STEP = 2**31 - 1


class UnfitStepsError(UsageError):
    """Steps of a schedule that are out of order.

    Attributes:
      settings: Fields of the schedule with values that are in order together.
    """

    def __init__(self, message: str, settings: Mapping[str, int]):
        super().__init__(message)
        self.settings = dict(settings)


def linear_warmup_exponential_decay(
    peak: float, *, warmup_steps: int, decay_start: int, decay_end: int, min_ratio: float
) -> optax.Schedule:
    """Return a linear warmup to `peak`, then a flat part, then exponential decay to peak·min_ratio.

    Args:
      peak: The highest rate.
      warmup_steps: Step at which the peak is reached; 0 for no warmup.
      decay_start: Step at which the decay begins, at least `warmup_steps`.
      decay_end: Step at which the rate reaches peak·min_ratio and stays.
      min_ratio: Ratio of the last rate to the peak, in (0, 1].

    Raises:
      UsageError: Steps are out of order, or a number is out of range.
    """
    check_finite("schedule: peak", peak)
    _check_steps(warmup_steps, decay_start, decay_end)
    if not 0 < min_ratio <= 1:
        raise UsageError(f"schedule: min_ratio={min_ratio} must be above 0 and at most 1")
    decay = optax.exponential_decay(
        peak, decay_end - decay_start, min_ratio, end_value=peak * min_ratio
    )
    return _after_warmup(peak, warmup_steps, decay_start, decay)


def linear_warmup_cosine_decay(
    peak: float, *, warmup_steps: int, decay_start: int, decay_end: int, min_ratio: float = 0.0
) -> optax.Schedule:
    """Return a linear warmup to `peak`, then a flat part, then half a cosine to peak·min_ratio.

    Args:
      peak: The highest rate.
      warmup_steps: Step at which the peak is reached; 0 for no warmup.
      decay_start: Step at which the decay begins, at least `warmup_steps`.
      decay_end: Step at which the rate reaches peak·min_ratio and stays.
      min_ratio: Ratio of the last rate to the peak, in [0, 1].

    Raises:
      UsageError: Steps are out of order, or a number is out of range.
    """
    check_finite("schedule: peak", peak)
    _check_steps(warmup_steps, decay_start, decay_end)
    if not 0 <= min_ratio <= 1:
        raise UsageError(f"schedule: min_ratio={min_ratio} must be from 0 to 1")
    decay = optax.cosine_decay_schedule(peak, decay_end - decay_start, alpha=min_ratio)
    return _after_warmup(peak, warmup_steps, decay_start, decay)


def linear_warmup_polynomial_decay(
    peak: float,
    *,
    warmup_steps: int,
    decay_start: int,
    decay_end: int,
    min_ratio: float = 0.0,
    power: float = 1.0,
) -> optax.Schedule:
    """Return a linear warmup to `peak`, then a flat part, then a power decay to peak·min_ratio.

    In the decay, with u from 1 down to 0, the rate is peak·(min_ratio + (1 - min_ratio)·u^power).
    With a long flat part and power 1 this is warmup-stable-decay (Hu et al., "MiniCPM", 2024,
    arXiv:2404.06395).

    Args:
      peak: The highest rate.
      warmup_steps: Step at which the peak is reached; 0 for no warmup.
      decay_start: Step at which the decay begins, at least `warmup_steps`.
      decay_end: Step at which the rate reaches peak·min_ratio and stays.
      min_ratio: Ratio of the last rate to the peak, in [0, 1].
      power: Exponent above 0; 1 for a straight line.

    Raises:
      UsageError: Steps are out of order, or a number is out of range.
    """
    check_finite("schedule: peak", peak)
    _check_steps(warmup_steps, decay_start, decay_end)
    if not 0 <= min_ratio <= 1:
        raise UsageError(f"schedule: min_ratio={min_ratio} must be from 0 to 1")
    if not 0 < power < math.inf:
        raise UsageError(f"schedule: power={power} must be above 0 and finite")
    decay = optax.polynomial_schedule(peak, peak * min_ratio, power, decay_end - decay_start)
    return _after_warmup(peak, warmup_steps, decay_start, decay)


def linear_warmup_sqrt_decay(peak: float, *, warmup_steps: int) -> optax.Schedule:
    """Return a linear warmup to `peak`, then peak·√(warmup_steps / step).

    Args:
      peak: The highest rate.
      warmup_steps: Step at which the peak is reached, at least 1.

    Raises:
      UsageError: A number is out of range.
    """
    check_finite("schedule: peak", peak)
    _check_at_least_one("warmup_steps", warmup_steps)
    _check_last("warmup_steps", warmup_steps)

    def rate(step: jax.typing.ArrayLike) -> jax.Array:
        part = jnp.asarray(step, jnp.float32) / warmup_steps
        return peak * jnp.minimum(part, jax.lax.rsqrt(jnp.maximum(part, 1.0)))

    return rate


def piecewise_constant(*, boundaries: Sequence[int], values: Sequence[float]) -> optax.Schedule:
    """Return values[0] before boundaries[0], values[1] from there to boundaries[1], and so on.

    `optax.piecewise_constant_schedule` takes factors between the values instead.

    Args:
      boundaries: Rising steps.
      values: Rates, one more than boundaries.

    Raises:
      UsageError: Boundaries are out of order, or values are too few, too many or out of range.
    """
    boundaries, values = tuple(boundaries), tuple(values)
    if len(values) != len(boundaries) + 1:
        raise UsageError(f"schedule: values={values} must be one more than boundaries={boundaries}")
    for index, value in enumerate(values):
        check_finite(f"schedule: values[{index}]", value)
    _check_rising(boundaries)

    def rate(step: jax.typing.ArrayLike) -> jax.Array:
        index = jnp.searchsorted(jnp.array(boundaries, jnp.float32), step, side="right")
        return jnp.array(values, jnp.float32)[index]

    return rate


def cycle(schedules: Sequence[optax.Schedule], *, boundaries: Sequence[int]) -> optax.Schedule:
    """Return schedules one after another, and then from the first again.

    Args:
      schedules: Schedules, each of which counts steps from its own beginning.
      boundaries: Rising steps at which each ends; at the last, the first begins again.

    Raises:
      UsageError: Boundaries are out of order, or not one for each schedule.
    """
    schedules, boundaries = tuple(schedules), tuple(boundaries)
    if not schedules or len(schedules) != len(boundaries):
        raise UsageError(
            f"schedule: a cycle of {len(schedules)} schedules needs as many boundaries, not"
            f" {boundaries}"
        )
    _check_rising(boundaries)
    one_round = optax.join_schedules(schedules, boundaries[:-1])
    return lambda step: one_round(jnp.asarray(step) % boundaries[-1])


def transformer(*, warmup_steps: int, model_dims: int, scale: float = 1.0) -> optax.Schedule:
    """Return scale·√(1/model_dims)·min((step + 1)/warmup_steps^1.5, 1/√(step + 1)).

    The rate is linear up to `warmup_steps`, then falls with the inverse square root (Vaswani et
    al., 2017, arXiv:1706.03762, equation 3, counting steps from 0).

    Args:
      warmup_steps: Step at which the highest rate is reached.
      model_dims: Size of the model dimension.
      scale: Factor of the rate.

    Raises:
      UsageError: A number is out of range.
    """
    _check_at_least_one("warmup_steps", warmup_steps)
    _check_at_least_one("model_dims", model_dims)
    check_finite("schedule: scale", scale)

    def rate(step: jax.typing.ArrayLike) -> jax.Array:
        count = jnp.asarray(step, jnp.float32) + 1.0
        return scale * model_dims**-0.5 * jnp.minimum(count * warmup_steps**-1.5, count**-0.5)

    return rate


def longest_warmup(num_steps: int) -> int:
    """Return the longest warmup that suits a run of `num_steps`: a tenth, and fewer than all."""
    return min(max(1, num_steps // 10), num_steps - 1)


def concrete_number(value: Any) -> float | None:
    """Return the value of a number, or of an array that holds one number.

    Returns:
      None for a schedule, a traced array (as under `optax.inject_hyperparams`) and anything that
      is not a number.
    """
    if isinstance(value, (jax.core.Tracer, str)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def check_finite(label: str, value: Any) -> None:
    """Raise `UsageError` for a number that is not finite or below 0; `label` names its field."""
    number = concrete_number(value)
    if number is not None and not 0 <= number < math.inf:  # nor is NaN
        raise UsageError(f"{label}={value} must be a finite number from 0")


def _after_warmup(
    peak: float, warmup_steps: int, decay_start: int, decay: optax.Schedule
) -> optax.Schedule:
    flat = optax.constant_schedule(peak)
    if warmup_steps == 0:  # a linear schedule without steps stays at 0
        return optax.join_schedules([flat, decay], [decay_start])
    warmup = optax.linear_schedule(0.0, peak, warmup_steps)
    return optax.join_schedules([warmup, flat, decay], [warmup_steps, decay_start])


def _check_steps(warmup_steps: int, decay_start: int, decay_end: int) -> None:
    if 0 <= warmup_steps <= decay_start < decay_end:
        _check_last("decay_start", decay_start)
        return
    shorter = max(1, decay_end // 10)
    fields = {"warmup_steps": shorter}
    if decay_start != warmup_steps:
        fields["decay_start"] = shorter
    if decay_end <= shorter:
        fields["decay_end"] = shorter + 1
    shown = ", ".join(f"{name}={steps}" for name, steps in fields.items())
    raise UnfitStepsError(
        f"schedule: 0 <= warmup_steps={warmup_steps} <= decay_start={decay_start} <"
        f" decay_end={decay_end} does not hold. A shorter run needs a shorter warmup, such as"
        f" {shown}.",
        fields,
    )


def _check_rising(boundaries: Sequence[int]) -> None:
    if not all(a < b for a, b in zip((0, *boundaries), boundaries, strict=False)):
        raise UsageError(f"schedule: boundaries={tuple(boundaries)} must rise from above 0")
    for index, boundary in enumerate(boundaries):
        _check_last(f"boundaries[{index}]", boundary)


def _check_at_least_one(name: str, value: float) -> None:
    if not value >= 1:
        raise UsageError(f"schedule: {name}={value} must be at least 1")


def _check_last(name: str, step: int) -> None:
    """Raise an error for a step that no run reaches and JAX cannot compare with an int32."""
    if not step <= _LAST_STEP:
        raise UsageError(
            f"schedule: {name}={step} must be at most {_LAST_STEP}, the last step that a run counts"
        )
