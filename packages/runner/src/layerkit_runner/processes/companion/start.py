"""The end of a process that its companion is not: starting it, and what the two tell each other."""

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
from pathlib import Path

import layerkit_runner
from layerkit_runner.processes.companion.link import Link
from layerkit_runner.processes.companion.program import Task

_SECONDS_FOR_LAST_LINES = 3.0


@dataclasses.dataclass(frozen=True)
class Identity:
    """A process as its peers name it.

    Attributes:
      process: Its number.
      num_processes: Of how many.
      host: The name of its machine.
      pid: Its process number there.
    """

    process: int
    num_processes: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.process} of {self.num_processes} (host {self.host}, pid {self.pid})"


class StartedCompanion:
    """The companion of this process, from which on what it prints goes through it.

    Args:
      identity: Of this process.
      hub_address: (host, port) at which the hub is reached.
      hub: The process beside which the hub is.
      listener: Listening there, in process 0; None elsewhere.
      log: The file to append to.
      exit_code: With which this process ends at once when another was lost.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        hub_address: tuple[str, int],
        hub: Identity,
        listener: socket.socket | None,
        log: Path,
        exit_code: int,
    ) -> None:
        ours, theirs = socket.socketpair()
        pipes = [os.pipe(), os.pipe()]
        streams = (pipes[0][0], pipes[1][0])
        command = shlex.join(sys.argv)
        task = Task(
            process=identity.process,
            num_processes=identity.num_processes,
            host=identity.host,
            pid=identity.pid,
            control=theirs.fileno(),
            streams=streams,
            log=os.fspath(log),
            header=f"process {identity.process} of {identity.num_processes} on {identity.host},"
            f" pid {identity.pid}: {command}",
            hub_address=hub_address,
            hub_host=hub.host,
            hub_pid=hub.pid,
            listener=None if listener is None else listener.fileno(),
        )
        inherited = [task.control, *streams, *([] if listener is None else [listener.fileno()])]
        self._program = subprocess.Popen(
            [sys.executable, "-S", "-m", program_module(), json.dumps(dataclasses.asdict(task))],
            env={**os.environ, "PYTHONPATH": os.fspath(Path(layerkit_runner.__file__).parents[1])},
            stdin=subprocess.DEVNULL,
            pass_fds=inherited,
            start_new_session=True,
        )
        theirs.close()
        if listener is not None:
            listener.close()
        self._exit_code = exit_code
        self._control = Link(ours)
        ours.settimeout(None)  # a thread waits for it
        self._is_last = threading.Event()
        self._saved = _redirect([pipe[1] for pipe in pipes])
        for number in (*streams, *(pipe[1] for pipe in pipes)):
            os.close(number)
        threading.Thread(target=self._listen, name="companion", daemon=True).start()

    def failed(self, text: str) -> None:
        """Tells the other processes why this one ends."""
        self._control.send(failed=text)

    def wait_for_others(self, seconds: float) -> None:
        """In process 0, waits until no other process is there, at most so long."""
        self._is_last.clear()  # it is told again each second
        self._is_last.wait(seconds)

    def close(self) -> None:
        """Says that this process is done, and lets it print for itself again."""
        self._control.send(done=True)
        sys.stdout.flush()
        sys.stderr.flush()
        self._print_directly()
        # Its last lines come before those that this process may still print.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._program.wait(_SECONDS_FOR_LAST_LINES)

    def _listen(self) -> None:
        while self._control.is_open:
            for message in self._control.receive():
                if message.get("end"):
                    # The main thread may wait for the lost process in compiled code.
                    os._exit(self._exit_code)
                if message.get("is_last"):
                    self._is_last.set()
        if self._saved:  # the companion ended before it was told to
            self._print_directly()
            print("runner: the companion of this process ended; so does its log", file=sys.stderr)

    def _print_directly(self) -> None:
        saved, self._saved = self._saved, {}
        for target, descriptor in saved.items():
            os.dup2(descriptor, target)
            os.close(descriptor)


def program_module() -> str:
    """The name by which Python runs the companion."""
    return "layerkit_runner.processes.companion.program"


def _redirect(targets: list[int]) -> dict[int, int]:
    """Lets standard output and error, also of compiled code, go elsewhere; where they went."""
    saved = {}
    for stream, number, target in zip((sys.stdout, sys.stderr), (1, 2), targets, strict=True):
        stream.flush()
        saved[number] = os.dup(number)
        os.dup2(target, number)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)
    return saved
