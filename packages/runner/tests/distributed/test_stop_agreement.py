"""Agreement of processes on a step, as threads that share a store."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import pytest

from layerkit_runner.distributed import stop_signals
from layerkit_runner.distributed.stop_signals import Requests, StopAgreement


class Store:
    """A key-value store in memory, with the two calls of JAX's client."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self.failures = 0

    def key_value_set(self, key: str, value: str, *, allow_overwrite: bool) -> None:
        assert allow_overwrite
        self._values[key] = value
        self._fail_if_due()

    def _fail_if_due(self) -> None:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the coordinator does not answer")

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        self._fail_if_due()
        return [(name, value) for name, value in dict(self._values).items() if key in name]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Process:
    """One process: its requests and its agreement."""

    def __init__(self, store: Store, index: int, count: int, *, run: int = 0) -> None:
        self.pending = Requests()
        self.agreement = StopAgreement(store, index, count, self._take, run=run)

    def _take(self) -> Requests:
        taken, self.pending = self.pending, Requests()
        return taken

    def run_to(self, step: int) -> None:
        for each in range(1, step + 1):
            assert self.agreement.reached(each - 1) is None
            assert self.agreement.may_start(each)


@pytest.fixture(autouse=True)
def poll_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes look for requests ten times a second."""
    monkeypatch.setattr(stop_signals, "_POLL_SECONDS", 0.1)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def processes(store: Store) -> Iterator[list[Process]]:
    made = [Process(store, index, 3) for index in range(3)]
    yield made
    for process in made:
        process.agreement.close()


def request(processes: list[Process], index: int, **requests: Any) -> None:
    """Let a process receive requests, and wait until all processes know of them."""
    processes[index].pending = Requests(**requests)
    for process in processes:
        wait_until(lambda: process.agreement.is_open)  # noqa: B023


def all_reach(processes: list[Process], step: int) -> list[Requests | None]:
    """Return the results of concurrent calls of `reached`."""
    answers: list[Requests | None] = [None] * len(processes)

    def ask(index: int) -> None:
        answers[index] = processes[index].agreement.reached(step)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(processes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return answers


def test_all_stop_after_the_newest_step_that_any_has_started(processes: list[Process]):
    for process, step in zip(processes, (3, 5, 4), strict=True):
        process.run_to(step)
    request(processes, 2, stop=15)
    for process, step in zip(processes, (3, 5, 4), strict=True):
        assert not process.agreement.may_start(step + 1)
    behind = processes[0].agreement
    assert behind.reached(3) is None
    assert behind.may_start(4)
    assert behind.reached(4) is None
    assert processes[2].agreement.reached(4) is None
    for index in (0, 2):
        assert processes[index].agreement.may_start(5)
        assert not processes[index].agreement.may_start(6)
    assert all_reach(processes, 5) == [Requests(stop=15)] * 3


def test_request_to_save_is_met_and_the_next_request_as_well(processes: list[Process]):
    for process in processes:
        process.run_to(2)
    request(processes, 1, saves=True)
    assert all_reach(processes, 2) == [Requests(saves=True)] * 3
    for process in processes:
        assert process.agreement.may_start(3)
    request(processes, 0, stop=2)
    assert all_reach(processes, 3) == [Requests(stop=2)] * 3


def test_requests_of_two_processes_are_met_together(processes: list[Process]):
    for process in processes:
        process.run_to(1)
    processes[0].pending = Requests(saves=True)
    request(processes, 1, stop=15)
    assert all_reach(processes, 1) == [Requests(stop=15, saves=True)] * 3


def test_request_after_one_process_finished_stops_none(processes: list[Process]):
    for process, step in zip(processes, (4, 3, 4), strict=True):
        process.run_to(step)
    assert processes[0].agreement.finish()
    request(processes[1:], 0, stop=15)
    assert processes[1].agreement.reached(3) is None
    assert processes[1].agreement.may_start(4)
    for process in processes[1:]:
        assert process.agreement.reached(4) is None
        assert process.agreement.finish()


def test_request_before_a_process_finishes_is_met_first(processes: list[Process]):
    for process in processes:
        process.run_to(4)
    request(processes, 1, stop=15)
    for process in processes:
        assert not process.agreement.finish()
    assert all_reach(processes, 4) == [Requests(stop=15)] * 3


def test_request_is_met_after_the_store_failed_for_a_while(store: Store, processes: list[Process]):
    for process in processes:
        process.run_to(2)
    store.failures = 7
    request(processes, 0, stop=15)
    assert store.failures == 0
    assert all_reach(processes, 2) == [Requests(stop=15)] * 3


def test_a_second_run_does_not_meet_the_requests_of_the_first(store: Store):
    first = Process(store, 0, 1)
    request([first], 0, stop=15)
    assert first.agreement.reached(0) == Requests(stop=15)
    first.agreement.close()
    second = Process(store, 0, 1, run=1)
    time.sleep(0.5)  # It looks for requests ten times a second.
    assert not second.agreement.is_open
    second.agreement.close()


def test_request_before_or_in_a_rollback_is_met_right_after_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stop_signals, "_runs", itertools.repeat(0))
    both = [stop_signals.StopSignals(), stop_signals.StopSignals()]
    for index, process in enumerate(both):
        process.agree_by(store, index, 2)
        assert not process.agreed(58) and process.may_start(59)
    both[1].request_stop(signal.SIGTERM)
    wait_until(lambda: all(process.gives_up_waiting() for process in both))
    for process in both:
        process.go_back(59 - 40)
    with futures.ThreadPoolExecutor() as pool:
        assert [*pool.map(lambda process: process.agreed(40), both)] == [True, True]
    for process in both:
        assert process._agreement is not None
        process._agreement.close()
