"""Learning-rate schedules that Optax has only in parts: `step -> learning rate`.

Those with a linear warmup start at 0, so the first step changes nothing but the optimizer's
statistics.
"""

from __future__ import annotations

import jax.numpy as jnp
import optax

from layerkit_runner.errors import UsageError


def linear_warmup_exponential_decay(
    peak: float, *, warmup_steps: int, decay_start: int, decay_end: int, min_ratio: float
) -> optax.Schedule:
    """Linear from 0 to `peak`, flat until `decay_start`, then exponential to peak·min_ratio.

    Args:
      peak: The highest rate.
      warmup_steps: Where the peak is reached.
      decay_start: Where the decay begins, at least `warmup_steps`.
      decay_end: Where the rate reaches peak·min_ratio and stays.
      min_ratio: Of the last rate to the peak, in (0, 1].

    Raises:
      UsageError: steps out of order or a ratio out of range.
    """
    _check(warmup_steps, decay_start, decay_end)
    if not 0 < min_ratio <= 1:
        raise UsageError(f"schedule: min_ratio={min_ratio} must be above 0 and at most 1")
    decay = optax.exponential_decay(
        peak, decay_end - decay_start, min_ratio, end_value=peak * min_ratio
    )
    return _after_warmup(peak, warmup_steps, decay_start, decay)


def linear_warmup_cosine_decay(
    peak: float, *, warmup_steps: int, decay_start: int, decay_end: int, min_ratio: float = 0.0
) -> optax.Schedule:
    """Linear from 0 to `peak`, flat until `decay_start`, then half a cosine to peak·min_ratio.

    Args:
      peak: The highest rate.
      warmup_steps: Where the peak is reached.
      decay_start: Where the decay begins, at least `warmup_steps`.
      decay_end: Where the rate reaches peak·min_ratio and stays.
      min_ratio: Of the last rate to the peak, in [0, 1].

    Raises:
      UsageError: steps out of order or a ratio out of range.
    """
    _check(warmup_steps, decay_start, decay_end)
    if not 0 <= min_ratio <= 1:
        raise UsageError(f"schedule: min_ratio={min_ratio} must be from 0 to 1")
    decay = optax.cosine_decay_schedule(peak, decay_end - decay_start, alpha=min_ratio)
    return _after_warmup(peak, warmup_steps, decay_start, decay)


def transformer(*, warmup_steps: int, model_dims: int, scale: float = 1.0) -> optax.Schedule:
    """scale·√(1/model_dims)·min((step + 1)/warmup_steps^1.5, 1/√(step + 1)).

    Linear up to `warmup_steps`, then with the inverse square root (Vaswani et al., 2017,
    arXiv:1706.03762, equation 3, counting steps from 0).

    Args:
      warmup_steps: Where the highest rate is reached.
      model_dims: Size of the model dimension.
      scale: Multiplies the rate.

    Raises:
      UsageError: sizes below one.
    """
    for name, size in (("warmup_steps", warmup_steps), ("model_dims", model_dims)):
        if size < 1:
            raise UsageError(f"schedule: {name}={size} must be at least 1")

    def rate(step: jnp.ndarray) -> jnp.ndarray:
        count = jnp.asarray(step, jnp.float32) + 1.0
        return scale * model_dims**-0.5 * jnp.minimum(count * warmup_steps**-1.5, count**-0.5)

    return rate


def _after_warmup(
    peak: float, warmup_steps: int, decay_start: int, decay: optax.Schedule
) -> optax.Schedule:
    parts = [optax.linear_schedule(0.0, peak, warmup_steps), optax.constant_schedule(peak), decay]
    return optax.join_schedules(parts, [warmup_steps, decay_start])


def _check(warmup_steps: int, decay_start: int, decay_end: int) -> None:
    if not 0 < warmup_steps <= decay_start < decay_end:
        raise UsageError(
            f"schedule: 0 < warmup_steps={warmup_steps} <= decay_start={decay_start} <"
            f" decay_end={decay_end} does not hold; a shorter run needs a shorter warmup"
        )
