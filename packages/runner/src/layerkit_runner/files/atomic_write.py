"""Writes files into folders that other users may also write to.

A symbolic link of another user could have a run overwrite any file of its owner. So every function
opens the last component of a path without following a link.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from etils import epath


class UnsafePathError(OSError):
    """A path that another user may have prepared, such as a symbolic link."""


def atomic_write(path: os.PathLike[str] | str, content: str | bytes, *, mode: int = 0o666) -> None:
    """Replace a file at once, so that a reader finds the old content or the new one.

    The content is written to a new file beside `path`, flushed to the disk and renamed. A symbolic
    link at `path` is replaced, not followed. A remote store shows an object only when it is
    complete.

    Args:
      path: Local path, or a path that `etils.epath` supports. The folder of the file is created.
      content: The whole content; text is encoded as UTF-8.
      mode: Permissions of a local file, from which the umask takes away.
    """
    data = content.encode() if isinstance(content, str) else content
    if is_remote(path):
        from etils import epath

        remote = epath.Path(path)
        remote.parent.mkdir(parents=True, exist_ok=True)
        remote.write_bytes(data)
        return
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # As tempfile.mkstemp does, but with the permissions that the user's umask asks for.
    partial = target.with_name(f".{target.name}.{secrets.token_hex(8)}.partial")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(partial, flags, mode)
    try:
        with naming_path(target), open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


@contextlib.contextmanager
def naming_path(path: os.PathLike[str] | str) -> Iterator[None]:
    """Add a path to errors of the system about an open file, such as a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(path)
        raise


def open_append(path: os.PathLike[str] | str, *, is_buffered: bool = True) -> BinaryIO:
    """Open a local file for reading and appending; raise `UnsafePathError` if it is a link."""
    return open(path, "a+b", buffering=-1 if is_buffered else 0, opener=_open_regular)


def open_read(path: os.PathLike[str] | str, *, is_buffered: bool = True) -> BinaryIO:
    """Open a file for reading; raise `UnsafePathError` if it is a folder, a pipe or a device.

    Links are followed. A path may be that of a remote store.
    """
    if is_remote(path):
        from etils import epath

        file: BinaryIO = epath.Path(path).open("rb")
        return file
    return open(path, "rb", buffering=-1 if is_buffered else 0, opener=_open_following_links)


def read_regular(path: os.PathLike[str] | str) -> bytes:
    """Return the content of a file that `open_read` opens."""
    with open_read(path) as file:
        return file.read()


def irregular(path: os.PathLike[str] | str) -> str | None:
    """Return what a local path is, such as `a named pipe`; None for a regular file.

    Raises:
      FileNotFoundError: There is nothing at the path, or behind a link there.
    """
    return _kind(os.stat(path).st_mode)


def _kind(mode: int) -> str | None:
    if stat.S_ISREG(mode):
        return None
    if stat.S_ISDIR(mode):
        return "a folder"
    return "a named pipe" if stat.S_ISFIFO(mode) else "a socket or device"


def _open_regular(path: str, flags: int) -> int:
    """Return the descriptor of a regular file; raise an error for links and everything else."""
    try:
        return _open_following_links(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):  # the latter on BSD
            raise _unsafe(path, "is a symbolic link", "a regular file") from None
        raise


def _open_following_links(path: str, flags: int) -> int:
    # Without O_NONBLOCK, opening a pipe waits for the other end.
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    kind = _kind(os.fstat(descriptor).st_mode)
    if kind is not None:
        os.close(descriptor)
        raise _unsafe(path, f"is {kind}", "a regular file")
    return descriptor


def private_folder(path: Path) -> Path:
    """Return a local folder that only this user can list or write; create it if there is none.

    It raises `UnsafePathError` for a link, a file, or the folder of another user.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        what = f"belongs to user {status.st_uid}"
        if not stat.S_ISDIR(status.st_mode):
            what = "is a symbolic link" if stat.S_ISLNK(status.st_mode) else "is a file"
        raise _unsafe(path, what, f"a folder of user {os.getuid()}")
    path.chmod(0o700)
    return path


def check_links(directory: os.PathLike[str] | str) -> None:
    """Raise `UnsafePathError` if an entry of a local folder is a symbolic link of another user.

    Links of this user and of root are allowed, so `DIR/checkpoints` may lie on another disk.
    """
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            owner = entry.stat(follow_symlinks=False).st_uid
            if entry.is_symlink() and owner not in (0, os.getuid()):
                raise _unsafe(
                    entry.path,
                    f"is a symbolic link of user {owner}",
                    f"links of user {os.getuid()} or root alone",
                )


def absolute(path: os.PathLike[str] | str) -> epath.Path:
    """Return a path that does not depend on the working folder; `~` is the user's home folder.

    Raises:
      UsageError: The scheme of a remote path is unknown.
    """
    from etils import epath

    from layerkit_runner.errors import UsageError

    text = os.fspath(path)
    if not is_remote(text):
        return epath.Path(os.path.abspath(os.path.expanduser(text)))
    try:
        return epath.Path(text)
    except KeyError as error:
        expected = "a local path, or one of a store that etils.epath knows, such as gs:// or s3://"
        raise UsageError("unknown scheme", value=text, expected=expected) from error


def is_remote(path: os.PathLike[str] | str) -> bool:
    """Return whether a path names a remote store, such as `gs://bucket/file`."""
    return "://" in os.fspath(path)


def _unsafe(path: os.PathLike[str] | str, what: str, expected: str) -> UnsafePathError:
    return UnsafePathError(
        f"{os.fspath(path)} {what}. Expected {expected}. Delete it, or use another folder."
    )
