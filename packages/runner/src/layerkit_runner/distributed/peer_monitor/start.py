"""Start of the peer monitor of this process, and the messages between the two."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import layerkit
from layerkit_runner.distributed.peer_monitor.hub import Link
from layerkit_runner.distributed.peer_monitor.program import Task
from layerkit_runner.distributed.watchdog import SECONDS_TO_WRITE, Identity, finished_within
from layerkit_runner.files.atomic_write import open_append

_SECONDS_TO_END = 3.0
_MAX_TEXT = 1000

PROGRAM = "layerkit_runner.distributed.peer_monitor.program"
"""Module that runs as the peer monitor."""


class PeerMonitor:
    """The peer monitor of this process, which receives the output of the process.

    Process 0 gives the listening socket of the hub. `exit_code` is that of this process if another
    process, or this peer monitor, is lost.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        hub_address: tuple[str, int],
        hub: Identity,
        listener: socket.socket | None,
        key: bytes,
        log: Path,
        exit_code: int,
    ) -> None:
        """Start the peer monitor, and redirect standard output and error to it."""
        ours, theirs = socket.socketpair()
        pipes = [os.pipe(), os.pipe()]
        streams = (pipes[0][0], pipes[1][0])
        task = Task(
            identity=identity,
            control=theirs.fileno(),
            streams=streams,
            log=os.fspath(log),
            header=f"process {identity.process} of {identity.num_processes} on {identity.host},"
            f" pid {identity.pid}: {shlex.join(sys.argv)}",
            hub_address=hub_address,
            hub=hub,
            listener=None if listener is None else listener.fileno(),
            key=key.hex(),
        )
        inherited = [task.control, *streams, *([] if listener is None else [listener.fileno()])]
        # It runs without `site`, which saves start-up time but ignores the links of editable
        # installs.
        folders = [str(Path(__file__).parents[3]), os.path.dirname(layerkit.__path__[0])]
        self._program = subprocess.Popen(
            [sys.executable, "-S", "-m", PROGRAM],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
            stdin=subprocess.PIPE,
            pass_fds=inherited,
            start_new_session=True,
        )
        assert self._program.stdin is not None
        with self._program.stdin as stdin:
            stdin.write(json.dumps(dataclasses.asdict(task)).encode())
        theirs.close()
        if listener is not None:
            listener.close()
        self._identity = identity
        self._log = log
        self._exit_code = exit_code
        self._is_closing = False
        # Open reading ends avoid broken pipes if the peer monitor ends.
        self._streams = streams
        self._control = Link(ours)
        ours.settimeout(None)  # a thread reads it
        self._is_last = threading.Event()
        self._saved = _redirect([pipe[1] for pipe in pipes])
        for _, writer in pipes:
            os.close(writer)
        threading.Thread(target=self._listen, name="peer-monitor", daemon=True).start()

    def failed(self, text: str) -> None:
        """Send the reason of this process's end to the other processes."""
        self._control.send(failed=text[:_MAX_TEXT])

    def wait_for_others(self, seconds: float) -> None:
        """Wait in process 0 for at most `seconds` until all other processes have left."""
        self._is_last.clear()  # the message is repeated each second
        self._is_last.wait(seconds)

    def close(self) -> None:
        """End the peer monitor, and print directly again."""
        self._is_closing = True
        self._control.send(done=True)
        sys.stdout.flush()
        sys.stderr.flush()
        self._print_directly()
        # The peer monitor prints its last lines before this process prints further ones.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._program.wait(_SECONDS_TO_END)

    def _listen(self) -> None:
        while self._control.is_open:
            for message in self._control.receive():
                if message.get("end"):
                    # The main thread may be in compiled code, waiting for the lost process.
                    os._exit(self._exit_code)
                if message.get("is_last"):
                    self._is_last.set()
        if not self._is_closing:
            self._end_without_monitor()

    def _end_without_monitor(self) -> None:
        """End this process; without its peer monitor the others count it as lost, and end."""
        code = self._program.wait()
        name = f"signal {-code}" if code < 0 else f"exit code {code}"
        text = (
            f"runner: {self._identity} lost its peer monitor, which ended with {name}. The other"
            " processes count this one as lost, so it ends as well; the same command in every"
            " process resumes from the newest checkpoint.\n"
        ).encode()
        self._print_directly()

        def copy_rest() -> None:
            for stream, target in zip(self._streams, (1, 2), strict=True):
                os.set_blocking(stream, False)
                with contextlib.suppress(BlockingIOError):
                    while data := os.read(stream, 1 << 16):
                        os.write(target, data)

        def append_to_log() -> None:
            with open_append(self._log) as file:
                file.write(text)

        for write in (copy_rest, lambda: os.write(2, text), append_to_log):
            finished_within(SECONDS_TO_WRITE, write)
        if self._identity.process == 0:
            # Without the coordinator in this process, JAX aborts the others before they report.
            time.sleep(_SECONDS_TO_END)
        os._exit(self._exit_code)

    def _print_directly(self) -> None:
        saved, self._saved = self._saved, {}
        for target, descriptor in saved.items():
            os.dup2(descriptor, target)
            os.close(descriptor)


def _redirect(targets: list[int]) -> dict[int, int]:
    """Redirect standard output and error, also of compiled code; return copies of both."""
    saved = {}
    for stream, number, target in zip((sys.stdout, sys.stderr), (1, 2), targets, strict=True):
        stream.flush()
        saved[number] = os.dup(number)
        os.dup2(target, number)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)
    return saved
