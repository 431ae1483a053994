"""Variants of AdamW that Optax lacks, or has without a mask of decayed weights or a schedule.

All decay a weight w as `optax.adamw` does, by learning_rate·weight_decay·w. Common arguments:

  learning_rate: A number or schedule.
  b1, b2: Decays of the first and second moment.
  eps: Number added to the root of the second moment.
  weight_decay: Decoupled weight decay (Loshchilov and Hutter, 2019).
  mask: A tree of booleans, or a function from the weights to one such as `decays`, True for weights
    that decay; None for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath

from layerkit.config.checks import check_non_negative, check_positive, check_rates, check_sizes
from layerkit_runner.optim.optimizer_groups import STACK_AXES
from layerkit_runner.optim.optimizer_updates import (
    as_inner,
    declare_per_layer,
    refuse_schedule_free,
)
from layerkit_runner.optim.schedules import concrete_numbers
from layerkit_runner.optim.weight_selection import declaration, weight_path

# Smallest mean of a cautious mask, by which the update is divided; as in the published code.
_SMALLEST_MEAN = 1e-3


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

    Within `num_steps`, the weight of the slow average grows from 0 to `alpha`, and its half-life
    from that of `b1` to that of `b3`.
    """
    check_positive("ademamix", num_steps=num_steps, **concrete_numbers(b1=b1, b3=b3))
    _check(
        "ademamix", {"b1": b1, "b2": b2, "b3": b3}, alpha=alpha, eps=eps, weight_decay=weight_decay
    )

    def slow_decay(step: jax.Array) -> jax.Array:
        part = jnp.minimum(step / num_steps, 1.0)
        return jnp.exp(1.0 / ((1.0 - part) / math.log(b1) + part / math.log(b3)))

    schedules = {"b3": slow_decay, "alpha": optax.linear_schedule(0.0, alpha, num_steps)}
    rest = {"b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay, "mask": mask}
    return optax.contrib.ademamix(learning_rate, **schedules, **rest)


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
    scaled to 1, as in the published code. That code trains vectors by AdamW; this trains all.
    """
    _check("mars", {"b1": b1, "b2": b2}, gamma=gamma, eps=eps, weight_decay=weight_decay)

    def correct(grad: jax.Array, last: jax.Array) -> jax.Array:
        corrected = grad + gamma * b1 / (1.0 - b1) * (grad - last)
        return corrected / jnp.maximum(jnp.linalg.norm(corrected.ravel()), 1.0)

    def update(grads: Any, last: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.tree.map(correct, grads, last), grads

    return optax.chain(
        optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update),
        optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=mask),
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
    """Return `optax.contrib.schedule_free_adamw` with a mask (Defazio et al., arXiv:2405.15682).

    `learning_rate` should stay constant after a warmup. `b1` is the share of the average in the
    weights at which gradients are computed.
    """
    check_positive("schedule_free_adamw", **concrete_numbers(b1=b1))
    _check("schedule_free_adamw", {"b1": b1, "b2": b2}, eps=eps, weight_decay=weight_decay)
    base = optax.chain(
        optax.scale_by_rms(decay=b2, eps=eps, eps_in_sqrt=False, bias_correction=True),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    return optax.contrib.schedule_free(base, learning_rate, b1=b1)


@declare_per_layer(lambda **_: False)
def sophia(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: float = 0.965,
    b2: float = 0.99,
    gamma: float = 0.01,
    update_interval: int = 10,
    weight_decay: float = 0.0,
    mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Return Sophia-H (Liu et al., 2023, arXiv:2305.14342), by Optax, with the learner's `hvp`.

    Every `update_interval` steps, the diagonal of the Hessian is estimated by Hutchinson's method
    with one tree of random signs, which follow from the number of estimates. `gamma` scales it.
    Entries that are not finite, as of a root at 0, count as 0.
    """
    check_sizes("sophia", update_interval=update_interval)
    _check("sophia", {"b1": b1, "b2": b2}, gamma=gamma, weight_decay=weight_decay)

    def estimate(
        grads: Any, count: jax.Array, params: Any = None, *, hvp: Any, **_: Any
    ) -> tuple[Any, jax.Array]:
        key = jax.random.fold_in(jax.random.key(0), count)
        signs = optax.tree.random_like(key, params, jax.random.rademacher)
        products = jax.tree.map(jnp.multiply, hvp(signs), signs)
        return jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0), products), count + 1

    diagonal = optax.GradientTransformationExtraArgs(lambda _: jnp.zeros((), jnp.int32), estimate)
    rates = {"b1": b1, "b2": b2, "gamma": gamma, "update_interval": update_interval}
    decay = {"weight_decay": weight_decay, "weight_decay_mask": mask}
    return optax.contrib.sophia(learning_rate, hessian_diagonal_fn=diagonal, **rates, **decay)


class CautiousState(NamedTuple):
    """The states of the wrapped optimizer and of the weight decay of `cautious`."""

    inner: Any
    decay: Any


@declare_per_layer(as_inner)
def cautious(
    learning_rate: optax.ScalarOrSchedule,
    *,
    optimizer: Callable[..., optax.GradientTransformation],
    weight_decay: float = 0.0,
    mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer without the entries of its updates that go up the gradient.

    The rest of a tensor's update is divided by the share of the entries that are left (Liang et
    al., 2024, arXiv:2411.16085); of a declared stack, each layer is a tensor. `optimizer` is a
    function of `learning_rate` without weight decay, such as `Partial(optax.adam)`; `weight_decay`
    is added to what is left.

    Raises:
      ConfigError: The optimizer is schedule-free, or the weight decay is below 0.
    """
    _check("cautious", {}, weight_decay=weight_decay)
    inner = optax.with_extra_args_support(optimizer(learning_rate=learning_rate))
    decay = optax.chain(
        optax.add_decayed_weights(weight_decay, mask), optax.scale_by_learning_rate(learning_rate)
    )

    def align(path: KeyPath, update: jax.Array, grad: jax.Array) -> jax.Array:
        box = declaration(weight_path(path))
        axes = () if box is None else box.axes[len(box.axes) - update.ndim :]
        num_stacked = sum(axis in STACK_AXES for axis in axes)
        descends = (jnp.sign(update) * jnp.sign(grad) < 0).astype(update.dtype)
        share = jnp.mean(descends, axis=tuple(range(num_stacked, update.ndim)), keepdims=True)
        return update * descends / jnp.maximum(share, _SMALLEST_MEAN)

    def init(params: Any) -> CautiousState:
        state = inner.init(params)
        refuse_schedule_free("cautious", state)
        return CautiousState(state, decay.init(params))

    def update(
        grads: Any, state: CautiousState, params: Any, **extra: Any
    ) -> tuple[Any, CautiousState]:
        updates, inner_state = inner.update(grads, state.inner, params, **extra)
        zeros = jax.tree.map(jnp.zeros_like, updates)
        pulls, decay_state = decay.update(zeros, state.decay, params)
        aligned = jax.tree_util.tree_map_with_path(align, updates, grads)
        new = jax.tree.map(jnp.add, aligned, pulls)
        return new, CautiousState(inner_state, decay_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _check(owner: str, rates: Mapping[str, Any], **numbers: Any) -> None:
    """Raise `ConfigError` unless decays of averages are in [0, 1) and numbers are 0 or more."""
    check_rates(owner, **concrete_numbers(**rates))
    check_non_negative(owner, **concrete_numbers(**numbers))
