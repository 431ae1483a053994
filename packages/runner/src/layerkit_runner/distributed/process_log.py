"""Log of each process of a job, which receives everything that the process prints."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from layerkit_runner.distributed.watchdog import Identity
from layerkit_runner.errors import UsageError
from layerkit_runner.files.atomic_write import (
    absolute,
    check_links,
    is_remote,
    open_append,
    private_folder,
)

_SECONDS_TO_END = 3.0


def log_file(identity: Identity, job_log_dir: str | None) -> Path:
    """Return `DIR/logs/process_0003.log`, or a file in a folder of this machine and print why."""
    name = f"process_{identity.process:04d}.log"
    directory = os.fspath(absolute(job_log_dir or "."))
    folder = Path(directory) / "logs"
    try:
        if is_remote(directory):
            raise OSError("a store cannot append to files")
        check_links(directory)
        folder.mkdir(parents=True, exist_ok=True)
        return folder / name
    except OSError as error:
        reason = str(error)
    digest = hashlib.sha256(directory.encode()).hexdigest()[:8]
    local = private_folder(Path(tempfile.gettempdir()) / f"layerkit_logs_{os.getuid()}_{digest}")
    if identity.process == 0:
        print(
            f"logs         in {local} of each process's machine, not in {directory}: {reason}",
            flush=True,
        )
    return local / name


@contextlib.contextmanager
def copying_output(identity: Identity, log: Path) -> Iterator[None]:
    """Append all output of this process to its log, also that of compiled code.

    The terminal shows all output of process 0, and standard error of the others. Programs `tee`
    make the copies, which include the last lines of a process that is killed.
    """
    saved = {number: os.dup(number) for number in (1, 2)}
    copies: list[subprocess.Popen[bytes]] = []
    with _open(log) as file:
        file.write(f"{identity}: {shlex.join(sys.argv)}\n".encode())
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            stream.flush()
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True)
            if number == 1 and identity.process != 0:
                os.dup2(file.fileno(), number)
            else:
                copies.append(_start_tee(file.fileno(), number))
    try:
        yield
    finally:
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            stream.flush()
            os.dup2(saved[number], number)
        for copy in copies:
            with contextlib.suppress(subprocess.TimeoutExpired):
                copy.wait(_SECONDS_TO_END)


def _open(log: Path) -> BinaryIO:
    try:
        return open_append(log, is_buffered=False)
    except OSError as error:
        raise UsageError(f"cannot write the log: {error}") from error


def _start_tee(log: int, number: int) -> subprocess.Popen[bytes]:
    """Connect a descriptor of this process to a `tee`, which writes to its former target too."""
    tee = subprocess.Popen(
        ["tee", "-a", f"/dev/fd/{log}"],
        stdin=subprocess.PIPE,
        stdout=number,
        pass_fds=[log],
        # It outlives signals to the process group, and a terminal that is closed.
        start_new_session=True,
        restore_signals=False,
    )
    assert tee.stdin is not None
    with tee.stdin as pipe:
        os.dup2(pipe.fileno(), number)
    return tee
