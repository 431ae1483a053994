"""File locks between processes, by the operating system's flock.

A lock ends with the process that holds it, however that process ends, and needs no clock. A forked
process would share the locks of its parent and keep them longer, so it closes them at once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from layerkit_runner.errors import UsageError
from layerkit_runner.files.atomic_write import open_append


class NoLocksError(UsageError):
    """A file system without locks."""


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Wait for the lock on a file and hold it; create the file and its folder if needed."""
    with _open(path) as file:
        _flock(file, fcntl.LOCK_EX)
        yield


def try_lock(path: Path) -> IO[bytes] | None:
    """Return a file that holds a lock until it is closed; None if the lock is taken."""
    while True:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(_open(path))
            try:
                _flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            # The process that held the lock may have deleted the file since it was opened here. A
            # lock on the deleted file would not keep out a process that creates the file anew.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.lstat()):
                    stack.pop_all()
                    return file


def delete_and_unlock(file: IO[bytes]) -> None:
    """Delete and unlock a file that `try_lock` returned."""
    with contextlib.suppress(OSError):  # gone, or on a disk that became read-only
        os.unlink(file.name)
    # Closing alone would leave the lock to a process that C code forked with the descriptor.
    fcntl.flock(file, fcntl.LOCK_UN)
    file.close()


_opened: weakref.WeakSet[IO[bytes]] = weakref.WeakSet()


def _open(path: Path) -> IO[bytes]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: closing a buffered file on a full disk would raise an error without its path.
        file = open_append(path, is_buffered=False)
    except OSError as error:
        raise UsageError(f"cannot write: {error}", owner=str(path.parent)) from error
    _opened.add(file)
    return file


def _close_all() -> None:
    for file in list(_opened):
        file.close()


os.register_at_fork(after_in_child=_close_all)


def _flock(file: IO[bytes], operation: int) -> None:
    try:
        fcntl.flock(file, operation)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
        raise NoLocksError(f"this file system has no locks ({error})", owner=file.name) from error
