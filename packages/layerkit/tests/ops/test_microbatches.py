"""Tests of microbatches: split, merge, queue and selection of batch arguments."""

from __future__ import annotations

import collections

import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.errors import ConfigError
from layerkit.ops.attention.masks import AttentionMask
from layerkit.ops.microbatches import (
    Arguments,
    advance_queue,
    make_queue,
    merge_microbatches,
    read_queue,
    split_microbatches,
)


def test_microbatches_take_strided_rows_of_the_batch():
    x = np.arange(12).reshape(6, 2)
    microbatches = split_microbatches(x, 3)
    # Of two devices with three rows each, both have a row of every microbatch.
    np.testing.assert_array_equal(microbatches[:, :, 0] // 2, [[0, 3], [1, 4], [2, 5]])
    np.testing.assert_array_equal(merge_microbatches(microbatches), x)


@pytest.mark.parametrize(("holders", "slots"), [(1, 1), (1, 4), (3, 1), (3, 2), (2, 3)])
def test_queue_returns_items_in_order(holders, slots):
    stages, length = 3, holders * slots
    if holders not in (1, stages):
        stages = holders
    waiting = collections.deque(range(length))
    queue = make_queue(jnp.arange(length)[:, None], holders)
    for tick in range(3 * length + 1):
        np.testing.assert_array_equal(read_queue(queue, tick)[:, 0], waiting)
        joining = 100 + tick
        leaving, queue = advance_queue(queue, jnp.full((stages, 1), -1).at[-1].set(joining), tick)
        assert leaving[0] == waiting.popleft()
        waiting.append(joining)


def test_arguments_are_split_if_their_first_axis_is_the_batch():
    mask = AttentionMask.causal_mask(6, 3)
    bias, scale = np.ones((1, 2)), jnp.float32(2.0)
    arguments = Arguments((bias, "name"), {"mask": mask, "scale": scale}, batch=6, owner="Pipe()")
    assert [leaf.shape for leaf in arguments.by_row] == [(6, 3), (6, 3)]
    assert [leaf.shape for leaf in arguments.shared] == [(1, 2), ()]
    halves = [leaf[:3] for leaf in arguments.by_row]
    (new_bias, name), result = arguments.replace(halves, [bias + 1, scale])
    assert name == "name" and result["mask"].causal and result["scale"] is scale
    np.testing.assert_array_equal(new_bias, bias + 1)
    np.testing.assert_array_equal(result["mask"].query_positions, mask.query_positions[:3])


def test_arguments_raise_for_an_array_with_other_rows(raises):
    with raises(ConfigError, owner="Pipe()", field="shape of mask.query_positions", value=[5, 3]):
        Arguments((), {"mask": AttentionMask.causal_mask(5, 3)}, batch=6, owner="Pipe()")
