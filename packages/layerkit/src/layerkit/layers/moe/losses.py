"""Losses that balance the load of experts, and a measure of the load.

Each value is a float32 mean over all tokens of the batch, or of a group of tokens, without padding.
It does not depend on the sharding of the batch.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import BaseLayer
from layerkit.layers.moe.routing import ExpertRouting, Routing


def load_balance_loss(
    routing: Routing, *, over_all_choices: bool = False, num_groups: int = 1
) -> jax.Array:
    """Return the scalar E²·mean(density·proxy).

    density `[experts]` is the share of the tokens that choose an expert, proxy `[experts]` the mean
    probability that the router gives it (Shazeer et al., 2017, arXiv:1701.06538; in this form
    Lepikhin et al., 2020, arXiv:2006.16668). The value is 1 for balanced experts, and E if all
    tokens choose one expert with probability 1.

    Args:
      routing: Routing of tokens `[...]`.
      over_all_choices: True to compute the density over all choices of each token (DeepSeek,
        OLMoE), False for the first choice (GShard, Switch).
      num_groups: Number of equal groups into which the tokens, in their order, are split. The
        value is the mean over the groups; a group of padding counts as 0.
    """
    if num_groups > 1:
        num_token_axes = routing.logits.ndim - 1

        def group(x: jax.Array) -> jax.Array:
            return x.reshape(num_groups, -1, *x.shape[num_token_axes:])

        balance = partial(load_balance_loss, over_all_choices=over_all_choices)
        return jnp.mean(jax.vmap(balance)(jax.tree.map(group, routing)))
    density, proxy = _load_balance_factors(routing, over_all_choices=over_all_choices)
    return jnp.sum(density * proxy)


def router_z_loss(routing: Routing | ExpertRouting) -> jax.Array:
    """Return the scalar mean(logsumexp(logits)²), which keeps the router's logits small.

    Source: ST-MoE (Zoph et al., 2022, arXiv:2202.08906).

    Args:
      routing: Routing of tokens `[...]`.
    """
    squares = jnp.square(jax.nn.logsumexp(routing.logits, axis=-1, keepdims=True))
    return _mean_of_tokens(squares, routing.is_token)[0]


def report_load_balance(
    layer: BaseLayer, routing: Routing, *, weight: float, over_all_choices: bool, num_groups: int
) -> None:
    """Report the balance of a routing of tokens `[...]`, and add it to the loss by its weight."""
    name = "load_balance_loss"
    value = load_balance_loss(routing, over_all_choices=over_all_choices, num_groups=num_groups)
    layer.add_summary(name, value)
    if weight and num_groups > 1:
        layer.add_aux_loss(name, weight * value, weight=num_groups)
    elif weight:
        density, proxy = _load_balance_factors(routing, over_all_choices=over_all_choices)
        layer.add_aux_loss(name, weight * density, proxy, weight=_num_tokens(routing))


def report_router_z(layer: BaseLayer, routing: Routing | ExpertRouting, *, weight: float) -> None:
    """Report the z-loss of a routing of tokens `[...]`, and add it to the loss by its weight."""
    value = router_z_loss(routing)
    layer.add_summary("router_z_loss", value)
    if weight:
        layer.add_aux_loss("router_z_loss", weight * value, weight=_num_tokens(routing))


def expert_load(routing: Routing) -> jax.Array:
    """Return the load of each expert `[experts]`: E times its share of all choices, with mean 1.

    Args:
      routing: Routing of tokens `[...]`.
    """
    share = _share_of_choices(routing.experts, routing.num_experts)
    return routing.num_experts * _mean_of_tokens(share, routing.is_token)


def _load_balance_factors(
    routing: Routing, *, over_all_choices: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Return (E·density, proxy), two means over tokens `[experts]`; see `load_balance_loss`."""
    chosen = routing.experts if over_all_choices else routing.experts[..., :1]
    density = _mean_of_tokens(_share_of_choices(chosen, routing.num_experts), routing.is_token)
    return routing.num_experts * density, _mean_of_tokens(routing.probs, routing.is_token)


def _num_tokens(routing: Routing | ExpertRouting) -> jax.Array:
    """Return the float32 number of tokens without padding, the weight of means over tokens."""
    if routing.is_token is None:
        return jnp.float32(routing.logits.size // routing.logits.shape[-1])
    return jnp.sum(routing.is_token, dtype=jnp.float32)


def _share_of_choices(chosen: jax.Array, num_experts: int) -> jax.Array:
    """Return the share of int32 `[..., choices]` of each expert, float32; 0 for padding."""
    return jnp.mean(jax.nn.one_hot(chosen, num_experts, dtype=jnp.float32), axis=-2)


def _mean_of_tokens(values: jax.Array, is_token: jax.Array | None) -> jax.Array:
    """Return the mean `[experts]` of `[..., experts]` over tokens."""
    leading = tuple(range(values.ndim - 1))
    if is_token is None:
        return jnp.mean(values, axis=leading)
    count = jnp.maximum(jnp.sum(is_token), 1)
    return jnp.sum(jnp.where(is_token[..., None], values, 0.0), axis=leading) / count
