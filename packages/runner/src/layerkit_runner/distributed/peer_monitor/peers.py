"""Who of a job was lost: the hub, beside process 0, hears all members and tells them the first.

A member says each second that it is there, and at once when its process ends, fails or is stopped.
Silence means that the machine or the network is gone, since nothing that the process does can keep
its companion from speaking.
"""

from __future__ import annotations

import dataclasses
import socket
from typing import Any

from layerkit_runner.distributed.peer_monitor.link import Link

BEAT_SECONDS = 1.0
SILENT_SECONDS = 20.0
STALLED_SECONDS = 15.0

# Roles in the signatures of messages.
HUB, MEMBER = "hub", "member"

# A connection that is not yet that of a member: for how long, and how many beyond one a process.
_SECONDS_TO_INTRODUCE = 10.0
_MAX_STRANGERS = 64

# How a process was lost.
ENDED, FAILED, STALLED, SILENT = "ended", "failed", "stalled", "silent"


@dataclasses.dataclass(frozen=True)
class Loss:
    """What became of a process that no step can be made without.

    Attributes:
      process: Its number.
      host: The name of its machine; empty if it never said.
      pid: Its process number there.
      how: One of the words above.
      text: What it said itself, if anything.
    """

    process: int
    host: str
    pid: int
    how: str
    text: str = ""

    def sentence(self, num_processes: int) -> str:
        """Names the process and says what became of it."""
        place = f" (host {self.host}, pid {self.pid})" if self.host else ""
        name = f"process {self.process} of {num_processes}{place}"
        return {
            ENDED: f"{name} ended without a word: it or its companion was killed or ran out of"
            f" memory, or logs/process_{self.process:04d}.log says why",
            FAILED: f"{name} failed: {self.text}",
            STALLED: f"{name} is stalled: it has been stopped for {STALLED_SECONDS:.0f} s",
            SILENT: f"{name} is silent: nothing was heard of it for {SILENT_SECONDS:.0f} s, so its"
            " machine is down or stalled, or the network between",
        }[self.how]


@dataclasses.dataclass
class _Member:
    link: Link
    heard: float
    # None until it has introduced itself.
    process: int | None = None
    host: str = ""
    pid: int = 0
    is_done: bool = False


class Hub:
    """The hub of a job, which listens to the members and finds the first loss.

    Members introduce themselves by a message that is signed with the key of the job, each process
    once. A connection that does not is closed after some seconds, and earlier where there are many.

    Args:
      listener: Listening socket that the members connect to.
      num_processes: Number of processes of the job.
      now: Seconds of a monotonic clock.
      key: Secret of the job, for the signatures.
    """

    def __init__(
        self, listener: socket.socket, num_processes: int, now: float, *, key: bytes
    ) -> None:
        listener.settimeout(0)
        self._listener = listener
        self._num_processes = num_processes
        self._key = key
        self._members: dict[Link, _Member] = {}
        self._introduced: set[int] = set()
        self._checked = now
        self.loss: Loss | None = None

    def waits_for(self) -> list[Link | socket.socket]:
        """Return what `hear` should be called for when it can be read."""
        return [self._listener, *self._members]

    @property
    def num_members(self) -> int:
        """Number of members that are connected and have introduced themselves."""
        return len(self._known())

    @property
    def knows_all(self) -> bool:
        """Whether every process of the job has introduced itself, connected still or not."""
        return len(self._introduced) == self._num_processes

    def say_goodbye(self) -> None:
        """Tell the members that the hub leaves because its process is done."""
        for member in self._known():
            member.link.send(hub_leaves=True)

    def hear(self, source: Link | socket.socket, now: float) -> None:
        """Receive what came from one of `waits_for`."""
        if source is self._listener:
            self._let_in(now)
            return
        assert isinstance(source, Link)
        member = self._members.get(source)
        if member is None:
            return  # closed since it was found ready
        for message in source.receive():
            self._take(member, message, now)
        if not member.link.is_open:
            self._drop(member)
            if member.process is not None and not member.is_done:
                self._lose(member, ENDED)

    def check(self, now: float) -> None:
        """Find silent members and close idle connections; to be called each second."""
        if now - self._checked > 5 * BEAT_SECONDS:
            # It was this process that stood still, and what the others said waits to be read.
            for member in self._members.values():
                member.heard = now
        self._checked = now
        for member in [*self._members.values()]:
            if member.process is None and now - member.heard > _SECONDS_TO_INTRODUCE:
                self._drop(member)
        for member in self._known():
            member.link.send(beat=True)
            if not member.is_done and now - member.heard > SILENT_SECONDS:
                self._lose(member, SILENT)

    def _known(self) -> list[_Member]:
        return [member for member in self._members.values() if member.process is not None]

    def _let_in(self, now: float) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # it left before it was let in
        link = Link(connection, key=self._key, sends_as=HUB, hears_from=MEMBER)
        self._members[link] = _Member(link, now)
        strangers = [member for member in self._members.values() if member.process is None]
        if len(strangers) > self._num_processes + _MAX_STRANGERS:
            self._drop(strangers[0])

    def _drop(self, member: _Member) -> None:
        del self._members[member.link]
        member.link.close()

    def _take(self, member: _Member, message: dict[str, Any], now: float) -> None:
        member.heard = now
        if member.process is None:
            self._introduce(member, message)
            return
        if message.get("done"):
            member.is_done = True
        if message.get("how") in (ENDED, FAILED, STALLED):
            self._lose(member, message["how"], str(message.get("text", "")))

    def _introduce(self, member: _Member, message: dict[str, Any]) -> None:
        process, host, pid = (message.get(name) for name in ("hello", "host", "pid"))
        if not (isinstance(process, int) and isinstance(pid, int)) or (
            process in self._introduced or process not in range(self._num_processes)
        ):
            # Signed, but no introduction, or a recorded one that is sent again.
            member.link.is_open = False
            return
        member.process, member.host, member.pid = process, str(host), pid
        self._introduced.add(process)
        if self.loss is not None:
            member.link.send(loss=dataclasses.asdict(self.loss))

    def _lose(self, member: _Member, how: str, text: str = "") -> None:
        if self.loss is not None:
            return  # those that follow are consequences
        assert member.process is not None
        self.loss = Loss(member.process, member.host, member.pid, how, text)
        for other in self._known():
            other.link.send(loss=dataclasses.asdict(self.loss))
