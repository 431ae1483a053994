"""Assignment of choices to slots, and the movement of tokens to slots and back.

A choice is one of the experts of one token; choices are numbered token by token. A slot is a row of
the buffer that the experts multiply. Each choice has at most one slot and each slot at most one
choice, so that both rows and their gradients are moved by gathers. The gradients of JAX's gather
would be scatters, which are slow on every backend.

With a capacity (`capacity_slots`), each expert has a fixed number of slots, and choices beyond it
are dropped. Shapes do not depend on the router, which suits partitioners and matrix units. Tokens
are in groups, and each group has separate slots at every expert (Lepikhin et al., 2020: GShard,
arXiv:2006.16668), so that the slots of a group are assigned on the device that holds it.

Without a capacity (`sorted_slots`), no choice is dropped. Choices are sorted by expert, and each
expert multiplies its group of rows, of any size. The buffer has a row for every choice; a loop or a
kernel multiplies the rows in use.
"""

from __future__ import annotations

import functools
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from layerkit.ops.moe.grouped_matmul import RowGroups

Indices = TypeVar("Indices")


@struct.dataclass
class Slots:
    """The assignment of choices to slots, as a map and its inverse.

    Attributes:
      slot_of_choice: Slot of each choice, int32 `[tokens, choices]`; the number of slots for a
        choice without a slot.
      choice_of_slot: Choice of each slot, int32 `[slots]`; the number of choices (tokens times
        choices) for an empty slot.
    """

    slot_of_choice: jax.Array
    choice_of_slot: jax.Array

    @classmethod
    def from_choices(cls, slot_of_choice: jax.Array, *, num_slots: int) -> Slots:
        """Return the slots of `slot_of_choice` int32 `[tokens, choices]`, in which none repeats."""
        num_choices = slot_of_choice.size
        choices = jnp.arange(num_choices, dtype=jnp.int32)
        empty = jnp.full((num_slots,), num_choices, jnp.int32)
        filled = empty.at[slot_of_choice.reshape(-1)].set(choices, mode="drop")
        return cls(slot_of_choice, filled)


@jax.custom_vjp
def to_slots(tokens: jax.Array, slots: Slots) -> jax.Array:
    """Copy each token to the slots of its choices. Empty slots are 0.

    Args:
      tokens: `[tokens, dims]`.
      slots: Slots of these tokens.

    Returns:
      `[slots, dims]`.
    """
    return _take(tokens, slots.choice_of_slot // slots.slot_of_choice.shape[1])


def _to_slots_bwd(slots: Slots, gradient: jax.Array) -> tuple[jax.Array, Slots]:
    of_choices = _take(gradient, slots.slot_of_choice)
    summed = jnp.sum(of_choices, axis=1, dtype=jnp.float32).astype(gradient.dtype)
    return summed, no_gradient(slots)


to_slots.defvjp(lambda tokens, slots: (to_slots(tokens, slots), slots), _to_slots_bwd)


@jax.custom_vjp
def from_slots(rows: jax.Array, slots: Slots) -> jax.Array:
    """Return the row of the slot of each choice; 0 for a choice without a slot.

    Args:
      rows: `[slots, dims]`.
      slots: Slots of the tokens.

    Returns:
      `[tokens, choices, dims]`.
    """
    return _take(rows, slots.slot_of_choice)


def _from_slots_bwd(slots: Slots, gradient: jax.Array) -> tuple[jax.Array, Slots]:
    return _take(gradient.reshape(-1, gradient.shape[-1]), slots.choice_of_slot), no_gradient(slots)


from_slots.defvjp(lambda rows, slots: (from_slots(rows, slots), slots), _from_slots_bwd)


def weighted_sum(of_choices: jax.Array, weights: jax.Array) -> jax.Array:
    """Sum `[..., choices, dims]` over choices with float32 weights `[..., choices]`.

    The sum is computed in float32 and returned in the dtype of `of_choices`.
    """
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    return product("...kd,...k->...d", of_choices, weights).astype(of_choices.dtype)


def _take(rows: jax.Array, index: jax.Array) -> jax.Array:
    """Return rows by index; 0 for an index past the end."""
    return rows.at[index].get(mode="fill", fill_value=0)


def no_gradient(indices: Indices) -> Indices:
    """Return the gradient of a tree of integers `[...]`, as a `jax.custom_vjp` must return it."""
    return jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), indices)


def weighted(rows: jax.Array, weights: jax.Array) -> jax.Array:
    """Multiply rows `[..., dims]` by weights `[...]`, in float32."""
    return rows.astype(jnp.float32) * weights[..., None]


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
    return Slots.from_choices(slot_of_choice, num_slots=num_experts * capacity)


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
    slots = Slots.from_choices(slot.reshape(experts.shape), num_slots=num_slots)
    return slots, RowGroups(sizes, block, num_choices if num_balanced is None else num_balanced)
