"""Experts with a capacity: so many slots for each, and what does not fit is dropped.

Shapes are the same whatever the router does, which is what a partitioner and a matrix unit like
best. Tokens are in groups, and each group has slots of its own at every expert (Lepikhin et al.,
2020: GShard, arXiv:2006.16668), so that a group is laid out on the device where it lies.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from layerkit.layers.moe.slots import Slots


def capacity_of(group_size: int, *, num_experts: int, capacity_factor: float) -> int:
    """Slots of one expert for one group: int(S·cf/E), rounded up to a multiple of 4.

    A balanced router with k choices fills it exactly at a factor of k.

    Args:
      group_size: Tokens of a group, S.
      num_experts: E.
      capacity_factor: cf.
    """
    return max(4, -(-int(group_size * capacity_factor / num_experts) // 4) * 4)


def capacity_slots(experts: jax.Array, *, num_experts: int, capacity: int) -> Slots:
    """Slots of one group, `capacity` for each expert: slot `expert·capacity + i`.

    The first choices of all tokens are seated before any second choice, and tokens in their order.

    Args:
      experts: int32 `[tokens, choices]`; num_experts where there is padding.
      num_experts: How many there are.
      capacity: Slots of each.
    """
    num_tokens, num_choices = experts.shape
    by_priority = experts.T.reshape(-1)
    is_of = jax.nn.one_hot(by_priority, num_experts, dtype=jnp.int32)
    before = jnp.sum((jnp.cumsum(is_of, axis=0) - is_of) * is_of, axis=-1)
    fits = (by_priority < num_experts) & (before < capacity)
    slot = jnp.where(fits, by_priority * capacity + before, num_experts * capacity)
    slot_of_choice = slot.reshape(num_choices, num_tokens).T
    return Slots.of_choices(slot_of_choice, num_slots=num_experts * capacity)
