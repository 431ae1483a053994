"""Variants of AdamW that Optax lacks, or has without a decay that follows rate and mask.

All decay a weight w as `optax.adamw` does, by learning_rate·weight_decay·w where `mask` is True.
Common arguments:

  learning_rate: A number or schedule.
  b1, b2: Decays of the first and second moment.
  eps: Number added to the root of the second moment.
  weight_decay: Decoupled weight decay (Loshchilov and Hutter, 2019).
  mask: A tree of booleans, or a function from the weights to one such as `decays`; None for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from layerkit.config.checks import check_non_negative, check_positive, check_rates
from layerkit_runner.optim.optimizer_updates import declare_per_layer
from layerkit_runner.optim.schedules import concrete_numbers

# Smallest mean of a cautious mask, by which the update is divided; as in the published code.
_SMALLEST_MEAN = 1e-3


@declare_per_layer(lambda **_: True)
def adafactor(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: float | None = 0.9,
    weight_decay: float = 0.0,
    mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Return Adafactor with momentum, for rates of AdamW's size (Zhai et al., 2022).

    It is `optax.adafactor` without the scale of the weights; the decay of the second moment at step
    t is 1 - t^-0.8 (Shazeer and Stern, 2018, arXiv:1804.04235). `b1` is None for no momentum.
    """
    rate = learning_rate if callable(learning_rate) else optax.constant_schedule(learning_rate)
    return optax.adafactor(
        learning_rate,
        multiply_by_parameter_scale=False,
        momentum=b1,
        weight_decay_rate=lambda step: weight_decay * rate(step),
        weight_decay_mask=mask,
    )


@declare_per_layer(lambda **_: False)
def ademamix(
    learning_rate: optax.ScalarOrSchedule,
    *,
    num_steps: int,
    b1: float = 0.9,
    b2: float = 0.999,
    b3: float = 0.9999,
    alpha: float = 5.0,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: Any = None,
) -> optax.GradientTransformation:
    """Return AdEMAMix with the schedules of its paper (Pagliardini et al., 2024, arXiv:2409.03137).

    Args:
      learning_rate: See the module, as for the arguments that are not listed here.
      num_steps: Steps in which alpha grows from 0 and the half-life of the slow average from that
        of the fast one.
      b1: Decay of the fast average.
      b2: Decay of the second moment.
      b3: Last decay of the slow average.
      alpha: Last weight of the slow average.
      eps: Number added to the root of the second moment.
      weight_decay: Decoupled weight decay.
      mask: Weights that decay.
    """
    check_positive("ademamix", num_steps=num_steps, **concrete_numbers(b1=b1, b3=b3))

    def slow_decay(step: jax.Array) -> jax.Array:
        part = jnp.minimum(step / num_steps, 1.0)
        return jnp.exp(1.0 / ((1.0 - part) / math.log(b1) + part / math.log(b3)))

    return optax.contrib.ademamix(
        learning_rate,
        b1=b1,
        b2=b2,
        b3=slow_decay,
        alpha=optax.linear_schedule(0.0, alpha, num_steps),
        eps=eps,
        weight_decay=weight_decay,
        mask=mask,
    )


@declare_per_layer(lambda **_: True)
def mars(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: float = 0.95,
    b2: float = 0.99,
    gamma: float = 0.025,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: Any = None,
) -> optax.GradientTransformation:
    """Return MARS-AdamW in its approximate form (Yuan et al., 2024, arXiv:2411.10438).

    It is AdamW of c = g + gamma·b1/(1 - b1)·(g - last g), where a tensor c of a norm above 1 is
    scaled to 1, as in the published code. `gamma` scales the correction of the gradient.
    """
    check_rates("mars", **concrete_numbers(b1=b1, b2=b2))
    check_non_negative("mars", **concrete_numbers(gamma=gamma))

    def correct(grad: jax.Array, last: jax.Array) -> jax.Array:
        corrected = grad + gamma * b1 / (1.0 - b1) * (grad - last)
        return corrected / jnp.maximum(jnp.linalg.norm(corrected.ravel()), 1.0)

    def update(grads: Any, last: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.tree.map(correct, grads, last), grads

    return optax.chain(
        optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update),
        optax.scale_by_adam(b1=b1, b2=b2, eps=eps),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


@declare_per_layer(lambda **_: False)
def schedule_free_adamw(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Return `optax.contrib.schedule_free_adamw` (Defazio et al., 2024, arXiv:2405.15682).

    `learning_rate` should stay constant after a warmup. `b1` is the part of the average in the
    weights at which gradients are computed.
    """
    base = optax.chain(
        optax.scale_by_rms(decay=b2, eps=eps, eps_in_sqrt=False, bias_correction=True),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    return optax.contrib.schedule_free(base, learning_rate, b1=b1)


class CautiousState(NamedTuple):
    """The states of the wrapped optimizer and of the weight decay of `cautious`."""

    inner: Any
    decay: Any


@declare_per_layer(lambda **_: True)
def cautious(
    learning_rate: optax.ScalarOrSchedule,
    *,
    optimizer: Callable[..., optax.GradientTransformation],
    weight_decay: float = 0.0,
    mask: Any = None,
    cautious_decay: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer without the entries of its updates that go up the gradient.

    The rest of a tensor's update is divided by the part of the entries that are left (Liang et al.,
    2024, arXiv:2411.16085).

    Args:
      learning_rate: A number or schedule.
      optimizer: A function of `learning_rate`, such as `Partial(optax.adam)`, without weight decay,
        which would be taken for a part of the update.
      weight_decay: Decoupled weight decay, which is not masked.
      mask: Weights that decay; see the module.
      cautious_decay: True to decay only entries that the update of `optimizer` does not move away
        from 0 (Chen et al., 2025, arXiv:2510.12402).
    """
    inner = optax.with_extra_args_support(optimizer(learning_rate=learning_rate))
    decay = optax.chain(
        optax.add_decayed_weights(weight_decay, mask), optax.scale_by_learning_rate(learning_rate)
    )

    def align(update: jax.Array, grad: jax.Array) -> jax.Array:
        descends = (jnp.sign(update) * jnp.sign(grad) < 0).astype(update.dtype)
        return update * descends / jnp.maximum(jnp.mean(descends), _SMALLEST_MEAN)

    def init(params: Any) -> CautiousState:
        return CautiousState(inner.init(params), decay.init(params))

    def update(
        grads: Any, state: CautiousState, params: Any, **extra: Any
    ) -> tuple[Any, CautiousState]:
        updates, inner_state = inner.update(grads, state.inner, params, **extra)
        zeros = jax.tree.map(jnp.zeros_like, updates)
        pulls, decay_state = decay.update(zeros, state.decay, params)
        if cautious_decay:
            pulls = jax.tree.map(
                lambda pull, step: jnp.where(jnp.sign(pull) * jnp.sign(step) < 0, 0.0, pull),
                pulls,
                updates,
            )
        new = jax.tree.map(lambda u, g, pull: align(u, g) + pull, updates, grads, pulls)
        return new, CautiousState(inner_state, decay_state)

    return optax.GradientTransformationExtraArgs(init, update)
