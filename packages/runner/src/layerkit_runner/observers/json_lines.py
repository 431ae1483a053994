"""A growing file of JSON lines, on a disk or on a store that knows no append.

On a local disk each line is handed to the operating system at once, so a killed process loses at
most the line it was writing. Elsewhere (`gs://…`) the whole file is written anew every so often, in
the background, so that the run never waits for the store and readers only ever see whole files.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from typing import Any

from etils import epath

from layerkit_runner.files.atomic_write import atomic_write, is_remote, open_append
from layerkit_runner.observers.base import Background

_SECONDS_BETWEEN_REWRITES = 30.0


def encode(record: Mapping[str, Any]) -> str:
    """One line of valid JSON, without its end.

    JSON has no NaN or infinity: they become the strings "NaN", "Infinity" and "-Infinity" (the
    convention of protocol buffers), which `float` reads back.
    """
    return json.dumps({key: _plain(value) for key, value in record.items()}, allow_nan=False)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    number = float(value)
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    return number


class LineWriter:
    """Adds lines to `path`, keeping those already there.

    Attributes:
      resumed: whether the file held lines before.
    """

    resumed: bool

    def write(self, line: str) -> None:
        """Adds one line (given without its end)."""
        raise NotImplementedError

    def flush(self) -> None:
        """Starts writing out what is held back, without waiting."""

    def close(self) -> None:
        """Writes out what is left, and waits for it."""


def open_lines(path: epath.PathLike) -> LineWriter:
    """The writer that suits the store on which `path` lies; makes the folder."""
    path = epath.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return StoredLines(path) if is_remote(path) else LocalLines(path)


class LocalLines(LineWriter):
    """Appends to a file on a local disk; a line cut off by an earlier kill is removed first."""

    def __init__(self, path: epath.Path) -> None:
        self._file = open_append(path)
        self._file.seek(0)
        whole = _whole_lines(self._file.read())
        self.resumed = bool(whole)
        self._file.truncate(len(whole))

    def write(self, line: str) -> None:
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class StoredLines(LineWriter):
    """Rewrites the whole file every `interval` seconds and on `flush`, in the background.

    A rewrite that failed raises its error from a later call.
    """

    def __init__(self, path: epath.Path, *, interval: float = _SECONDS_BETWEEN_REWRITES) -> None:
        self._path = path
        self._interval = interval
        self._content = bytearray(_whole_lines(path.read_bytes() if path.exists() else b""))
        self.resumed = bool(self._content)
        self._background = Background()
        self._handed_over = len(self._content)  # bytes in the newest rewrite
        self._next_rewrite = 0.0

    def write(self, line: str) -> None:
        self._content += line.encode() + b"\n"
        if self._background.is_idle and time.monotonic() >= self._next_rewrite:
            self.flush()

    def flush(self) -> None:
        if self._handed_over < len(self._content):
            self._background.submit(atomic_write, self._path, bytes(self._content))
            self._handed_over = len(self._content)
            self._next_rewrite = time.monotonic() + self._interval

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._background.close()


def _whole_lines(content: bytes) -> bytes:
    """Return the content up to its last line end."""
    return content[: content.rfind(b"\n") + 1]
