"""Messages of the companions: JSON objects, one on a line, over a socket that never waits."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

_MOST_BYTES = 1 << 16


class Link:
    """One end of a connection.

    Attributes:
      socket: Not blocking.
      is_open: False once the other end is gone.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(0)
        self.socket = connection
        self.is_open = True
        self._received = b""

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, **message: Any) -> None:
        """Sends a message; one that does not fit into the buffers any more is lost.

        Whoever has so much unread does not listen, which is noticed by its silence.
        """
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have come in whole; closes the link at its end."""
        try:
            data = self.socket.recv(_MOST_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data or len(self._received) > _MOST_BYTES:
            self.is_open = False
        *lines, self._received = (self._received + data).split(b"\n")
        messages = []
        for line in lines:
            # A port scanner may have something else to say.
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, dict):
                    messages.append(message)
        return messages

    def close(self) -> None:
        self.is_open = False
        with contextlib.suppress(OSError):
            self.socket.close()
