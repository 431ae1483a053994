"""Detection of losses by the hub, with sockets as members and a simulated clock."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator

import pytest

from layerkit_runner.distributed.peer_monitor.hub import (
    FAILED,
    HUB,
    MEMBER,
    SILENT,
    SILENT_SECONDS,
    Hub,
    Link,
    Loss,
)

KEY = b"secret of the job"


class Members:
    """A hub of three members, and the other ends of its links."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.hub = Hub(self._listener, 3, 0.0, key=KEY)
        self.links = [self.connect() for _ in "012"]
        for process, link in enumerate(self.links):
            link.send(hello=process, host=f"host{process}", pid=100 + process)
        while self.hub.num_members < 3:
            self.receive(0.0)

    def connect(self, *, key: bytes | None = KEY) -> Link:
        """Connect to the hub, as a member unless the key is another."""
        connection = socket.create_connection(self._listener.getsockname())
        return Link(connection, key=key, sends_as=MEMBER, receives_from=HUB)

    def receive(self, now: float) -> bool:
        """Let the hub read the messages that have arrived; return whether there were any."""
        readable = select.select(self.hub.sources(), [], [], 0.2)[0]
        for source in readable:
            self.hub.receive(source, now)
        return bool(readable)

    def beat(self, now: float, *processes: int) -> None:
        """Simulate a second in which these members report."""
        for process in processes:
            self.links[process].send(beat=True)
        self.receive(now)
        self.hub.check(now)

    def close(self) -> None:
        for link in (*self.links, *self.hub.sources()):
            link.close()


@pytest.fixture
def members() -> Iterator[Members]:
    made = Members()
    yield made
    made.close()


def received_losses(link: Link) -> list[Loss]:
    """Return the first losses that arrive."""
    losses: list[Loss] = []
    while not losses and select.select([link], [], [], 10.0)[0]:
        losses += [Loss(**message["loss"]) for message in link.receive() if "loss" in message]
    return losses


def test_silent_member_is_lost_after_the_limit(members: Members):
    for second in range(1, int(SILENT_SECONDS) + 1):
        members.beat(float(second), 0, 1)
        assert members.hub.loss is None
    members.beat(SILENT_SECONDS + 1, 0, 1)
    loss = Loss(2, "host2", 102, SILENT)
    assert members.hub.loss == loss
    assert received_losses(members.links[0]) == received_losses(members.links[1]) == [loss]
    assert loss.sentence(3).startswith(
        "process 2 of 3 (host host2, pid 102) is silent: no message arrived for 20 s"
    )


def test_hub_that_was_stopped_reports_no_loss(members: Members):
    members.beat(1.0, 0, 1, 2)
    members.hub.check(1000.0)
    assert members.hub.loss is None
    for second in range(1001, 1010):
        members.beat(float(second), 0, 1, 2)
    assert members.hub.loss is None


def test_hub_reports_the_first_loss_only(members: Members):
    members.links[1].send(how=FAILED, text="no data")
    members.receive(1.0)
    members.links[0].close()
    members.receive(2.0)
    assert members.hub.loss == Loss(1, "host1", 101, FAILED, "no data")
    assert received_losses(members.links[2]) == [members.hub.loss]


def test_member_that_is_done_may_disconnect(members: Members):
    members.links[1].send(done=True)
    members.receive(1.0)
    members.links[1].close()
    members.receive(2.0)
    assert (members.hub.num_members, members.hub.loss) == (2, None)


def is_closed(link: Link) -> bool:
    """Whether the hub has closed the connection."""
    link.socket.settimeout(10.0)
    try:
        return not link.socket.recv(1 << 16)
    except ConnectionError:
        return True


LINES = {
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
    "unsigned loss": b'{"hello": 1, "host": "x", "pid": 1}\n{"how": "failed"}\n',
    "no number": b'{"hello": "x", "host": "x", "pid": 1}\n',
    "deeply nested": b"[" * 10_000 + b"\n",
    "no end of line": b"0" * 100_000,
}


def assert_rejected(members: Members, stranger: Link) -> None:
    """Check that the hub closes the connection and changes nothing."""
    for now in (1.0, 1.1, 1.2):
        members.receive(now)
    assert is_closed(stranger)
    stranger.close()
    assert (members.hub.num_members, members.hub.loss) == (3, None)


@pytest.mark.parametrize("line", LINES.values(), ids=LINES.keys())
def test_unsigned_input_closes_the_connection_and_changes_nothing(members: Members, line: bytes):
    stranger = members.connect(key=None)
    stranger.socket.settimeout(10.0)
    stranger.socket.sendall(line)
    assert_rejected(members, stranger)


INTRODUCTION = {"hello": 1, "host": "host1", "pid": 101}
FAILURE = {"how": FAILED, "text": "no data"}


@pytest.mark.parametrize(
    ("key", "messages"),
    [
        (b"another", [INTRODUCTION, FAILURE]),
        (KEY, [INTRODUCTION, FAILURE]),  # a recorded introduction
        (KEY, [{**INTRODUCTION, "hello": "x"}]),
        (KEY, [{**INTRODUCTION, "hello": 7}]),
        (KEY, [{**INTRODUCTION, "hello": -1}]),
        (KEY, [{"hello": 1}]),
        (KEY, [FAILURE]),
    ],
)
def test_message_with_another_key_or_without_a_new_introduction_is_rejected(
    members: Members, key: bytes, messages: list[dict[str, object]]
):
    stranger = members.connect(key=key)
    for message in messages:
        stranger.send(**message)
    assert_rejected(members, stranger)


def test_connection_without_introduction_is_closed_after_a_while(members: Members):
    idle = members.connect()
    members.receive(1.0)
    for second in range(2, 14):
        members.beat(float(second), 0, 1, 2)
    assert is_closed(idle)
    idle.close()
    assert members.hub.num_members == 3


def test_connections_without_introduction_are_bounded(members: Members):
    idle = [members.connect() for _ in range(80)]
    while members.receive(1.0):
        pass
    assert len(members.hub.sources()) < 1 + 3 + len(idle)
    assert is_closed(idle[0])
    for link in idle:
        link.close()
    while members.receive(1.0):
        pass
    assert (members.hub.num_members, members.hub.loss) == (3, None)


def test_message_of_a_hub_with_another_key_is_rejected():
    ours, theirs = socket.socketpair()
    hub = Link(theirs, key=b"another", sends_as=HUB, receives_from=MEMBER)
    member = Link(ours, key=KEY, sends_as=MEMBER, receives_from=HUB)
    hub.send(hub_leaves=True)
    assert member.receive() == []
    assert not member.is_open
    hub.close()
    member.close()


def test_deeply_nested_message_of_a_trusted_sender_is_dropped():
    ours, theirs = socket.socketpair()
    theirs.sendall(b"[" * 10_000 + b'\n{"end": true}\n')
    link = Link(ours)
    assert link.receive() == [{"end": True}]
    link.close()
    theirs.close()
