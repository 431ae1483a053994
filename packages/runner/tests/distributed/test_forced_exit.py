"""Ends of real processes that must not wait for what they leave open."""

from __future__ import annotations

import subprocess
import sys

PROCESS = """
import contextlib, threading
from layerkit_runner.distributed.forced_exit import forced_exit_on, told_to_others

def tell(reason):
    print("told", reason, flush=True)

with contextlib.ExitStack() as stack:
    stack.callback(threading.Event().wait)  # a file that cannot be closed
    stack.enter_context(told_to_others(tell))
    stack.enter_context(forced_exit_on(TimeoutError, exit_code=7))
    raise TimeoutError("the disk does not answer")
"""


def test_process_leaves_before_anything_outside_is_closed():
    done = subprocess.run(
        [sys.executable, "-c", PROCESS], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 7
    assert done.stderr == "runner: the disk does not answer\n"
    assert done.stdout == "told the disk does not answer\n"
