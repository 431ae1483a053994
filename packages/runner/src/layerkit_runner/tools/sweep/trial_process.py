"""The process of one trial: `runner` as anyone calls it, which leaves when its sweep is gone.

    python -m layerkit_runner.tools.sweep.trial_process LOCK --exp=… --job_log_dir=…

The sweep holds the other end of the standard input and never writes to it. When the sweep is
killed, the operating system closes it, and this process takes that for a SIGTERM: it saves and
leaves, and does not train on where nobody reads. LOCK is held meanwhile, so that a process that
takes the trial up does not write to the folder beside this one.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from layerkit_runner.files.locks import lock


def main() -> int:
    """Runs the command in the words of this process; returns its exit code."""
    threading.Thread(target=_leave_with_sweep, daemon=True).start()
    path, *words = sys.argv[1:]
    with lock(Path(path)):
        from layerkit_runner import cli

        return cli.main(words)


def _leave_with_sweep() -> None:
    # Not sys.stdin.read: a thread inside of a stream keeps the interpreter from ending.
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
