"""Prefetch: states of what was delivered, errors passed on, no thread that keeps one waiting."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError
from layerkit_inputs import LocalText, Prefetch
from layerkit_inputs.base.base_input import BaseInput


class Gated(BaseInput):
    """Counts up; announces each batch it has made, and fails where told to."""

    fails_at: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.made = threading.Semaphore(0)
        self.at = 0
        self.is_let_go = False

    def _next(self) -> NestedMap:
        if self.at == self.fails_at:
            raise OSError("the disk is away")
        self.at += 1
        self.made.release()
        return NestedMap(ids=np.full(self.batch_size, self.at))

    def _reset(self) -> None:
        self.at = 0

    def _close(self) -> None:
        self.is_let_go = True


@pytest.fixture
def few_objects() -> Iterator[None]:
    """Hide the objects of other tests from the garbage collector, which then is quick."""
    gc.freeze()
    yield
    gc.unfreeze()


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "layerkit-prefetch"]


def test_prefetch_state_counts_delivered_batches_only():
    source = Gated(batch_size=1, is_training=True)
    ahead = Prefetch(source=source, depth=3)
    assert ahead.get_next().ids[0] == 1
    for _ in range(4):  # one delivered, three waiting
        assert source.made.acquire(timeout=30)
    assert source.at == 4
    state = ahead.get_state()
    assert state["position"] == {"num_delivered": 1}
    plain = Gated(batch_size=1, is_training=True)
    plain.set_state(state)
    assert plain.get_next().ids[0] == 2
    ahead.set_state(state)
    assert ahead.get_next().ids[0] == 2
    ahead.close()


def test_tokens_and_states_are_the_same_with_and_without_it(tmp_path):
    for name in "abc":
        (tmp_path / name).write_bytes(b"some text" + name.encode())

    def make():
        return LocalText(batch_size=2, paths=[str(tmp_path)], seq_length=4, is_training=True)

    plain, ahead = make(), Prefetch(source=make())
    assert (ahead.token_unit, ahead.state_scope) == ("byte", "global")
    for _ in range(4):
        assert ahead.get_state() == plain.get_state()
        np.testing.assert_array_equal(ahead.get_next().ids, plain.get_next().ids)
    ahead.close()
    assert Prefetch(source=Gated(batch_size=1)).state_scope == "host"


def check_on_the_thread(batch: NestedMap) -> None:
    assert threading.current_thread().name == "layerkit-prefetch"
    if batch.ids[0] == 3:
        raise OSError("the disk is away")


@pytest.mark.parametrize(
    ("fails_at", "check"), [(2, None), (None, check_on_the_thread)], ids=["source", "check"]
)
def test_an_error_of_source_or_check_comes_after_the_batches_before_it(fails_at, check):
    source = Gated(batch_size=1, is_training=True, fails_at=fails_at)
    ahead = Prefetch(source=source, depth=4, check=check)
    assert [int(ahead.get_next().ids[0]) for _ in range(2)] == [1, 2]
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is away"):
            ahead.get_next()
    assert ahead.get_state()["position"] == {"num_delivered": 2}
    ahead.reset()
    assert ahead.get_next().ids[0] == 1
    ahead.close()


def test_closing_ends_the_thread_and_closes_the_source():
    before = set(prefetch_threads())
    source = Gated(batch_size=1, is_training=True)
    ahead = Prefetch(source=source)
    ahead.get_next()
    (own,) = set(prefetch_threads()) - before
    ahead.close()
    assert not own.is_alive() and source.is_let_go


def test_forgetting_the_input_ends_the_thread(few_objects):
    before = set(prefetch_threads())
    ahead = Prefetch(source=Gated(batch_size=1, is_training=True))
    ahead.get_next()
    (own,) = set(prefetch_threads()) - before
    del ahead
    gc.collect()
    assert not own.is_alive()


def test_a_field_that_contradicts_the_source_raises(raises):
    with raises(ConfigError, field="is_training", value=True):
        Prefetch(source=Gated(batch_size=3), is_training=True)


@pytest.mark.parametrize("how", ["endless", "hanging"])
def test_the_interpreter_ends_with_batches_waiting_or_a_source_that_hangs(how):
    code = f"""
import threading, numpy as np
from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError
from layerkit_inputs import BaseInput, Prefetch

class Source(BaseInput):
    calls = 0
    def get_next(self):
        self.calls += 1
        if {how!r} == "hanging" and self.calls == 2:
            threading.Event().wait()
        return NestedMap(ids=np.zeros(1))

ahead = Prefetch(source=Source(batch_size=1, is_training=True))
ahead.get_next()
print("done")
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout == "done\n" and result.stderr == ""


def test_prefetch_reports_the_number_of_ready_batches():
    source = Gated(batch_size=1, is_training=True, fails_at=2)
    ahead = Prefetch(source=source, depth=4)
    assert ahead.num_ready == 0  # it has not begun
    assert ahead.wait(30)
    ahead.peek()
    for _ in range(2):
        assert source.made.acquire(timeout=30)
    while ahead.num_ready < 2:
        assert ahead.wait(30)
    assert [int(ahead.get_next().ids[0]) for _ in range(2)] == [1, 2]
    assert ahead.num_ready == 0
    assert ahead.wait(30)  # for the error, which is an answer as well
    with pytest.raises(OSError, match="the disk is away"):
        ahead.get_next()


def test_prefetch_waits_at_most_the_timeout():
    class Stuck(Gated):
        def _next(self) -> NestedMap:
            self.made.acquire()
            return super()._next()

    source = Stuck(batch_size=1, is_training=True)
    ahead = Prefetch(source=source)
    assert not ahead.wait(0.0)
    source.made.release()
    assert ahead.wait(30)
    source.made.release(1000)
    ahead.close()


def test_metrics_and_skipped_records_are_those_of_the_source():
    class Rated(Gated):
        has_score_metrics = True
        has_prediction_metrics = True
        num_skipped = 3

        def score_metrics(self, scores):
            return {"total": sum(scores.values())}

        def prediction_metrics(self, predictions):
            return {"examples": float(len(predictions))}

    ahead = Prefetch(source=Rated(batch_size=1, is_training=True))
    assert ahead.has_score_metrics and ahead.has_prediction_metrics and ahead.num_skipped == 3
    assert ahead.score_metrics({0: 1.0, 5: 2.5}) == {"total": 3.5}
    assert ahead.prediction_metrics({3: "yes"}) == {"examples": 1.0}


class Exiting(Gated):
    """Raises what it is given instead of its second batch, or of the state after it."""

    error: BaseException = SystemExit(0)
    fails_in_state: bool = False

    def get_next(self) -> NestedMap:
        if self.at == 1 and not self.fails_in_state:
            raise self.error
        return super().get_next()

    def _reader_state(self) -> dict[str, int]:
        if self.at == 2 and self.fails_in_state:
            raise self.error
        return super()._reader_state()


@pytest.mark.parametrize("fails_in_state", [False, True])
@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit()])
def test_exit_of_source_is_an_error_that_names_the_input(error, fails_in_state):
    source = Exiting(
        batch_size=1, is_training=True, name="web", error=error, fails_in_state=fails_in_state
    )
    ahead = Prefetch(source=source)
    ahead.get_next()
    assert ahead.wait(30)
    with pytest.raises(RuntimeError, match=rf"^Exiting 'web': .*{type(error).__name__}") as caught:
        ahead.get_next()
    assert caught.value.__cause__ is error


def test_interrupt_of_source_reaches_the_reader_of_the_batches():
    ahead = Prefetch(source=Exiting(batch_size=1, is_training=True, error=KeyboardInterrupt()))
    ahead.get_next()
    assert ahead.wait(30)
    with pytest.raises(KeyboardInterrupt):
        ahead.get_next()
