"""Exchanges of rows, compared with NumPy, on simulated devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from layerkit.errors import ConfigError
from layerkit.ops.moe.exchange import exchange_rows, plan_exchange, select_exchange

DEVICES, EXPERTS, ROWS, DIMS = 4, 8, 12, 3
HERE = EXPERTS // DEVICES
SPLIT = PartitionSpec("expert")


def drawn(seed=0):
    """Numbers of rows for each expert `[devices, experts]`, with empty ones, and rows."""
    random = np.random.default_rng(seed)
    counts = np.stack([random.multinomial(ROWS - 2, [1 / EXPERTS] * EXPERTS) for _ in range(4)])
    return counts.astype(np.int32), random.normal(size=(DEVICES, ROWS, DIMS)).astype(np.float32)


def on_devices(fn):
    """Run a function of each device's shards, whose leading axis is the device."""

    def local(*shards):
        return jax.tree.map(lambda x: x[None], fn(*(shard[0] for shard in shards)))

    mesh = Mesh(jax.devices()[:DEVICES], ("expert",))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT, check_vma=False)
    return jax.jit(mapped)


def plan(counts, *, most, block):
    return plan_exchange(counts, num_rows=ROWS, max_received=most, block=block, axes=("expert",))


def expected_rows(counts, rows, *, most, block):
    """What each device receives, and whether each row was sent, `[devices, rows]`."""
    starts = np.cumsum(counts, axis=1) - counts
    received, was_sent = [], np.zeros((DEVICES, ROWS), bool)
    for device in range(DEVICES):
        groups, room = [[] for _ in range(HERE)], most
        for sender in range(DEVICES):
            for local in range(HERE):
                expert = device * HERE + local
                for row in starts[sender, expert] + np.arange(counts[sender, expert]):
                    if room:
                        room -= 1
                        was_sent[sender, row] = True
                        groups[local].append(rows[sender, row])
        padded = [g + [np.zeros(DIMS)] * (-len(g) % block) for g in groups]
        flat = np.array([row for group in padded for row in group]).reshape(-1, DIMS)
        received.append((flat, [len(group) for group in padded]))
    return received, was_sent


@pytest.mark.parametrize(("most", "block"), [(DEVICES * ROWS, 1), (DEVICES * ROWS, 4), (9, 4)])
def test_rows_arrive_sorted_by_expert_and_return(most, block):
    counts, rows = drawn()

    def there_and_back(counts, rows):
        slices, groups = plan(counts, most=most, block=block)
        received = exchange_rows(rows, slices)
        return received, groups.sizes, exchange_rows(received, slices.reversed())

    received, sizes, returned = on_devices(there_and_back)(counts, rows)
    expected, was_sent = expected_rows(counts, rows, most=most, block=block)
    for device, (of_device, sizes_of_device) in enumerate(expected):
        np.testing.assert_array_equal(sizes[device], sizes_of_device)
        np.testing.assert_allclose(received[device, : len(of_device)], of_device)
        np.testing.assert_array_equal(received[device, len(of_device) :], 0.0)
    np.testing.assert_array_equal(returned, np.where(was_sent[..., None], rows, 0.0))
    assert was_sent.sum() == min(most * DEVICES, counts.sum()) or most == 9


def test_gradients_return_to_the_senders():
    counts, rows = drawn(1)

    def gradient(counts, rows):
        slices, _ = plan(counts, most=DEVICES * ROWS, block=1)
        loss = lambda rows: jnp.sum(jnp.sin(exchange_rows(rows, slices)))  # noqa: E731
        return jax.grad(loss)(rows)

    was_sent = np.arange(ROWS) < counts.sum(axis=1, keepdims=True)
    result = on_devices(gradient)(counts, rows)
    np.testing.assert_allclose(result, np.where(was_sent[..., None], np.cos(rows), 0.0), atol=1e-6)


CALL = {"name": "auto", "platform": "tpu", "num_devices": 8, "num_choices": 2}
CALL |= {"splits_tokens": True, "owner": "moe"}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "ragged_all_to_all"),
        ({"platform": "cuda"}, "ragged_all_to_all"),
        ({"platform": "cpu"}, "all_gather"),
        ({"num_choices": 8}, "all_gather"),
        ({"splits_tokens": False}, "all_gather"),
        ({"platform": "cpu", "name": "ragged_all_to_all"}, "ragged_all_to_all"),
        ({"name": "all_gather"}, "all_gather"),
    ],
)
def test_auto_selects_the_exchange_of_fewer_rows(change, expected):
    name, reason = select_exchange(**{**CALL, **change})
    assert name == expected
    assert reason.startswith("auto: ") is ("name" not in change)


def test_exchange_of_tokens_that_are_not_split_raises(raises):
    with raises(ConfigError, field="expert_exchange", value="ragged_all_to_all"):
        select_exchange(**{**CALL, "name": "ragged_all_to_all", "splits_tokens": False})
