"""Experts with a capacity, a fixed number of slots; choices beyond it are dropped.

Shapes do not depend on the router, which suits partitioners and matrix units. Tokens are in groups,
and each group has separate slots at every expert (Lepikhin et al., 2020: GShard, arXiv:2006.16668),
so that the slots of a group are assigned on the device that holds it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from layerkit.ops.moe.slots import Slots


def capacity_of(group_size: int, *, num_experts: int, capacity_factor: float) -> int:
    """Return the slots of one expert for one group: int(S·cf/E), rounded up to a multiple of 4.

    A balanced router with k choices fills all slots at a factor of k.

    Args:
      group_size: Number of tokens of a group, S.
      num_experts: Number of experts, E.
      capacity_factor: Capacity factor, cf.
    """
    return max(4, -(-int(group_size * capacity_factor / num_experts) // 4) * 4)


def capacity_slots(experts: jax.Array, *, num_experts: int, capacity: int) -> Slots:
    """Return the slots of one group, `capacity` for each expert: slot `expert·capacity + i`.

    First choices of all tokens get slots before second choices, and tokens in their order.

    Args:
      experts: int32 `[tokens, choices]`; num_experts for padding.
      num_experts: Number of experts.
      capacity: Number of slots of each expert.
    """
    num_tokens, num_choices = experts.shape
    by_priority = experts.T.reshape(-1)
    is_of = jax.nn.one_hot(by_priority, num_experts, dtype=jnp.int32)
    before = jnp.sum((jnp.cumsum(is_of, axis=0) - is_of) * is_of, axis=-1)
    fits = (by_priority < num_experts) & (before < capacity)
    slot = jnp.where(fits, by_priority * capacity + before, num_experts * capacity)
    slot_of_choice = slot.reshape(num_choices, num_tokens).T
    return Slots.of_choices(slot_of_choice, num_slots=num_experts * capacity)
