"""Rows laid out by expert: which choice fills which slot, and how tokens get there and back.

A choice is one of the experts of one token; choices are numbered token by token. A slot is a row in
the buffer on which the experts work. Each choice has at most one slot and each slot at most one
choice, so what moves rows one way by a gather moves gradients the other way by a gather too. Left
to itself JAX would scatter them, which is slow on every backend.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct


@struct.dataclass
class Slots:
    """Who sits where; both arrays say the same, from either side.

    Attributes:
      slot_of_choice: int32 `[tokens, choices]`; the number of slots where a choice has none.
      choice_of_slot: int32 `[slots]`; the number of choices (tokens times choices) where empty.
    """

    slot_of_choice: jax.Array
    choice_of_slot: jax.Array

    @classmethod
    def of_choices(cls, slot_of_choice: jax.Array, *, num_slots: int) -> Slots:
        """Completes `slot_of_choice` int32 `[tokens, choices]`; no slot may occur twice."""
        num_choices = slot_of_choice.size
        choices = jnp.arange(num_choices, dtype=jnp.int32)
        empty = jnp.full((num_slots,), num_choices, jnp.int32)
        filled = empty.at[slot_of_choice.reshape(-1)].set(choices, mode="drop")
        return cls(slot_of_choice, filled)


@jax.custom_vjp
def to_slots(tokens: jax.Array, slots: Slots) -> jax.Array:
    """Copies each token to the slots of its choices; empty slots are 0.

    Args:
      tokens: `[tokens, dims]`.
      slots: Of these tokens.

    Returns:
      `[slots, dims]`.
    """
    return _take(tokens, slots.choice_of_slot // slots.slot_of_choice.shape[1])


def _to_slots_fwd(tokens: jax.Array, slots: Slots) -> tuple[jax.Array, Slots]:
    return to_slots(tokens, slots), slots


def _to_slots_bwd(slots: Slots, gradient: jax.Array) -> tuple[jax.Array, Slots]:
    of_choices = _take(gradient, slots.slot_of_choice)
    summed = jnp.sum(of_choices, axis=1, dtype=jnp.float32).astype(gradient.dtype)
    return summed, _no_gradient(slots)


to_slots.defvjp(_to_slots_fwd, _to_slots_bwd)


@jax.custom_vjp
def from_slots(rows: jax.Array, slots: Slots) -> jax.Array:
    """What each choice finds in its slot; 0 without a slot.

    Args:
      rows: `[slots, dims]`.
      slots: Whose they are.

    Returns:
      `[tokens, choices, dims]`.
    """
    return _take(rows, slots.slot_of_choice)


def _from_slots_fwd(rows: jax.Array, slots: Slots) -> tuple[jax.Array, Slots]:
    return from_slots(rows, slots), slots


def _from_slots_bwd(slots: Slots, gradient: jax.Array) -> tuple[jax.Array, Slots]:
    return _take(gradient.reshape(-1, gradient.shape[-1]), slots.choice_of_slot), _no_gradient(
        slots
    )


from_slots.defvjp(_from_slots_fwd, _from_slots_bwd)


def weighted_sum(of_choices: jax.Array, weights: jax.Array) -> jax.Array:
    """`[..., choices, dims]` weighted by float32 `[..., choices]` → `[..., dims]`.

    Summed in float32; the result has the dtype of what is weighted.
    """
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    return product("...kd,...k->...d", of_choices, weights).astype(of_choices.dtype)


def _take(rows: jax.Array, index: jax.Array) -> jax.Array:
    """Rows by index; 0 where it is past the end."""
    return rows.at[index].get(mode="fill", fill_value=0)


def _no_gradient(slots: Slots) -> Slots:
    return jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), slots)
