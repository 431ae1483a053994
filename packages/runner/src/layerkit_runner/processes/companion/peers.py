"""Who of a job was lost: the hub, beside process 0, hears all members and tells them the first.

A member says each second that it is there, and at once when its process ends, fails or is stopped.
Silence means that the machine or the network is gone, since nothing that the process does can keep
its companion from speaking.
"""

from __future__ import annotations

import dataclasses
import socket
from typing import Any

from layerkit_runner.processes.companion.link import Link

BEAT_SECONDS = 1.0
SILENT_SECONDS = 20.0
STALLED_SECONDS = 15.0

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
            ENDED: f"{name} ended without a word: it was killed or ran out of memory, or"
            f" logs/process_{self.process:04d}.log says why",
            FAILED: f"{name} failed: {self.text}",
            STALLED: f"{name} is stalled: it has been stopped for {STALLED_SECONDS:.0f} s",
            SILENT: f"{name} is silent: nothing was heard of it for {SILENT_SECONDS:.0f} s, so its"
            " machine is down or stalled, or the network between",
        }[self.how]


@dataclasses.dataclass
class _Member:
    link: Link
    heard: float
    process: int | None = None
    host: str = ""
    pid: int = 0
    is_done: bool = False


class Hub:
    """Listens to the members and finds the first loss.

    Args:
      listener: Listening; members connect to it.
      num_processes: How many will.
      now: Seconds of a clock that never goes back.
    """

    def __init__(self, listener: socket.socket, num_processes: int, now: float) -> None:
        listener.settimeout(0)
        self._listener = listener
        self._num_processes = num_processes
        self._members: dict[Link, _Member] = {}
        self._introduced: set[int] = set()
        self._checked = now
        self.loss: Loss | None = None

    def waits_for(self) -> list[Link | socket.socket]:
        """Whatever `hear` should be called for when it can be read."""
        return [self._listener, *self._members]

    @property
    def num_members(self) -> int:
        """How many are connected."""
        return len(self._members)

    @property
    def knows_all(self) -> bool:
        """Whether every process of the job has introduced itself, be it here still or not."""
        return len(self._introduced) == self._num_processes

    def say_goodbye(self) -> None:
        """Tells the members that the hub leaves because its process is done."""
        for member in self._members.values():
            member.link.send(hub_leaves=True)

    def hear(self, source: Link | socket.socket, now: float) -> None:
        """Takes in what came from one of `waits_for`."""
        if source is self._listener:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # it left before it was let in
            link = Link(connection)
            self._members[link] = _Member(link, now)
            if self.loss is not None:
                link.send(loss=dataclasses.asdict(self.loss))
            return
        assert isinstance(source, Link)
        member = self._members[source]
        for message in source.receive():
            self._take(member, message, now)
        if not source.is_open:
            del self._members[source]
            source.close()
            if member.process is not None and not member.is_done:
                self._lose(member, ENDED)

    def check(self, now: float) -> None:
        """Looks for silence, and lets the members hear that the hub is there; each second."""
        if now - self._checked > 5 * BEAT_SECONDS:
            # It was this process that stood still, and what the others said waits to be read.
            for member in self._members.values():
                member.heard = now
        self._checked = now
        for member in self._members.values():
            member.link.send(beat=True)
            is_known = member.process is not None and not member.is_done
            if is_known and now - member.heard > SILENT_SECONDS:
                self._lose(member, SILENT)

    def _take(self, member: _Member, message: dict[str, Any], now: float) -> None:
        member.heard = now
        if "hello" in message:
            member.process = int(message["hello"])
            member.host, member.pid = str(message["host"]), int(message["pid"])
            self._introduced.add(member.process)
        if message.get("done"):
            member.is_done = True
        if member.process is not None and message.get("how") in (ENDED, FAILED, STALLED):
            self._lose(member, message["how"], str(message.get("text", "")))

    def _lose(self, member: _Member, how: str, text: str = "") -> None:
        if self.loss is not None:
            return  # those that follow are consequences
        assert member.process is not None
        self.loss = Loss(member.process, member.host, member.pid, how, text)
        for other in self._members.values():
            other.link.send(loss=dataclasses.asdict(self.loss))
