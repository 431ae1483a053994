"""Locks on files, by which processes keep out of each other's way.

They are the operating system's (flock): they end with the process that holds them, however it ends.
No clock is asked, on this or another machine. A process that is forked off would hold them too, and
for longer; so it lets go of them at once.
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
    """The file system of a folder has no locks."""


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Holds a lock, and waits for it before; makes its folder.

    Raises:
      UsageError: there can be no such file, or no lock on it (`NoLocksError`).
    """
    with _open(path) as file:
        _flock(file, fcntl.LOCK_EX)
        yield


def try_lock(path: Path) -> IO[bytes] | None:
    """A lock that is held until the file is closed; None if another process holds it.

    Raises:
      UsageError: there can be no such file, or no lock on it (`NoLocksError`).
    """
    while True:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(_open(path))
            try:
                _flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            # Between the two lines above, who held it may have deleted the file; whoever makes it
            # anew would not meet a lock on the one that is gone.
            if _is_at(file, path):
                stack.pop_all()
                return file


def delete_and_unlock(file: IO[bytes]) -> None:
    """Lets go of what `try_lock` gave, and leaves no file behind."""
    with contextlib.suppress(OSError):  # gone, or on a disk that became read-only
        os.unlink(file.name)
    # Closing alone would leave the lock to whoever has got the descriptor by a fork in C.
    fcntl.flock(file, fcntl.LOCK_UN)
    file.close()


_opened: weakref.WeakSet[IO[bytes]] = weakref.WeakSet()


def _open(path: Path) -> IO[bytes]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open_append(path)
    except OSError as error:
        raise UsageError(f"{path.parent} cannot be written: {error}") from error
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
        raise NoLocksError(f"{file.name}: this file system has no locks ({error}).") from error


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    except FileNotFoundError:
        return False
