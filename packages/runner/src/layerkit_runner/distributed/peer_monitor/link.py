"""Messages of the companions: JSON objects, one on a line, over a non-blocking socket.

Over a network each line is signed with a key that the processes of a job share, so that only they
are heard. A line that is too long, unsigned or wrongly signed closes the connection before its
content is parsed. The messages are not encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import socket
from typing import Any

_MAX_LINE_BYTES = 1 << 14
_MAX_READ_BYTES = 1 << 16
_SIGNATURE_CHARACTERS = 2 * hashlib.sha256().digest_size


class Link:
    """One end of a connection.

    Args:
      connection: A connected socket.
      key: Secret that both ends share; None sends plain lines, for a socket pair whose two ends
        trust each other.
      sends_as: Role of this end, which its signatures include.
      hears_from: Role of the other end.

    Attributes:
      socket: The socket, set to non-blocking.
      is_open: Whether the other end is still connected.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        key: bytes | None = None,
        sends_as: str = "",
        hears_from: str = "",
    ) -> None:
        connection.settimeout(0)
        self.socket = connection
        self.is_open = True
        self._key = key
        self._sends_as = sends_as
        self._hears_from = hears_from
        self._num_sent = self._num_received = 0
        self._received = b""
        self._is_stuck = False

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self.socket.fileno()

    def send(self, **message: Any) -> None:
        """Send a message, or nothing from the first one on that does not fit into the buffers.

        A receiver with that much unread input does not listen; the others notice its silence.
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
        """Return the complete messages that have arrived; close the link at its end.

        Malformed messages of a trusted sender are dropped.
        """
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
            # JSON that is nested deeply ends in a RecursionError.
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
        """Return what a line says, or None if the signature is not that of the other end."""
        if len(line) > _MAX_LINE_BYTES:
            return None
        if self._key is None:
            return line
        signature, _, content = line.partition(b" ")
        expected = _signature(self._key, self._hears_from, self._num_received, content)
        if len(signature) != _SIGNATURE_CHARACTERS or not hmac.compare_digest(signature, expected):
            return None
        self._num_received += 1
        return content


def _signature(key: bytes, role: str, number: int, content: bytes) -> bytes:
    """Return the signature of the message with this number that `role` sends."""
    signed = f"{role} {number} ".encode() + content
    return hmac.digest(key, signed, "sha256").hex().encode()
