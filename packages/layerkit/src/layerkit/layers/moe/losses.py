"""What keeps experts evenly used, and what tells whether they are.

Everything is a float32 mean over all tokens of the batch; padding counts nowhere. So the values do
not depend on how the batch lies on a mesh.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from layerkit.layers.moe.routing import Routing


def load_balance_loss(routing: Routing, *, over_all_choices: bool = False) -> jax.Array:
    """E²·mean(density·proxy): scalar, 1 if balanced, E if all tokens go to one expert surely.

    density `[experts]` is the part of the tokens whose choice an expert is, proxy `[experts]` the
    mean probability that the router gives it (Shazeer et al., 2017, arXiv:1701.06538; in this form
    Lepikhin et al., 2020, arXiv:2006.16668).

    Args:
      routing: Of tokens `[...]`.
      over_all_choices: Takes the density over all choices of each token (DeepSeek, OLMoE);
        otherwise over the first (GShard, Switch).
    """
    chosen = routing.experts if over_all_choices else routing.experts[..., :1]
    density = _mean_of_tokens(_share_of_choices(chosen, routing.num_experts), routing.is_token)
    proxy = _mean_of_tokens(routing.probs, routing.is_token)
    return routing.num_experts**2 * jnp.mean(density * proxy)


def router_z_loss(routing: Routing) -> jax.Array:
    """mean(logsumexp(logits)²): scalar; keeps the router's logits small.

    From ST-MoE (Zoph et al., 2022, arXiv:2202.08906).

    Args:
      routing: Of tokens `[...]`.
    """
    squares = jnp.square(jax.nn.logsumexp(routing.logits, axis=-1, keepdims=True))
    return _mean_of_tokens(squares, routing.is_token)[0]


def expert_load(routing: Routing) -> jax.Array:
    """How often each expert is chosen: `[experts]`, E times its part of all choices, the mean is 1.

    Args:
      routing: Of tokens `[...]`.
    """
    share = _share_of_choices(routing.experts, routing.num_experts)
    return routing.num_experts * _mean_of_tokens(share, routing.is_token)


def _share_of_choices(chosen: jax.Array, num_experts: int) -> jax.Array:
    """int32 `[..., choices]` → float32 `[..., experts]`; padding chose nothing."""
    return jnp.mean(jax.nn.one_hot(chosen, num_experts, dtype=jnp.float32), axis=-2)


def _mean_of_tokens(values: jax.Array, is_token: jax.Array | None) -> jax.Array:
    """`[..., experts]` → `[experts]`."""
    leading = tuple(range(values.ndim - 1))
    if is_token is None:
        return jnp.mean(values, axis=leading)
    count = jnp.maximum(jnp.sum(is_token), 1)
    return jnp.sum(jnp.where(is_token[..., None], values, 0.0), axis=leading) / count
