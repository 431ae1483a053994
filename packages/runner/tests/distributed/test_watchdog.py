"""The watchdog, in processes that hang in different ways, and forced exits."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest

from layerkit_runner.distributed.watchdog import HUNG_EXIT_CODE, progress

PROCESS = """
import sys, threading, time
from layerkit_runner.distributed.watchdog import (
    phase, progress, reporting_to, training_is_complete, watched
)

seconds, what = float(sys.argv[1]), sys.argv[2]

def reads_forever():
    threading.Event().wait()

class Peers:
    def leave(self, exit_code, reason):
        print(reason, flush=True)

with reporting_to(Peers()), watched(seconds, process="process 3 of 4"):
    if what == "busy":
        for step in range(30):
            progress(f"step {step}")
            time.sleep(seconds / 10)
    elif what == "hang":
        threading.Thread(target=reads_forever, name="reader", daemon=True).start()
        progress("reading the batch of step 7")
        time.sleep(60)
    elif what == "report":
        progress("an outer phase")
        with training_is_complete(), phase("the final evaluation"):
            time.sleep(60)
    elif what == "start":
        time.sleep(2 * seconds)  # may take longer than a step
        progress("compiling", compiles=True)
        time.sleep(2 * seconds)
        progress("a step")
print("done")
time.sleep(2 * seconds)  # the watchdog has ended
"""


HUNG = "hung: reading the batch of step 7 has taken "


def run(seconds: float, what: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROCESS, str(seconds), what],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_hung_phase_is_reported_with_stacks():
    done = run(1.0, "hang")
    assert done.returncode == HUNG_EXIT_CODE
    assert done.stdout.startswith(HUNG)
    assert f"runner: process 3 of 4 {HUNG}" in done.stderr
    assert "in reads_forever" in done.stderr
    assert "is reader" in done.stderr


def test_hung_report_of_a_complete_training_is_named_and_leaves_the_exit_code():
    done = run(1.0, "report")
    assert done.returncode == 0
    assert "hung: the final evaluation has taken" in done.stderr
    assert "The training is complete" in done.stderr


def test_process_ends_while_its_standard_error_blocks():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    process = subprocess.run(
        [sys.executable, "-c", PROCESS, "1.0", "hang"],
        stdout=subprocess.PIPE,
        stderr=writer,
        text=True,
        timeout=120,
        check=False,
    )
    os.close(reader)
    os.close(writer)
    assert process.returncode == HUNG_EXIT_CODE
    assert process.stdout.startswith(HUNG)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["busy", "start"])
def test_watchdog_does_not_end_a_process_with_progress(what: str):
    done = run(2.0, what)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_progress_without_a_watchdog_has_no_effect():
    progress("a step")


FORCED_EXIT = """
import contextlib, threading
from layerkit_runner.distributed.watchdog import forced_exit_on, reporting_to

class Peers:
    def confirm_all_alive(self):
        print("all are alive", flush=True)

    def leave(self, exit_code, reason):
        print("told", exit_code, reason, flush=True)

with contextlib.ExitStack() as stack:
    stack.callback(threading.Event().wait)  # a file that cannot be closed
    stack.enter_context(reporting_to(Peers()))
    stack.enter_context(forced_exit_on(TimeoutError, exit_code=7))
    raise TimeoutError("the disk does not answer")
"""


def test_forced_exit_on_an_error_closes_no_outer_context():
    done = subprocess.run(
        [sys.executable, "-c", FORCED_EXIT], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 7
    assert done.stderr == "runner: the disk does not answer\n"
    assert done.stdout == "all are alive\ntold 7 the disk does not answer\n"
