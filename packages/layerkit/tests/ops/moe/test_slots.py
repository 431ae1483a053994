"""Slots: assignment, order, and the movement of rows and gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.ops.moe import slots as moe_slots
from layerkit.ops.moe.slots import Slots, capacity_of, from_slots, to_slots, weighted_sum

capacity_slots = jax.jit(moe_slots.capacity_slots, static_argnames=("num_experts", "capacity"))
sorted_slots = jax.jit(moe_slots.sorted_slots, static_argnames=("num_experts", "block"))
TOKENS, CHOICES, EXPERTS, DIMS = 12, 2, 3, 4


def drawn_experts(seed=0):
    """Two different experts for each token, and padding at the third."""
    random = np.random.default_rng(seed)
    experts = np.array([random.permutation(EXPERTS)[:CHOICES] for _ in range(TOKENS)], np.int32)
    experts[2] = EXPERTS
    return experts


def layouts():
    experts = jnp.asarray(drawn_experts())
    yield capacity_slots(experts, num_experts=EXPERTS, capacity=4)
    for block in (1, 8):
        yield sorted_slots(experts, num_experts=EXPERTS, block=block)[0]


@pytest.mark.parametrize(
    ("group_size", "capacity_factor", "expected"),
    # int(16·1/8) = 2 → 4; int(16·2/8) = 4; int(16·2.1/8) = 4; int(16·2.5/8) = 5 → 8
    [(16, 1.0, 4), (16, 2.0, 4), (16, 2.1, 4), (16, 2.5, 8), (2, 0.5, 4), (1024, 1.25, 160)],
)
def test_capacity_is_rounded_up_to_a_multiple_of_4(group_size, capacity_factor, expected):
    result = capacity_of(group_size, num_experts=8, capacity_factor=capacity_factor)
    assert result == expected


def test_capacity_slots_equal_a_loop():
    experts = drawn_experts(seed=4)
    slots = capacity_slots(jnp.asarray(experts), num_experts=EXPERTS, capacity=4)
    expected, taken = np.full((TOKENS, CHOICES), EXPERTS * 4), np.zeros(EXPERTS, int)
    for choice in range(CHOICES):
        for token in range(TOKENS):
            expert = experts[token, choice]
            if expert < EXPERTS and taken[expert] < 4:
                expected[token, choice] = expert * 4 + taken[expert]
                taken[expert] += 1
    np.testing.assert_array_equal(slots.slot_of_choice, expected)
    assert np.sum(expected == EXPERTS * 4) > CHOICES  # more than padding was dropped


@pytest.mark.parametrize("block", [1, 8])
@pytest.mark.parametrize("first", [0, 1])
def test_sorted_slots_hold_every_choice_of_local_experts(block, first):
    experts, here = drawn_experts() - first, EXPERTS - first
    experts[2] = here
    slots, groups = sorted_slots(jnp.asarray(experts), num_experts=here, block=block)
    ends = np.cumsum(groups.sizes)
    starts = ends - groups.sizes
    assert np.all(starts % groups.block == 0) and len(slots.choice_of_slot) % groups.block == 0
    assert ends[-1] <= len(slots.choice_of_slot)
    for expert in range(here):
        rows = slots.choice_of_slot[starts[expert] : ends[expert]]
        expected = np.flatnonzero(experts.ravel() == expert)
        np.testing.assert_array_equal(rows[rows < TOKENS * CHOICES], expected)
    assert np.sum(slots.choice_of_slot < TOKENS * CHOICES) == np.sum(
        (experts >= 0) & (experts < here)
    )


def test_slot_maps_are_inverse():
    for slots in layouts():
        num_slots, num_choices = len(slots.choice_of_slot), TOKENS * CHOICES
        flat = np.asarray(slots.slot_of_choice).ravel()
        for choice in range(num_choices):
            assert flat[choice] == num_slots or slots.choice_of_slot[flat[choice]] == choice
        filled = np.asarray(slots.choice_of_slot)
        assert np.sum(filled < num_choices) == np.sum(flat < num_slots)


def test_rows_and_gradients_equal_one_hot_matrices():
    def differentiate(move, given, gradient):
        moved, pull = jax.vjp(move, given)
        return moved, pull(gradient)[0]

    @jax.jit
    def there_and_back(slots, tokens, rows, of_choices):
        return (
            *differentiate(lambda a: to_slots(a, slots), tokens, rows),
            *differentiate(lambda a: from_slots(a, slots), rows, of_choices),
        )

    random = np.random.default_rng(0)
    tokens = random.normal(size=(TOKENS, DIMS)).astype(np.float32)
    of_choices = random.normal(size=(TOKENS, CHOICES, DIMS)).astype(np.float32)
    for slots in layouts():
        num_slots = len(slots.choice_of_slot)
        seats = np.eye(num_slots + 1)[slots.slot_of_choice, :num_slots]  # [tokens, choices, slots]
        rows = random.normal(size=(num_slots, DIMS)).astype(np.float32)
        expected = (
            np.einsum("tkr,td->rd", seats, tokens),
            np.einsum("tkr,rd->td", seats, rows),
            np.einsum("tkr,rd->tkd", seats, rows),
            np.einsum("tkr,tkd->rd", seats, of_choices),
        )
        result = there_and_back(slots, tokens, rows, of_choices)
        for a, b in zip(result, expected, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_slots_can_be_mapped_over_groups():
    experts = np.stack([drawn_experts(seed) for seed in (0, 1, 2)])
    tokens = np.random.default_rng(0).normal(size=(3, TOKENS, DIMS)).astype(np.float32)

    def there_and_back(tokens, experts):
        slots = capacity_slots(experts, num_experts=EXPERTS, capacity=4)
        return jnp.sum(jnp.sin(from_slots(to_slots(tokens, slots), slots)))

    alone = jax.jit(jax.grad(there_and_back))
    expected = np.stack([alone(*pair) for pair in zip(tokens, experts, strict=True)])
    result = jax.jit(jax.vmap(jax.grad(there_and_back)))(tokens, experts)
    np.testing.assert_allclose(result, expected, atol=1e-5)


def test_weighted_sum_accumulates_in_float32():
    # 256 + 1 is 256 in bfloat16: taken one after the other, the ones would vanish.
    of_choices = jnp.array([[[256.0], [1.0], [1.0]]], jnp.bfloat16)
    summed = weighted_sum(of_choices, jnp.ones((1, 3)))
    assert summed.item() == 258.0 and summed.dtype == jnp.bfloat16
    slots = Slots.from_choices(jnp.array([[0, 1, 2]]), num_slots=3)
    _, pull = jax.vjp(lambda tokens: to_slots(tokens, slots), jnp.zeros((1, 1), jnp.bfloat16))
    assert pull(of_choices[0])[0].item() == 258.0
