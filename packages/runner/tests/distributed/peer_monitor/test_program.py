"""The order in which a peer monitor notices the end of its process and its last message."""

from __future__ import annotations

import json
import os
import socket
import time

import pytest

from layerkit_runner.distributed.peer_monitor.hub import BEAT_SECONDS
from layerkit_runner.distributed.peer_monitor.program import Monitor, Task
from layerkit_runner.distributed.watchdog import Identity

NOT_THE_PARENT = Identity(1, 2, "host1", os.getpid())


# A peer monitor closes its sockets by ending.
@pytest.mark.filterwarnings("ignore:unclosed", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_last_message_counts_although_the_end_of_the_process_is_noticed_first(tmp_path):
    process, control = socket.socketpair()
    pipes = [os.pipe() for _ in range(2)]
    with socket.create_server(("127.0.0.1", 0)) as hub:
        monitor = Monitor(
            Task(
                identity=NOT_THE_PARENT,
                control=control.detach(),
                streams=(pipes[0][0], pipes[1][0]),
                log=str(tmp_path / "log"),
                header="start",
                hub_address=hub.getsockname(),
                hub=Identity(0, 2, "host0", 1),
                listener=None,
                key="00",
            )
        )
        connection, _ = hub.accept()
    process.sendall(b'{"done": true}\n')
    process.close()
    for _, written in pipes:
        os.close(written)
    # This notices that the parent is another process, before the message is read.
    monitor._tick(time.monotonic() + BEAT_SECONDS)
    monitor.run()
    connection.settimeout(10)
    with connection:
        lines = connection.recv(1 << 16).decode().splitlines()
    messages = [json.loads(line.partition(" ")[2]) for line in lines]
    assert {"done": True} in messages
    assert not any("how" in message for message in messages)
