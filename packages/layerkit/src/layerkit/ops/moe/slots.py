"""Assignment of choices to slots, and the movement of tokens to slots and back.

A choice is one of the experts of one token; choices are numbered token by token. A slot is a row of
the buffer that the experts multiply. Each choice has at most one slot and each slot at most one
choice, so that both rows and their gradients are moved by gathers. The gradients of JAX's gather
would be scatters, which are slow on every backend.
"""

from __future__ import annotations

import functools
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

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
    def of_choices(cls, slot_of_choice: jax.Array, *, num_slots: int) -> Slots:
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
