"""Checks in a process of their own, so that one that hangs or dies takes nothing else with it.

A device that hangs does so in compiled code, where no Python timer interrupts it, and a wrong
compiler flag ends the whole process. So a group of checks runs in a worker, which tells each result
on a line; where none comes in time, the worker is killed and the rest of its group is left out.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from layerkit_runner.doctor.finding import Finding, failed, from_json, not_looked_at

_WORKER = (sys.executable, "-m", "layerkit_runner.doctor.worker")
_LAST_WORDS = 4


def run_group(
    group: str,
    limits: Mapping[str, float],
    options: Mapping[str, Any],
    *,
    command: Sequence[str] = _WORKER,
) -> Iterator[tuple[str, Finding]]:
    """The findings of a group of checks, each as soon as it is there.

    Args:
      group: A key of `worker.GROUPS`.
      limits: Seconds that each check of the group may take, by name, in the order in which the
        worker does them.
      options: Given to the worker, as JSON.
      command: Runs the worker.
    """
    with tempfile.TemporaryFile() as stderr:
        words = [*command, group, json.dumps(options)]
        # Whatever else runs on these devices keeps its memory.
        environ = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=stderr, env=environ)
        lines: queue.Queue[str] = queue.Queue()
        assert process.stdout is not None
        # A thread, because reading a pipe knows no time limit.
        reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
        reader.start()
        try:
            yield from _findings(process, lines, stderr, limits)
        finally:
            process.kill()
            # One that waits inside the system cannot even be killed, and is left behind.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
            reader.join(timeout=1)


def _findings(
    process: subprocess.Popen[bytes],
    lines: queue.Queue[str],
    stderr: IO[bytes],
    limits: Mapping[str, float],
) -> Iterator[tuple[str, Finding]]:
    names = list(limits)
    for position, name in enumerate(names):
        try:
            line = lines.get(timeout=limits[name])
        except queue.Empty:
            what = f"{name}: no answer within {limits[name]:g} s; it hangs."
            yield name, failed(what, _IF_IT_HANGS.get(name, _IF_ANY_HANGS))
        else:
            if line:
                yield name, from_json(json.loads(line))
                continue
            yield name, _died(name, process, stderr)
        for left in names[position + 1 :]:
            yield left, not_looked_at(name)
        return


_IF_ANY_HANGS = (
    "Another program may hold the device, or its driver is stuck: look for other processes on it,"
    " and restart the machine if there are none."
)
_IF_IT_HANGS = {
    "devices": "Another program may hold the devices (only one process at a time can use a TPU), or"
    " the driver is stuck. On a slice of several hosts the devices answer when `runner doctor` runs"
    " on all of them at once.",
    "collectives": "Devices compute but do not reach each other. For NVIDIA GPUs set"
    " NCCL_DEBUG=INFO and look at what it says, and try NCCL_P2P_DISABLE=1; for simulated CPU"
    " devices, set NPROC to a number well above theirs.",
    "folder": "The file system does not answer; if it is a network file system, its server may be"
    " away. Give another --job_log_dir.",
    "compile cache": "The file system does not answer. Give another --jax_compilation_cache, or"
    " off.",
}


def _died(name: str, process: subprocess.Popen[bytes], stderr: IO[bytes]) -> Finding:
    try:
        code = process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        code = None
    stderr.seek(0)
    text = stderr.read().decode(errors="replace")
    said = [line for line in text.splitlines() if line.strip() and not _FRAME.match(line)]
    words = " ".join(line.strip() for line in said[-_LAST_WORDS:]) or "nothing"
    return failed(
        f"{name}: the process ended with exit code {code}; it said: {words}",
        "A wrong flag in XLA_FLAGS or LIBTPU_INIT_ARGS, or a driver that does not fit the packages,"
        " ends a process like this.",
    )


# Lines of a stack trace from compiled code.
_FRAME = re.compile(r"\s*(@|#\d+)\s+0x|\*\*\* ")


def _read(stdout: IO[bytes], lines: queue.Queue[str]) -> None:
    with stdout:
        for line in stdout:
            lines.put(line.decode())
    lines.put("")
