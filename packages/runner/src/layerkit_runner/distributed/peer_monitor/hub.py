"""Messages between peer monitors, and the hub that finds the first lost process.

Messages are JSON objects, one on a line, and over a network each line is signed with a key of the
job. A line that is too long, unsigned or wrongly signed closes the connection before its content is
parsed. The messages are not encrypted.

The hub is beside process 0. A member beside each process reports to it each second, and at once
when its process ends, fails or is stopped. No action of a process silences its peer monitor, so a
silent member means that the machine or the network failed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import json
import socket
from typing import Any

BEAT_SECONDS = 1.0
SILENT_SECONDS = 20.0
STALLED_SECONDS = 15.0

# Roles in the signatures of messages.
HUB, MEMBER = "hub", "member"

# How a process was lost.
ENDED, FAILED, STALLED, SILENT = "ended", "failed", "stalled", "silent"

_MAX_LINE_BYTES = 1 << 14
_MAX_READ_BYTES = 1 << 16
_SIGNATURE_CHARACTERS = 2 * hashlib.sha256().digest_size

# Limits of connections without introduction: their age, and their number.
_SECONDS_TO_INTRODUCE = 10.0
_MAX_STRANGERS = 64


class Link:
    """One end of a connection, whose socket is set to non-blocking.

    `key` is a secret of both ends; None leaves lines unsigned, for a trusted socket pair. The roles
    of both ends are part of the signatures.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        key: bytes | None = None,
        sends_as: str = "",
        receives_from: str = "",
    ) -> None:
        """Set the socket to non-blocking; see the class for the arguments."""
        connection.settimeout(0)
        self.socket = connection
        self.is_open = True
        self._key = key
        self._sends_as = sends_as
        self._receives_from = receives_from
        self._num_sent = self._num_received = 0
        self._received = b""
        self._is_stuck = False

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self.socket.fileno()

    def send(self, **message: Any) -> None:
        """Send a message; after the first one that does not fit into the buffers, send nothing.

        A receiver with that much unread input does not run, and becomes silent itself.
        """
        if self._is_stuck:
            return
        line = json.dumps(message).encode()
        if self._key is not None:
            line = _signature(self._key, self._sends_as, self._num_sent, line) + b" " + line
            self._num_sent += 1
        line += b"\n"
        try:
            self._is_stuck = self.socket.send(line) < len(line)
        except OSError:
            self._is_stuck = True

    def receive(self) -> list[dict[str, Any]]:
        """Return the complete messages that have arrived; mark a link that has ended as closed."""
        try:
            data = self.socket.recv(_MAX_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        *lines, self._received = (self._received + data).split(b"\n")
        if not data or any(len(line) > _MAX_LINE_BYTES for line in (*lines, self._received)):
            self.is_open = False
        messages = []
        for line in lines:
            content = self._content(line)
            if content is None:
                self.is_open = False
                break
            # Deeply nested JSON raises a RecursionError.
            with contextlib.suppress(ValueError, RecursionError):
                message = json.loads(content)
                if isinstance(message, dict):
                    messages.append(message)
        return messages

    def close(self) -> None:
        """Close the socket."""
        self.is_open = False
        with contextlib.suppress(OSError):
            self.socket.close()

    def _content(self, line: bytes) -> bytes | None:
        if len(line) > _MAX_LINE_BYTES:
            return None
        if self._key is None:
            return line
        signature, _, content = line.partition(b" ")
        expected = _signature(self._key, self._receives_from, self._num_received, content)
        if len(signature) != _SIGNATURE_CHARACTERS or not hmac.compare_digest(signature, expected):
            return None
        self._num_received += 1
        return content


def _signature(key: bytes, role: str, number: int, content: bytes) -> bytes:
    signed = f"{role} {number} ".encode() + content
    return hmac.digest(key, signed, "sha256").hex().encode()


@dataclasses.dataclass(frozen=True)
class Loss:
    """The loss of a process (`ENDED`, `FAILED`, `STALLED` or `SILENT`), which ends the job.

    The host is empty if it is unknown, and the text the reason that the process reported, if any.
    """

    process: int
    host: str
    pid: int
    how: str
    text: str = ""

    def sentence(self, num_processes: int) -> str:
        """Return a sentence that names the process and the kind of its loss."""
        place = f" (host {self.host}, pid {self.pid})" if self.host else ""
        name = f"process {self.process} of {num_processes}{place}"
        return {
            ENDED: f"{name} ended without a report: it or its peer monitor was killed or ran out of"
            f" memory, or logs/process_{self.process:04d}.log has the reason",
            # The callers end the sentence.
            FAILED: f"{name} failed: {self.text.removesuffix('.')}",
            STALLED: f"{name} is stalled: it has been stopped for {STALLED_SECONDS:.0f} s",
            SILENT: f"{name} is silent: no message arrived for {SILENT_SECONDS:.0f} s, so its"
            " machine is down or stalled, or the network failed",
        }[self.how]


@dataclasses.dataclass
class _Member:
    link: Link
    last_message: float
    # None until it has introduced itself.
    process: int | None = None
    host: str = ""
    pid: int = 0
    is_done: bool = False


class Hub:
    """The hub of a job, which receives the messages of members and finds the first loss.

    Each member introduces its process once, by a message that is signed with the key of the job. A
    connection without introduction is closed after some seconds, or earlier if there are many.
    """

    def __init__(
        self, listener: socket.socket, num_processes: int, now: float, *, key: bytes
    ) -> None:
        """Set the socket to non-blocking; see the class for the arguments."""
        listener.settimeout(0)
        self._listener = listener
        self._num_processes = num_processes
        self._key = key
        self._members: dict[Link, _Member] = {}
        self._introduced: set[int] = set()
        self._checked = now
        self.loss: Loss | None = None

    def sources(self) -> list[Link | socket.socket]:
        """Return the sockets that require a call of `receive` when they are readable."""
        return [self._listener, *self._members]

    @property
    def num_members(self) -> int:
        """Number of connected members that have introduced themselves."""
        return len(self._known())

    @property
    def knows_all(self) -> bool:
        """True if every process of the job has introduced itself, even if it has left since."""
        return len(self._introduced) == self._num_processes

    def announce_end(self) -> None:
        """Notify the members that the hub closes because its process is done."""
        for member in self._known():
            member.link.send(hub_leaves=True)

    def receive(self, source: Link | socket.socket, now: float) -> None:
        """Receive the messages of one of `sources`."""
        if source is self._listener:
            self._accept(now)
            return
        assert isinstance(source, Link)
        member = self._members.get(source)
        if member is None:
            return  # closed in the meantime
        for message in source.receive():
            self._handle(member, message, now)
        if not member.link.is_open:
            self._drop(member)
            if member.process is not None and not member.is_done:
                self._mark_lost(member, ENDED)

    def check(self, now: float) -> None:
        """Find silent members and close idle connections; called each second."""
        if now - self._checked > 5 * BEAT_SECONDS:
            # This process was stopped, and has not read the messages of the others.
            for member in self._members.values():
                member.last_message = now
        self._checked = now
        for member in [*self._members.values()]:
            if member.process is None and now - member.last_message > _SECONDS_TO_INTRODUCE:
                self._drop(member)
        for member in self._known():
            member.link.send(beat=True)
            if not member.is_done and now - member.last_message > SILENT_SECONDS:
                self._mark_lost(member, SILENT)

    def _known(self) -> list[_Member]:
        return [member for member in self._members.values() if member.process is not None]

    def _accept(self, now: float) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # the peer has disconnected
        link = Link(connection, key=self._key, sends_as=HUB, receives_from=MEMBER)
        self._members[link] = _Member(link, now)
        strangers = [member for member in self._members.values() if member.process is None]
        if len(strangers) > self._num_processes + _MAX_STRANGERS:
            self._drop(strangers[0])

    def _drop(self, member: _Member) -> None:
        del self._members[member.link]
        member.link.close()

    def _handle(self, member: _Member, message: dict[str, Any], now: float) -> None:
        member.last_message = now
        if member.process is None:
            self._introduce(member, message)
            return
        if message.get("done"):
            member.is_done = True
        if message.get("how") in (ENDED, FAILED, STALLED):
            self._mark_lost(member, message["how"], str(message.get("text", "")))

    def _introduce(self, member: _Member, message: dict[str, Any]) -> None:
        process, host, pid = (message.get(name) for name in ("hello", "host", "pid"))
        if not (isinstance(process, int) and isinstance(pid, int)) or (
            process in self._introduced or process not in range(self._num_processes)
        ):
            # The signed message is not an introduction, or repeats one.
            member.link.is_open = False
            return
        member.process, member.host, member.pid = process, str(host), pid
        self._introduced.add(process)
        if self.loss is not None:
            member.link.send(loss=dataclasses.asdict(self.loss))

    def _mark_lost(self, member: _Member, how: str, text: str = "") -> None:
        if self.loss is not None:
            return  # later losses are consequences
        assert member.process is not None
        self.loss = Loss(member.process, member.host, member.pid, how, text)
        for other in self._known():
            other.link.send(loss=dataclasses.asdict(self.loss))
