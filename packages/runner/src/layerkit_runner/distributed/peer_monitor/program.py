"""Main program of a peer monitor: its event loop and its shutdown.

`layerkit_runner.distributed.peer_monitor.start` runs it and writes the fields of `Task` as JSON to
its standard input, since the key is secret and other users can see the arguments of a command.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import queue
import re
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import BinaryIO

from layerkit_runner.distributed.peer_monitor.hub import (
    BEAT_SECONDS,
    ENDED,
    FAILED,
    HUB,
    MEMBER,
    SILENT,
    SILENT_SECONDS,
    STALLED,
    STALLED_SECONDS,
    Hub,
    Link,
    Loss,
)
from layerkit_runner.distributed.watchdog import Identity, print_error
from layerkit_runner.files.atomic_write import open_append

# Delay before the other processes report a failed process. Often all processes fail for the same
# reason, and each should first report its own error.
_SECONDS_TO_REPORT = 3.0
_SECONDS_TO_END = 10.0
_SECONDS_TO_DRAIN = 2.0
# Pause between reads. In a job with thousands of processes the hub receives thousands of heartbeats
# a second, and the pause lets it read many of them at once.
_PAUSE_SECONDS = 0.02
# Start of a log record below the error level, as written by Python's logging and warnings, absl
# and XLA.
_BELOW_ERROR = re.compile(
    rb"(INFO|WARNING|DEBUG):|[IWV]\d{4} |\d{4}-\d\d-\d\d [\d:.]+: [IW] |.*:\d+: \w*Warning: "
)
_CONTINUED = b"  "
_CHUNK = 1 << 16
# Lines that may wait for a slow disk. Further lines are dropped from the log.
_MAX_WAITING_LINES = 100_000


class LogTee:
    """A tee of the output of a process, line by line, to its log and to other descriptors.

    The terminal shows all lines of process 0, and of the others standard error without the log
    records below the error level. A thread opens the log, which may fail, and writes each line to
    it with the time, so the terminal shows lines even while the disk does not respond.
    """

    def __init__(self, open_log: Callable[[], BinaryIO | None]) -> None:
        """Start the thread that opens and writes the log."""
        self._lines: queue.Queue[bytes] = queue.Queue(_MAX_WAITING_LINES)
        self._threads: list[threading.Thread] = []
        threading.Thread(target=self._write_log, args=(open_log,), daemon=True).start()

    def follow(self, source: int, target: int | None, *, errors_only: bool = False) -> None:
        """Copy a pipe to the log and to `target`, in a new thread, until the stream ends.

        A failed write ends the copies to `target`. `errors_only` keeps records below the error
        level from it.
        """
        thread = threading.Thread(
            target=self._copy, args=(source, target, _BELOW_ERROR if errors_only else None)
        )
        thread.daemon = True
        thread.start()
        self._threads.append(thread)

    def note(self, text: str) -> None:
        """Write a line of the peer monitor to the log."""
        self._log(text.encode() + b"\n")

    def wait(self, seconds: float) -> None:
        """Wait for at most `seconds` until all streams have ended and the log is written."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        lines = self._lines
        with lines.all_tasks_done:
            left = max(0.0, deadline - time.monotonic())
            lines.all_tasks_done.wait_for(lambda: not lines.unfinished_tasks, left)

    def _copy(self, source: int, target: int | None, notice: re.Pattern[bytes] | None) -> None:
        unfinished, in_notice = b"", False
        while True:
            data = os.read(source, _CHUNK)
            *lines, unfinished = (unfinished + data).split(b"\n")
            if unfinished and not data:  # the process ended in the middle of a line
                lines, unfinished = [*lines, unfinished], b""
            for line in lines:
                self._log(line + b"\n")
                if notice is not None and not (in_notice and line.startswith(_CONTINUED)):
                    in_notice = notice.match(line) is not None
                if target is not None and not in_notice:
                    target = _write_all(target, line + b"\n")
            if not data:
                return

    def _log(self, line: bytes) -> None:
        now = datetime.datetime.now().isoformat(sep=" ", timespec="milliseconds")
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(now.encode() + b" " + line)

    def _write_log(self, open_log: Callable[[], BinaryIO | None]) -> None:
        log = open_log()
        while True:
            line = self._lines.get()
            # A full disk must not keep the process from printing.
            with contextlib.suppress(OSError):
                if log is not None:
                    log.write(line)
            self._lines.task_done()


def _write_all(target: int, data: bytes) -> int | None:
    try:
        while data:
            data = data[os.write(target, data) :]
    except OSError:
        return None
    return target


@dataclasses.dataclass(frozen=True)
class Task:
    """The settings of a peer monitor.

    `control`, `streams` and `listener` are descriptors that it inherits: of the socket to the
    process, of the pipes from its output and error, and of the hub's socket, which only process 0
    has. `header` is the first line of this run in the log, and `key` is in hexadecimal.
    """

    identity: Identity
    control: int
    streams: tuple[int, int]
    log: str
    header: str
    hub_address: tuple[str, int]
    hub: Identity
    listener: int | None
    key: str


class Monitor:
    """The peer monitor of a process, which runs until the process ends."""

    def __init__(self, task: Task) -> None:
        """Open the log and the hub, connect to the hub, and start to copy the output."""
        now = time.monotonic()
        is_first = task.identity.process == 0
        self._task = task
        self._identity = task.identity
        self._log = LogTee(lambda: _open_log(task))
        self._log.note(task.header)
        self._control = Link(socket.socket(fileno=task.control))
        self._hub: Hub | None = None
        if task.listener is not None:
            listener = socket.socket(fileno=task.listener)
            key = bytes.fromhex(task.key)
            self._hub = Hub(listener, task.identity.num_processes, now, key=key)
        self._member = self._connect()
        self._log.follow(task.streams[0], 1 if is_first else None)
        self._log.follow(task.streams[1], 2, errors_only=not is_first)
        self._heard_hub = self._ticked = now
        self._stopped_since: float | None = None
        self._loss: Loss | None = None
        self._announce_at: float | None = None
        self._kill_at: float | None = None
        # State of the process.
        self._has_reported = self._is_done = self._is_gone = False

    def run(self) -> None:
        """Run until the process has ended and its peers have been notified."""
        while not (self._is_gone or self._is_done):
            sources: list[Link | socket.socket] = [self._control]
            if self._member is not None:
                sources.append(self._member)
            if self._hub is not None:
                sources += self._hub.sources()
            self._serve(sources, BEAT_SECONDS / 4)
            now = time.monotonic()
            if self._announce_at is not None and now >= self._announce_at:
                self._announce()
            if self._kill_at is not None and now >= self._kill_at:
                self._kill_at = None
                self._kill()
            if now - self._ticked >= BEAT_SECONDS:
                self._tick(now)
        if self._is_gone:
            # The last messages of the process may have arrived after the last read.
            self._receive_from_process(self._control)
            if not (self._is_done or self._has_reported):
                self._tell_hub(ENDED)
        if self._is_done and self._member is not None:
            self._member.send(done=True)
        self._log.wait(_SECONDS_TO_DRAIN)
        if self._hub is not None:
            self._leave_hub(self._hub)
            self._log.wait(_SECONDS_TO_DRAIN)

    def _serve(self, sources: list[Link | socket.socket], seconds: float) -> None:
        poll = select.poll()
        by_number = {source.fileno(): source for source in sources}
        for number in by_number:
            poll.register(number, select.POLLIN)
        ready = poll.poll(seconds * 1000)
        now = time.monotonic()
        for number, _ in ready:
            source = by_number[number]
            if source is self._control:
                self._receive_from_process(self._control)
            elif source is self._member:
                self._receive_from_hub(self._member, now)
            elif self._hub is not None:
                self._hub.receive(source, now)
        if ready:
            time.sleep(_PAUSE_SECONDS)

    def _tick(self, now: float) -> None:
        paused = now - self._ticked > 5 * BEAT_SECONDS
        self._ticked = now
        if self._hub is not None:
            self._hub.check(now)
            # The members include the one of process 0 itself.
            if self._hub.num_members <= 1:
                self._control.send(is_last=True)
        if os.getppid() != self._identity.pid:
            self._is_gone = True
        if self._member is None:
            return
        self._member.send(beat=True)
        if paused:
            self._heard_hub = now
        if now - self._heard_hub > SILENT_SECONDS:
            self._lose_hub(SILENT)
        if not _is_stopped(self._identity.pid):
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        elif now - self._stopped_since > STALLED_SECONDS:
            self._tell_hub(STALLED)

    def _receive_from_process(self, control: Link) -> None:
        for message in control.receive():
            if "failed" in message:
                self._has_reported = True
                self._tell_hub(FAILED, message["failed"])
            if message.get("done"):
                self._is_done = True
        if not control.is_open:
            self._is_gone = True

    def _receive_from_hub(self, member: Link, now: float) -> None:
        for message in member.receive():
            self._heard_hub = now
            if "loss" in message:
                self._receive_loss(Loss(**message["loss"]))
            if message.get("hub_leaves"):
                member.close()
                self._member = None
                return
        if not member.is_open:
            self._lose_hub(ENDED)

    def _lose_hub(self, how: str) -> None:
        self._member = None
        self._receive_loss(Loss(0, self._task.hub.host, self._task.hub.pid, how))

    def _tell_hub(self, how: str, text: str = "") -> None:
        if self._member is not None:
            self._member.send(how=how, text=text)

    def _receive_loss(self, loss: Loss) -> None:
        if self._loss is not None:
            return
        self._loss = loss
        if loss.process == self._identity.process:
            self._log.note(f"runner: {loss.sentence(self._identity.num_processes)}.")
            if loss.how in (STALLED, SILENT):
                self._kill()
            return
        delay = _SECONDS_TO_REPORT if loss.how == FAILED else 0.0
        self._announce_at = time.monotonic() + delay

    def _announce(self) -> None:
        assert self._loss is not None
        self._announce_at = None
        if self._has_reported or self._is_gone:
            return
        self._has_reported = True  # later failures are consequences
        self._control.send(end=True)
        self._kill_at = time.monotonic() + _SECONDS_TO_END
        this_process = f"process {self._identity.process}"
        text = (
            f"runner: {self._loss.sentence(self._identity.num_processes)}. Every step needs all"
            f" processes, so {this_process} ends as well; the same command in every process resumes"
            " from the newest checkpoint."
        )
        self._log.note(text)
        print_error(text)

    def _kill(self) -> None:
        if os.getppid() == self._identity.pid:
            with contextlib.suppress(OSError):
                os.kill(self._identity.pid, signal.SIGKILL)

    def _leave_hub(self, hub: Hub) -> None:
        """Announce a successful end to the members, or serve them until they have left."""
        deadline = time.monotonic() + _SECONDS_TO_END
        # In a short job a peer monitor may connect late, and would report process 0 as lost if the
        # hub had already closed.
        while self._is_done and not (hub.knows_all or hub.loss) and time.monotonic() < deadline:
            self._serve([*hub.sources()], BEAT_SECONDS / 4)
        if self._is_done and hub.loss is None:
            hub.announce_end()
            return
        deadline = time.monotonic() + _SECONDS_TO_END
        while time.monotonic() < deadline and hub.num_members > 1:
            sources: list[Link | socket.socket] = [*hub.sources()]
            if self._member is not None:
                sources.append(self._member)
            self._serve(sources, BEAT_SECONDS / 4)

    def _connect(self) -> Link | None:
        task = self._task
        try:
            connection = socket.create_connection(task.hub_address, timeout=_SECONDS_TO_END)
        except OSError as error:
            text = (
                f"runner: process {task.identity.process} cannot reach process 0 at"
                f" {task.hub_address[0]}:{task.hub_address[1]} ({error}); if a process is lost, JAX"
                " ends the job and does not name the process."
            )
            self._log.note(text)
            print_error(text)
            return None
        key = bytes.fromhex(task.key)
        link = Link(connection, key=key, sends_as=MEMBER, receives_from=HUB)
        identity = task.identity
        link.send(hello=identity.process, host=identity.host, pid=identity.pid)
        return link


def _is_stopped(pid: int) -> bool:
    """Return whether a signal stopped the process; False on systems without /proc."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state = file.read().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in (b"T", b"t")


def _open_log(task: Task) -> BinaryIO | None:
    try:
        return open_append(task.log, is_buffered=False)
    except OSError as error:
        print_error(f"runner: process {task.identity.process} cannot open its log: {error}")
        return None


def main() -> None:
    """Run the peer monitor with the task from standard input."""
    # A signal that stops the process may be sent to its whole process group. The peer monitor
    # ignores it, since it must outlive the process.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    # The hub needs a descriptor for the connection of each process of the job.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    fields = json.load(sys.stdin)
    for name in ("streams", "hub_address"):
        fields[name] = tuple(fields[name])
    for name in ("identity", "hub"):
        fields[name] = Identity(**fields[name])
    Monitor(Task(**fields)).run()


if __name__ == "__main__":
    main()
