"""Pax's ShardedAdafactor: Adafactor with Adam's decay and momentum in int8.

The states keep the rank of their weight, with size 1 along reduced dimensions. So they are sharded
along the other dimensions as the weight is; see `partitioning.padding`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from layerkit.config.checks import check_choice, check_non_negative, check_positive, check_rates
from layerkit_runner.optim.matrix.matrix_rule import mix
from layerkit_runner.optim.optimizer_updates import declare_per_layer
from layerkit_runner.optim.schedules import concrete_numbers

DecayMethod = Literal["adam", "pow"]
"""Decay rate of the second moment; see `sharded_adafactor`."""
MomentumDtype = Literal["int8", "int16", "bfloat16", "float32"]
"""Dtype of the stored momentum; see `sharded_adafactor`."""


class ShardedAdafactorState(NamedTuple):
    """The state of `sharded_adafactor`.

    Trees have the structure of the weights, and no array for a weight that does not need one.

    Attributes:
      count: Number of updates, int32 scalar.
      schedule: Step of the learning rate, which `load_step` of initial weights sets.
      m_scale: Value of one step of an integer momentum, float32, with size 1 in the first
        dimension of `axis_order`.
      vr: Second moment of rows, float32, with size 1 in its last dimension.
      vc: Second moment of columns, float32, with size 1 in its last dimension but one.
      v: Second moment of a weight without factors, float32, shaped like the weight.
    """

    count: jax.Array  # type: ignore[assignment]  # the name in Optax, and a method of tuples
    schedule: optax.ScaleByScheduleState
    m: Any
    m_scale: Any
    vr: Any
    vc: Any
    v: Any


class _Slots(NamedTuple):
    m: Any = optax.MaskedNode()
    m_scale: Any = optax.MaskedNode()
    vr: Any = optax.MaskedNode()
    vc: Any = optax.MaskedNode()
    v: Any = optax.MaskedNode()
    update: Any = optax.MaskedNode()


@declare_per_layer(lambda **_: True)
def sharded_adafactor(
    learning_rate: optax.ScalarOrSchedule,
    *,
    decay_method: DecayMethod = "adam",
    decay_adam: float = 0.98,
    decay_pow: float = 0.8,
    beta1: float = 0.9,
    clip_threshold: float | None = 1.0,
    factored: bool = True,
    epsilon1_grad_sq_reg: float = 1e-30,
    quantized_dtype: MomentumDtype = "int8",
    multiply_by_parameter_scale: bool = False,
    epsilon2_param_scale_reg: float = 1e-3,
    weight_decay: float = 0.0,
    mask: Any = None,
    axis_order: Callable[[Any], Any] | None = None,
) -> optax.GradientTransformation:
    """Return Adafactor (Shazeer and Stern, 2018, arXiv:1804.04235) as in Praxis.

    It differs from `optax.adafactor`: the second moment may decay as Adam's, the last two
    dimensions of a weight are its rows and columns, and the momentum is that of the scaled update,
    with the learning rate, and may be stored in integers. With `beta1=0.9` and int8 the state takes
    a little over one byte per weight. Defaults are those of Praxis' `HParamsAdamB`.

    An integer momentum q is stored with the scale max|m| / 127 (int8) or max|m| / 32767 (int16)
    over the first dimension. The update of a step uses the momentum before it is rounded.

    Args:
      learning_rate: A number or schedule.
      decay_method: Decay rate of the second moment in step t, from 1. `adam`: that of Adam with its
        bias correction, β(1 - β^(t-1)) / (1 - β^t) with β = `decay_adam`. `pow`: 1 - t^-c with
        c = `decay_pow`, as in the paper.
      decay_adam: Decay β of `adam`, in (0, 1).
      decay_pow: Exponent c of `pow`, above 0.
      beta1: Decay of the momentum; 0 for no momentum.
      clip_threshold: Largest root mean square of a tensor's update, before the learning rate; None
        for no limit.
      factored: True to keep the second moments of rows and columns instead of those of each entry,
        for weights of two or more dimensions.
      epsilon1_grad_sq_reg: Number added to squared gradients.
      quantized_dtype: Dtype of the stored momentum.
      multiply_by_parameter_scale: True to multiply the learning rate by the root mean square of
        the weight.
      epsilon2_param_scale_reg: Smallest root mean square in this product.
      weight_decay: Decoupled weight decay, multiplied by the learning rate.
      mask: A tree of booleans, or a function from the weights to one, True for weights that decay;
        None for all.
      axis_order: Function from the weights to a tree of tuples, the dimensions of each weight in
        the order that determines the first one, rows and columns; None for that of the weight.
        `layerkit.interop.praxis.axis_order` gives the order in Praxis.
    """
    owner = "sharded_adafactor"
    check_choice(owner, get_args(DecayMethod), decay_method=decay_method)
    check_choice(owner, get_args(MomentumDtype), quantized_dtype=quantized_dtype)
    check_rates(owner, **concrete_numbers(decay_adam=decay_adam, beta1=beta1))
    positive = {"decay_adam": decay_adam, "decay_pow": decay_pow, "clip_threshold": clip_threshold}
    check_positive(owner, **concrete_numbers(**positive))
    check_non_negative(owner, **concrete_numbers(weight_decay=weight_decay))
    momentum_dtype = jnp.dtype(quantized_dtype)
    is_integer = jnp.issubdtype(momentum_dtype, jnp.integer)

    def is_factored(weight: jax.Array) -> bool:
        return factored and weight.ndim >= 2

    def order_of(params: Any) -> Any:
        if axis_order is None:
            return jax.tree.map(lambda weight: tuple(range(weight.ndim)), params)
        return axis_order(params)

    def init_one(weight: jax.Array, order: tuple[int, ...]) -> _Slots:
        slots = _Slots(v=_zeros(weight))
        if is_factored(weight):
            slots = _Slots(vr=_zeros(weight, one_at=order[-1]), vc=_zeros(weight, one_at=order[-2]))
        if not beta1:
            return slots
        if is_integer and weight.ndim >= 1:
            m, scale = _zeros(weight, dtype=momentum_dtype), _zeros(weight, one_at=order[0])
            return slots._replace(m=m, m_scale=scale)
        dtype = jnp.float32 if is_integer else momentum_dtype
        return slots._replace(m=_zeros(weight, dtype=dtype))

    def decay_after(count: jax.Array) -> jax.Array:
        """Return the decay of the second moment in the update after `count` others."""
        step = count + 1.0
        if decay_method == "pow":
            return 1.0 - step**-decay_pow
        beta = jnp.float32(decay_adam)
        return beta * (1.0 - beta ** (step - 1.0)) / (1.0 - beta**step)

    def update_one(
        rate: Any, decay: jax.Array, grad: jax.Array, *state_weight_decays_order: Any
    ) -> _Slots:
        """Return the new arrays and the update of a weight `[...]`."""
        m, m_scale, vr, vc, v, weight, decays, order = state_weight_decays_order
        grad = grad.astype(jnp.float32)
        squares = jnp.square(grad) + epsilon1_grad_sq_reg
        if is_factored(weight):
            vr = mix(decay, vr, jnp.mean(squares, axis=order[-1], keepdims=True))
            vc = mix(decay, vc, jnp.mean(squares, axis=order[-2], keepdims=True))
            rows = vr / jnp.mean(vr, axis=order[-2], keepdims=True)
            x = grad * (1.0 / jnp.sqrt(rows)) * (1.0 / jnp.sqrt(vc))
        else:
            v = mix(decay, v, squares)
            x = grad / jnp.sqrt(v)
        if clip_threshold is not None:
            x /= jnp.maximum(1.0, _rms(x) / clip_threshold)
        scale = rate
        if multiply_by_parameter_scale:
            scale = rate * jnp.maximum(_rms(weight), epsilon2_param_scale_reg)
        x *= scale
        if beta1:
            momentum = m.astype(jnp.float32)
            if isinstance(m_scale, jax.Array):  # m holds integers
                x = mix(beta1, momentum * m_scale, x)
                m, m_scale = _quantized(x, m.dtype, axis=order[0])
            else:
                x = mix(beta1, momentum, x)
                m = x.astype(m.dtype)
        update = x
        if weight_decay:
            update = x + jnp.where(decays, weight_decay * rate, 0.0) * weight
        return _Slots(m, m_scale, vr, vc, v, -update)

    def init(params: Any) -> ShardedAdafactorState:
        # Not one array twice, which could not be donated.
        count, step = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        return _state(count, step, jax.tree.map(init_one, params, order_of(params)))

    def update(
        grads: Any, state: ShardedAdafactorState, params: Any = None
    ) -> tuple[Any, ShardedAdafactorState]:
        if params is None:
            raise ValueError(
                "sharded_adafactor needs the weights. Call update(grads, state, params)."
            )
        step = state.schedule.count
        rate = learning_rate(step) if callable(learning_rate) else learning_rate
        decays = mask(params) if callable(mask) else mask
        if decays is None:
            decays = jax.tree.map(lambda _: True, params)
        one = functools.partial(update_one, rate, decay_after(state.count))
        slots = jax.tree.map(one, grads, *state[2:], params, decays, order_of(params))
        return _tree_of("update", slots), _state(state.count + 1, step + 1, slots)

    return optax.GradientTransformation(init, update)


def _state(count: jax.Array, step: jax.Array, slots: Any) -> ShardedAdafactorState:
    trees = (_tree_of(name, slots) for name in ShardedAdafactorState._fields[2:])
    return ShardedAdafactorState(count, optax.ScaleByScheduleState(step), *trees)


def _tree_of(name: str, slots: Any) -> Any:
    return jax.tree.map(
        lambda one: getattr(one, name), slots, is_leaf=lambda node: isinstance(node, _Slots)
    )


def _zeros(weight: jax.Array, *, one_at: int | None = None, dtype: Any = jnp.float32) -> jax.Array:
    shape = list(weight.shape)
    if one_at is not None:
        shape[one_at] = 1
    return jnp.zeros(shape, dtype)


def _rms(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(x)))


def _quantized(x: jax.Array, dtype: Any, *, axis: int) -> tuple[jax.Array, jax.Array]:
    """Return x as integers, and the value of one, with size 1 along `axis`."""
    scale = jnp.max(jnp.abs(x), axis=axis, keepdims=True) / jnp.iinfo(dtype).max
    return jnp.round(x / jnp.where(scale > 0.0, scale, 1.0)).astype(dtype), scale
