"""Experts without a capacity: no choice is dropped.

Choices are sorted by expert, and each expert multiplies its group of rows, of any size. The buffer
has a row for every choice; a loop or a kernel multiplies the rows in use.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from layerkit.ops.moe.grouped_matmul import RowGroups
from layerkit.ops.moe.slots import Slots


def sorted_slots(
    experts: jax.Array, *, num_experts: int, num_balanced: int | None = None, block: int = 1
) -> tuple[Slots, RowGroups]:
    """Return slots sorted by expert, and within an expert by token.

    Args:
      experts: int32 `[tokens, choices]`; choices outside 0 to num_experts - 1 get no slot.
      num_experts: Number of groups of slots.
      num_balanced: Number of choices with a slot if routing is balanced; None for all.
      block: Divisor of the first slot of each group; see `layerkit.ops.moe.grouped_matmul`.

    Returns:
      (slots, rows of each expert).
    """
    num_choices = experts.size
    expert_of_choice = experts.reshape(-1)
    is_here = (expert_of_choice >= 0) & (expert_of_choice < num_experts)
    expert_of_choice = jnp.where(is_here, expert_of_choice, num_experts)
    counts = jnp.zeros((num_experts,), jnp.int32).at[expert_of_choice].add(1, mode="drop")
    sizes = (counts + block - 1) // block * block

    order = jnp.argsort(expert_of_choice, stable=True)
    place = (
        jnp.zeros((num_choices,), jnp.int32)
        .at[order]
        .set(jnp.arange(num_choices, dtype=jnp.int32), unique_indices=True)
    )
    # Each group moves back by the empty slots of the groups before it.
    shift = (jnp.cumsum(sizes) - sizes) - (jnp.cumsum(counts) - counts)
    num_slots = -(-(num_choices + num_experts * (block - 1)) // block) * block
    slot = jnp.where(is_here, place + shift.at[expert_of_choice].get(mode="clip"), num_slots)
    slots = Slots.of_choices(slot.reshape(experts.shape), num_slots=num_slots)
    return slots, RowGroups(sizes, block, num_choices if num_balanced is None else num_balanced)
