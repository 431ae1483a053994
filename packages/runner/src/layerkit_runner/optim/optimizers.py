"""Optimizers that Optax does not have as a whole. Numbers out of range raise `ConfigError`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from layerkit.config.checks import check_non_negative, check_positive, check_rates, require
from layerkit_runner.optim.matrix.matrix_rule import MatrixState
from layerkit_runner.optim.optimizer_updates import (
    as_inner,
    cast_like,
    declare_per_layer,
    instances,
    is_schedule_free,
    refuse_schedule_free,
    round_stochastically,
)
from layerkit_runner.optim.schedules import concrete_numbers
from layerkit_runner.optim.weight_selection import mask_of


@declare_per_layer(lambda *, update_rms_cap=1.0, **_: update_rms_cap is not None)
def adam_with_update_cap(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    mask: Any = None,
    update_rms_cap: float | None = 1.0,
    mu_dtype: Any = None,
) -> optax.GradientTransformation:
    """Return Adam (Kingma and Ba, 2015) with Adafactor's cap (2018), as Pax's language models do.

    Args:
      learning_rate: A number or schedule.
      b1: Decay of the first moment.
      b2: Decay of the second moment.
      eps: Number added to the root of the second moment.
      weight_decay: Decoupled weight decay (Loshchilov and Hutter, 2019).
      mask: A tree of booleans, or a function from the weights to one such as `decays`, True for
        weights that decay; None for all.
      update_rms_cap: Largest root mean square of a tensor's update, before weight decay and
        learning rate; None for no cap. Each layer of a stack is a tensor.
      mu_dtype: Dtype of the first moment, such as bfloat16, which halves its memory; None for the
        dtype of the weights. The second moment has the dtype of the weights, because its increments
        are too small for bfloat16.
    """
    owner = "adam_with_update_cap"
    check_rates(owner, **concrete_numbers(b1=b1, b2=b2))
    check_non_negative(owner, **concrete_numbers(eps=eps, weight_decay=weight_decay))
    check_positive(owner, **concrete_numbers(update_rms_cap=update_rms_cap))
    cap = optax.identity() if update_rms_cap is None else optax.clip_by_block_rms(update_rms_cap)
    return optax.chain(
        optax.scale_by_adam(b1=b1, b2=b2, eps=eps, mu_dtype=mu_dtype),
        cap,
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


class ElasticWeightsState(NamedTuple):
    """The state of `elastic_weight_consolidation`."""

    has_anchor: jax.Array
    anchor: Any
    inner: Any
    rate: Any


@declare_per_layer(as_inner)
def elastic_weight_consolidation(
    learning_rate: optax.ScalarOrSchedule,
    *,
    optimizer: Callable[..., optax.GradientTransformation],
    ewc_regularizer_weight: float,
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that also pulls weights to their first values, as Pax's optimizers do.

    The update is that of `optimizer` minus rate·λ/2·(weight - first weight), where λ is
    `ewc_regularizer_weight` (Kirkpatrick et al., 2017, arXiv:1612.00796, with equal importance of
    all weights). Give weights of different importance their own `AuxiliaryOptimizer`. The first
    values, which are kept in the state, are those of the first update, such as loaded weights.

    Args:
      learning_rate: A number or schedule.
      optimizer: A function of `learning_rate`, such as `Partial(optax.adamw)`.
      ewc_regularizer_weight: Weight λ of the penalty.

    Raises:
      ConfigError: The optimizer is schedule-free, or the weight is below 0.
    """
    check_non_negative(
        "elastic_weight_consolidation",
        **concrete_numbers(ewc_regularizer_weight=ewc_regularizer_weight),
    )
    inner = optax.with_extra_args_support(optimizer(learning_rate=learning_rate))
    rate = optax.scale_by_learning_rate(learning_rate)

    def init(params: Any) -> ElasticWeightsState:
        anchor, state = jax.tree.map(jnp.copy, params), inner.init(params)
        refuse_schedule_free("elastic_weight_consolidation", state)
        return ElasticWeightsState(jnp.zeros((), bool), anchor, state, rate.init(params))

    def update(
        grads: Any, state: ElasticWeightsState, params: Any, **extra: Any
    ) -> tuple[Any, ElasticWeightsState]:
        anchor = jax.tree.map(
            lambda old, leaf: jnp.where(state.has_anchor, old, leaf), state.anchor, params
        )
        updates, inner_state = inner.update(grads, state.inner, params, **extra)
        drift = jax.tree.map(
            lambda leaf, old: ewc_regularizer_weight / 2 * (leaf - old), params, anchor
        )
        pull, rate_state = rate.update(drift, state.rate, params)
        has_anchor = jnp.ones((), bool)
        new_state = ElasticWeightsState(has_anchor, anchor, inner_state, rate_state)
        return jax.tree.map(jnp.add, updates, pull), new_state

    return optax.GradientTransformationExtraArgs(init, update)


@declare_per_layer(as_inner)
def lp_regularized(
    learning_rate: optax.ScalarOrSchedule,
    *,
    optimizer: Callable[..., optax.GradientTransformation],
    l1_regularizer_weight: float = 0.0,
    l2_regularizer_weight: float = 0.0,
    mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer of the loss plus λ₁·Σ|w| or λ₂/2·Σw², as Pax's optimizers have it.

    The gradient of the penalty goes through the moments of the optimizer, unlike decoupled weight
    decay. It is added to the gradient that the learner has clipped, and is not part of the
    reported loss.

    Args:
      learning_rate: A number or schedule.
      optimizer: A function of `learning_rate`, such as `Partial(optax.adam)`.
      l1_regularizer_weight: Weight λ₁.
      l2_regularizer_weight: Weight λ₂.
      mask: A tree of booleans, or a function from the weights to one such as `decays`, True for
        weights with a penalty; None for all.
    """
    owner = "lp_regularized"
    weights = concrete_numbers(
        l1_regularizer_weight=l1_regularizer_weight, l2_regularizer_weight=l2_regularizer_weight
    )
    check_non_negative(owner, **weights)
    is_l1 = bool(l1_regularizer_weight)
    expected = "0 if l2_regularizer_weight is above 0"
    is_one = not (is_l1 and l2_regularizer_weight)
    require(is_one, owner, "l1_regularizer_weight", l1_regularizer_weight, expected)
    penalty = optax.add_decayed_weights(l2_regularizer_weight, mask)
    if is_l1:
        penalty = optax.stateless(
            lambda grads, params: jax.tree.map(
                lambda grad, leaf: grad + l1_regularizer_weight * jnp.sign(leaf), grads, params
            )
        )
        penalty = penalty if mask is None else optax.masked(penalty, mask)
    return optax.with_extra_args_support(
        optax.chain(penalty, optimizer(learning_rate=learning_rate))
    )


class Bfloat16State(NamedTuple):
    """The state of `bfloat16_state`; random numbers follow from `num_updates`, an int32 scalar."""

    num_updates: jax.Array
    inner: Any


@declare_per_layer(as_inner)
def bfloat16_state(
    learning_rate: optax.ScalarOrSchedule, *, optimizer: Callable[..., optax.GradientTransformation]
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that computes in float32 and stores its state in bfloat16.

    This halves the memory of most states. Float32 arrays of at least one axis are stored in
    bfloat16; scalars, other dtypes and the first two factors of a `MatrixState` stay. The same step
    draws the same random numbers, on any mesh and after a restart.

    Args:
      learning_rate: Rate, or a schedule of the step.
      optimizer: A function of `learning_rate`, such as `Partial(optax.adamw, b2=0.95)`.

    Raises:
      ConfigError: The state of the optimizer holds weights, since it is schedule-free or pulls
        weights to loaded ones.
    """
    inner = optax.with_extra_args_support(optimizer(learning_rate=learning_rate))

    def widened(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(_computed_dtype(x)), tree)

    def init(params: Any) -> Bfloat16State:
        state = inner.init(widened(params))
        kind, expected = type(state).__name__, "an optimizer whose state holds no weights"
        is_moments = not (instances(state, ElasticWeightsState) or is_schedule_free(state))
        require(is_moments, "bfloat16_state", "optimizer", kind, expected)
        stored = jax.tree.map(lambda x, dtype: x.astype(dtype), state, _stored_dtypes(state))
        return Bfloat16State(jnp.zeros((), jnp.int32), stored)

    def update(
        grads: Any, state: Bfloat16State, params: Any, **extra: Any
    ) -> tuple[Any, Bfloat16State]:
        shapes = jax.eval_shape(inner.init, widened(params))
        whole = cast_like(state.inner, shapes)
        updates, new = inner.update(widened(grads), whole, widened(params), **extra)
        leaves, structure = jax.tree.flatten(new)
        keys = jax.random.split(
            jax.random.fold_in(jax.random.key(0), state.num_updates), len(leaves)
        )
        stored = [
            round_stochastically(x, key) if dtype != x.dtype else x
            for x, key, dtype in zip(
                leaves, keys, jax.tree.leaves(_stored_dtypes(new)), strict=True
            )
        ]
        new_state = Bfloat16State(state.num_updates + 1, jax.tree.unflatten(structure, stored))
        return cast_like(updates, grads), new_state

    return optax.GradientTransformationExtraArgs(init, update)


def _computed_dtype(x: jax.Array) -> Any:
    return jnp.float32 if x.dtype in (jnp.bfloat16, jnp.float16) else x.dtype


def _stored_dtypes(state: Any) -> Any:
    """Return the tree of the dtypes in which `bfloat16_state` stores a state."""

    def dtypes_of(node: Any) -> Any:
        dtypes = jax.tree.map(
            lambda x: jnp.bfloat16 if x.dtype == jnp.float32 and x.ndim else x.dtype, node
        )
        if not isinstance(node, MatrixState):
            return dtypes
        exact = jax.tree.map(lambda x: x.dtype, node.factors[:2])
        return dtypes._replace(factors=(*exact, *dtypes.factors[2:]))

    return jax.tree.map(dtypes_of, state, is_leaf=lambda node: isinstance(node, MatrixState))


def decays(params: Any) -> Any:
    """Return a mask for `optax.adamw(mask=…)`: True for the weights that declare that they decay.

    These are matrices (projections, embeddings, experts, routers, adapters), unlike scales, biases,
    learned positions and relative biases; see `layerkit.base.weights.WeightHParams.decays`. Weights
    without a declaration decay if they have two or more axes, with a warning.

    Args:
      params: Boxed weights, as `init_boxed` returns them, or, inside a learner, its plain weights.
    """
    return mask_of(params, lambda box: box.decays, without=lambda leaf: len(leaf.shape) > 1)


def spares_norms(params: Any) -> Any:
    """Return a mask that is False for scales and biases of normalizations, True for other weights.

    Pax's `decoupled_weight_decay` spares those of LayerNorm in this way, but decays biases.

    Args:
      params: Boxed weights, as `init_boxed` returns them, or, inside a learner, its plain weights.

    Raises:
      ConfigError: A weight has no declaration.
    """
    return mask_of(params, lambda box: "norm" not in box.axes)
