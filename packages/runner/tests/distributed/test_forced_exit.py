"""Forced exits of processes with contexts that cannot be closed."""

from __future__ import annotations

import subprocess
import sys

PROCESS = """
import contextlib, threading
from layerkit_runner.distributed.watchdog import forced_exit_on, notifying_others

def tell(reason):
    print("told", reason, flush=True)

with contextlib.ExitStack() as stack:
    stack.callback(threading.Event().wait)  # a file that cannot be closed
    stack.enter_context(notifying_others(tell))
    stack.enter_context(forced_exit_on(TimeoutError, exit_code=7))
    raise TimeoutError("the disk does not answer")
"""


def test_forced_exit_on_an_error_closes_no_outer_context():
    done = subprocess.run(
        [sys.executable, "-c", PROCESS], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 7
    assert done.stderr == "runner: the disk does not answer\n"
    assert done.stdout == "told the disk does not answer\n"
