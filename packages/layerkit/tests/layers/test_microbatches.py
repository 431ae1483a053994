"""Microbatches: cut and joined, queued as `collections.deque` does it, and told from the rest."""

from __future__ import annotations

import collections
import re

import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.layers.masks import AttentionMask
from layerkit.layers.microbatches import Arguments, cut, dequeue, enqueue, join, pass_on


def test_each_microbatch_has_rows_from_all_over_the_batch():
    x = np.arange(12).reshape(6, 2)
    microbatches = cut(x, 3)
    # Of two devices with three rows each, both have a row of every microbatch.
    np.testing.assert_array_equal(microbatches[:, :, 0] // 2, [[0, 3], [1, 4], [2, 5]])
    np.testing.assert_array_equal(join(microbatches), x)


@pytest.mark.parametrize(("holders", "slots"), [(1, 1), (1, 4), (3, 1), (3, 2), (2, 3)])
def test_a_queue_is_first_in_first_out(holders, slots):
    stages, length = 3, holders * slots
    if holders not in (1, stages):
        stages = holders
    waiting = collections.deque(range(length))
    queue = enqueue(jnp.arange(length)[:, None], holders)
    for tick in range(3 * length + 1):
        np.testing.assert_array_equal(dequeue(queue, tick)[:, 0], waiting)
        joining = 100 + tick
        leaving, queue = pass_on(queue, jnp.full((stages, 1), -1).at[-1].set(joining), tick)
        assert leaving[0] == waiting.popleft()
        waiting.append(joining)


def test_arguments_are_told_apart_by_their_first_axis():
    mask = AttentionMask.causal_mask(6, 3)
    bias, scale = np.ones((1, 2)), jnp.float32(2.0)
    arguments = Arguments((bias, "name"), {"mask": mask, "scale": scale}, batch=6, owner="Pipe()")
    assert [leaf.shape for leaf in arguments.by_row] == [(6, 3), (6, 3)]
    assert [leaf.shape for leaf in arguments.shared] == [(1, 2), ()]
    halves = [leaf[:3] for leaf in arguments.by_row]
    (found_bias, name), found = arguments.replaced(halves, [bias + 1, scale])
    assert name == "name" and found["mask"].causal and found["scale"] is scale
    np.testing.assert_array_equal(found_bias, bias + 1)
    np.testing.assert_array_equal(found["mask"].query_positions, mask.query_positions[:3])


def test_an_argument_of_other_rows_is_refused():
    text = (
        "Pipe(): the argument mask.query_positions has the shape (5, 3); its first axis must be the"
        " batch of 6 rows, to be cut into microbatches, or of size 1, to be shared by them"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        Arguments((), {"mask": AttentionMask.causal_mask(5, 3)}, batch=6, owner="Pipe()")
