from __future__ import annotations

import threading

import pytest

from layerkit_runner.observers.base import Background


def test_jobs_run_in_order_without_blocking_submit():
    background, gate, done = Background(), threading.Event(), []
    background.submit(gate.wait, 20)
    for number in range(5):
        background.submit(done.append, number)
    assert done == []
    assert background.num_pending
    gate.set()
    background.close()
    assert done == [0, 1, 2, 3, 4]


def fail():
    raise OSError("bucket not found")


def wait_until_idle(background):
    while background.num_pending:
        threading.Event().wait(0.001)


@pytest.mark.parametrize("waits", [True, False])
def test_no_job_runs_after_a_failure_which_close_raises(waits):
    background, gate, done = Background(), threading.Event(), []
    background.submit(gate.wait, 20)
    background.submit(fail)
    background.submit(done.append, 1)
    gate.set()
    if waits:
        wait_until_idle(background)
    with pytest.raises(OSError, match="bucket not found"):
        background.close()
    with pytest.raises(RuntimeError):  # closed for good
        background.submit(done.append, 2)
    assert done == []


def test_submit_raises_the_failure_of_an_earlier_job():
    background = Background()
    background.submit(fail)
    wait_until_idle(background)
    with pytest.raises(OSError, match="bucket not found"):
        background.submit(print)
    background.close()
