"""The hub's judgement, with members that are sockets and seconds that are values."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator

import pytest

from layerkit_runner.processes.companion.link import Link
from layerkit_runner.processes.companion.peers import (
    FAILED,
    SILENT,
    SILENT_SECONDS,
    Hub,
    Loss,
)


class Members:
    """A hub of three, and the other ends of its links."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.hub = Hub(self._listener, 3, 0.0)
        self.links = [Link(socket.create_connection(self._listener.getsockname())) for _ in "012"]
        for process, link in enumerate(self.links):
            link.send(hello=process, host=f"host{process}", pid=100 + process)
        while self.hub.num_members < 3:
            self.hear(0.0)
        self.hear(0.0)

    def hear(self, now: float) -> None:
        """Lets the hub read whatever has arrived."""
        for source in select.select(self.hub.waits_for(), [], [], 0.2)[0]:
            self.hub.hear(source, now)

    def beat(self, now: float, *processes: int) -> None:
        """A second in which these members speak."""
        for process in processes:
            self.links[process].send(beat=True)
        self.hear(now)
        self.hub.check(now)

    def close(self) -> None:
        for link in (*self.links, *self.hub.waits_for()):
            link.close()


@pytest.fixture
def members() -> Iterator[Members]:
    made = Members()
    yield made
    made.close()


def told(link: Link) -> list[Loss]:
    """The losses that arrive, after beats and whatever else."""
    losses: list[Loss] = []
    while not losses and select.select([link], [], [], 10.0)[0]:
        losses += [Loss(**message["loss"]) for message in link.receive() if "loss" in message]
    return losses


def test_silence_is_a_loss_once_it_lasts(members: Members):
    for second in range(1, int(SILENT_SECONDS) + 1):
        members.beat(float(second), 0, 1)
        assert members.hub.loss is None
    members.beat(SILENT_SECONDS + 1, 0, 1)
    loss = Loss(2, "host2", 102, SILENT)
    assert members.hub.loss == loss
    assert told(members.links[0]) == told(members.links[1]) == [loss]
    assert loss.sentence(3).startswith(
        "process 2 of 3 (host host2, pid 102) is silent: nothing was heard of it for 20 s"
    )


def test_a_hub_that_stood_still_itself_blames_nobody(members: Members):
    members.beat(1.0, 0, 1, 2)
    members.hub.check(1000.0)
    assert members.hub.loss is None
    for second in range(1001, 1010):
        members.beat(float(second), 0, 1, 2)
    assert members.hub.loss is None


def test_the_first_loss_is_the_one_that_is_told(members: Members):
    members.links[1].send(how=FAILED, text="no data")
    members.hear(1.0)
    members.links[0].close()
    members.hear(2.0)
    assert members.hub.loss == Loss(1, "host1", 101, FAILED, "no data")
    assert told(members.links[2]) == [members.hub.loss]


def test_who_is_done_may_leave(members: Members):
    members.links[1].send(done=True)
    members.hear(1.0)
    members.links[1].close()
    members.hear(2.0)
    assert (members.hub.num_members, members.hub.loss) == (2, None)


def test_strangers_are_not_listened_to(members: Members):
    stranger = socket.create_connection(members.hub.waits_for()[0].getsockname())
    stranger.sendall(b'GET / HTTP/1.1\r\n\r\n[1]\n{"how": "failed"}\n')
    for now in (1.0, 2.0):
        members.hear(now)
    stranger.close()
    members.hear(3.0)
    assert members.hub.loss is None
