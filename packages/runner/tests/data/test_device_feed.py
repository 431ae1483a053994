"""DeviceFeed: prefetched batches, exact positions, and idle time of the devices."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.base_input import BaseInput
from layerkit_inputs.base.prefetch import Prefetch
from layerkit_runner.data.train_inputs import DeviceFeed
from layerkit_runner.errors import UsageError
from layerkit_runner.partitioning import SpmdPartitioner


class Gated(BaseInput):
    """Counts up, a batch for each time that `gate` was released."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.gate = threading.Semaphore(0)
        self.at = 0

    def _next(self) -> NestedMap:
        self.gate.acquire()
        self.at += 1
        return NestedMap(ids=np.full(8, self.at, np.int32))

    def _reset(self) -> None:
        self.at = 0


@pytest.fixture
def gated() -> Any:
    source = Gated(batch_size=8, is_training=True)
    ahead = Prefetch(source=source, depth=4)
    partitioner = SpmdPartitioner()
    partitioner.start()
    yield SimpleNamespace(source=source, ahead=ahead, partitioner=partitioner)
    for _ in range(100):
        source.gate.release()
    ahead.close()


def wait_until_ready(ahead: Prefetch, count: int) -> None:
    for _ in range(3000):
        if ahead.num_ready == count:
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"{ahead.num_ready} batches are ready, not {count}")


def test_feed_prefetches_up_to_depth_and_its_state_counts_returned_batches(gated: Any):
    feed = DeviceFeed(gated.ahead, gated.partitioner, depth=2)
    assert feed.state()["position"] == {"num_delivered": 0}
    feed.fill()  # nothing is ready, so nothing is waited for
    for _ in range(4):
        gated.source.gate.release()
    assert gated.ahead.wait(30)
    wait_until_ready(gated.ahead, 4)
    feed.fill()
    assert gated.ahead.num_ready == 2
    assert feed.state()["position"] == {"num_delivered": 0}
    for number in (1, 2, 3):
        batch, idle_seconds = feed.take(lambda: True)
        assert isinstance(batch.ids, jax.Array)
        assert batch.ids.sharding == gated.partitioner.batch_sharding()
        assert batch.ids.tolist() == [number] * 8
        assert idle_seconds == 0.0
        assert feed.state()["position"] == {"num_delivered": number}
    again = Gated(batch_size=8, is_training=True)
    again.gate.release(4)
    again.set_state(feed.state())
    assert again.get_next().ids[0] == 4


def test_peek_does_not_consume_the_batch(gated: Any):
    feed = DeviceFeed(gated.ahead, gated.partitioner)
    gated.source.gate.release(3)
    assert feed.peek().ids[0] == feed.peek().ids[0] == 1
    assert feed.state()["position"] == {"num_delivered": 0}
    assert feed.take(lambda: True)[0].ids[0] == 1
    assert feed.peek().ids[0] == 2
    assert feed.state()["position"] == {"num_delivered": 1}
    assert feed.take(lambda: True)[0].ids[0] == 2


def test_idle_seconds_exclude_time_in_which_the_devices_work(gated: Any):
    ticks = iter([100.0, 107.5])
    feed = DeviceFeed(gated.ahead, gated.partitioner, clock=lambda: next(ticks))
    asked = []

    def is_idle() -> bool:
        """Busy the first two times it is asked; then a batch is made."""
        asked.append(len(asked))
        if len(asked) == 3:
            gated.source.gate.release()
        return len(asked) >= 3

    batch, idle_seconds = feed.take(is_idle)
    assert batch.ids[0] == 1
    assert idle_seconds == 7.5
    assert len(asked) == 3


def test_error_of_the_source_is_raised_after_the_batches_before_it(gated: Any):
    class Failing(Gated):
        """Has two batches."""

        def _next(self) -> NestedMap:
            if self.at == 2:
                raise OSError("the disk is away")
            return super()._next()

    source = Failing(batch_size=8, is_training=True)
    source.gate.release(9)
    feed = DeviceFeed(Prefetch(source=source), gated.partitioner)
    for number in (1, 2):
        assert feed.take(lambda: True)[0].ids[0] == number
        feed.fill()
    with pytest.raises(UsageError, match="the disk is away"):
        feed.take(lambda: True)
