"""The job folder: its recorded experiment and configuration, its lock and its restart check.

A training job writes `config.json`, from which `command_line` is repeated, and `config.txt`, the
same in readable form. While it trains, it holds a lock on `.running`, the operating system's flock.
The lock ends with the process that holds it, however that process ends, and needs no clock. A
forked process would share the locks of its parent and keep them longer, so it closes them at once.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import errno
import fcntl
import json
import os
import shlex
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from etils import epath

from layerkit.errors import as_sentence
from layerkit_runner.checkpointing import folders
from layerkit_runner.checkpointing.errors import SaveError
from layerkit_runner.config.config_tree import config_json, config_text
from layerkit_runner.config.experiment import is_field_name
from layerkit_runner.config.recorded import (
    FIRST_START_FLAGS,
    differing_names,
    read_recorded_config,
)
from layerkit_runner.config.requests import ResolvedExperiment, to_argv
from layerkit_runner.config.stages import stages_of
from layerkit_runner.distributed.cluster import run_on_process_0
from layerkit_runner.errors import UsageError
from layerkit_runner.files.atomic_write import (
    atomic_write,
    check_links,
    is_remote,
    open_append,
    read_regular,
)
from layerkit_runner.run_options import RunOptions

# File that is locked while a job trains; it holds the job's host and process id.
_RUNNING = ".running"
_MAX_CHANGES = 8


def check_same_experiment(directory: epath.Path, resolved: ResolvedExperiment) -> None:
    """Raise `UsageError` if the folder holds a run of another experiment."""
    before = read_recorded_config(os.fspath(directory))
    trainer = resolved.experiment.trained_by
    names = {resolved.name}
    if trainer is not None:
        names.add(f"{trainer.__module__}.{trainer.__qualname__}")
    if before is not None and before.experiment not in names:
        raise UsageError(
            f"the folder holds a run of {before.experiment}",
            owner=resolved.name,
            field="--job_log_dir",
            value=os.fspath(directory),
            hint="Give another --job_log_dir.",
        )


def check_writable(directory: epath.Path) -> None:
    """Raise `UsageError` if a folder cannot be written. Leave the file system unchanged."""
    if is_remote(directory):
        return  # an object store has no folders
    try:
        if directory.exists():
            check_links(directory)
            if not os.access(directory, os.W_OK | os.X_OK):
                raise PermissionError("No write permission")
        if directory.is_dir():
            return
        missing = next(p for p in (directory, *directory.parents) if p.parent.exists())
        # Some file systems refuse new folders whatever their permissions are.
        missing.mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(
            "cannot write to the folder",
            field="--job_log_dir",
            value=os.fspath(directory),
            hint=as_sentence(str(error)),
        ) from error
    # Another process of the same job may use it already.
    with contextlib.suppress(OSError):
        missing.rmdir()


@contextlib.contextmanager
def only_trainer(directory: epath.Path) -> Iterator[None]:
    """Lock the folder, so that no other training job deletes the checkpoints of this one.

    The operating system releases the lock when the process ends. An object store is not guarded. A
    folder that was made for the lock alone is deleted.
    """
    if is_remote(directory):
        yield
        return
    path = Path(directory) / _RUNNING
    made = [folder for folder in path.parents if not folder.exists()]
    with contextlib.ExitStack() as stack:
        stack.callback(_remove_empty, made)
        try:
            lock = try_lock(path)
            if lock is None:  # A report holds the lock for a moment to see whether a job runs.
                time.sleep(0.1)
                lock = try_lock(path)
        except NoLocksError:
            path.unlink(missing_ok=True)
            yield
            return
        if lock is None:
            raise UsageError(
                f"{_holder(path)} trains in this folder",
                field="--job_log_dir",
                value=os.fspath(directory),
                hint="Wait until it ends or stop it, or give another --job_log_dir.",
            )
        stack.callback(delete_and_unlock, lock)
        with contextlib.suppress(OSError):  # A full disk is reported when a file is required.
            lock.truncate(0)
            lock.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode())
            lock.flush()
        yield


def _remove_empty(folders: Sequence[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # It is not empty.
            folder.rmdir()


def _holder(path: Path) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError):  # It is being written or deleted.
        holder = json.loads(read_regular(path))
        return f"process {holder['pid']} on {holder['host']}"
    return "another process"


def write_config(
    directory: epath.Path,
    resolved: ResolvedExperiment,
    options: RunOptions,
    *,
    resumes: bool = False,
    report: Callable[[str], None],
) -> None:
    """Write the configuration and report its changes since the recorded one.

    If the job was started before (`resumes`), the record keeps the flags of its first start.
    """
    before = read_recorded_config(os.fspath(directory))
    if resumes and before is not None:
        with contextlib.suppress(UsageError):  # The flags are missing, or of another version.
            options = dataclasses.replace(options, **before.first_start_options())
    config = config_json(resolved, options)
    recorded = config["config"] if before is None else before.config
    for line in changed_lines(recorded, config["config"]):
        report(f"changed since this folder was last written: {line}")
    atomic_write(directory / "config.txt", config_text(resolved))
    atomic_write(directory / "config.json", json.dumps(config, indent=2) + "\n")


def changed_lines(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return one line for each path whose value differs; a missing value is as None."""
    pairs = {path: (before.get(path), after.get(path)) for path in differing_names(before, after)}
    changed = {path: pair for path, pair in pairs.items() if pair != (None, None)}
    return [f"{path}: {old!r} → {new!r}" for path, (old, new) in changed.items()]


def changes_since_recorded(directory: epath.Path, resolved: ResolvedExperiment) -> list[str]:
    """Return lines about the fields, or else configs, that differ from a record."""
    recorded = read_recorded_config(os.fspath(directory))
    if recorded is None:
        return []
    config = config_json(resolved)
    lines = changed_lines(recorded.fields, config["fields"])
    lines = lines or changed_lines(recorded.config, config["config"])
    if (more := len(lines) - _MAX_CHANGES) > 0:
        lines[_MAX_CHANGES:] = [f"… and {more} more; --diff_config={directory} shows all"]
    headline = f"{directory} was written with other fields (recorded → now):"
    return [headline, *(f"  {line}" for line in lines)] if lines else []


def recorded_num_train_steps(directory: epath.Path) -> int | None:
    """Return the number of steps of this folder's training job; None if it is not recorded."""
    recorded = read_recorded_config(os.fspath(directory))
    return None if recorded is None else recorded.config.get("task.train.num_train_steps")


def last_step_path(resolved: ResolvedExperiment) -> str | None:
    """Return the override path of the number of steps: a field of the experiment, if one sets it.

    A schedule may depend on the field. It is None if STAGES determine the number.
    """
    if stages_of(resolved.experiment):
        return None
    path, num_steps = "task.train.num_train_steps", resolved.task.train.num_train_steps
    fields = {} if path in (o.path for o in resolved.deep_overrides) else vars(resolved.experiment)
    for name, value in fields.items():
        if is_field_name(name) and value == num_steps:
            longer_experiment = copy.copy(resolved.experiment)
            setattr(longer_experiment, name, num_steps + 1)
            if longer_experiment.task().train.num_train_steps == num_steps + 1:
                return name
    return path


def command_line(
    options: RunOptions, *, mode: str = "train", changes: Mapping[str, str] | None = None
) -> str:
    """Return a shell command that runs the recorded experiment of this folder.

    RUNNER_COMMAND in the environment replaces `runner`. `changes` are values by override path.
    """
    # The record has the flags of the first start.
    recorded = {name: getattr(RunOptions, name) for name in FIRST_START_FLAGS}
    options = dataclasses.replace(options, **recorded)
    words = [f"--job_log_dir={options.job_log_dir}"]
    words += [f"--fdl.{path}={text}" for path, text in (changes or {}).items()]
    words += [f"--mode={mode}"] * (mode != "train")
    words += to_argv(options, mode=mode)
    return " ".join([os.environ.get("RUNNER_COMMAND", "runner"), shlex.join(words)])


FLAG = "allow_restart_from_scratch"


def record_checkpoint(directory: epath.Path, step: int) -> None:
    """Record in the job folder that a step is committed, unless it is recorded."""
    path, text = directory / folders.RECORD_FILE, json.dumps({"step": step}) + "\n"
    try:
        if not path.exists() or path.read_text() != text:
            atomic_write(path, text)
    except OSError as error:
        raise SaveError(f"{path} could not be written: {error}; step {step} is saved.") from error


def forget_checkpoint(directory: epath.Path) -> None:
    """Delete the record of committed steps, before the first step of a run from scratch."""
    (directory / folders.RECORD_FILE).unlink(missing_ok=True)


def start_over(
    directory: epath.Path,
    checkpoints: epath.Path,
    *,
    is_allowed: bool,
    report: Callable[[str], None],
) -> None:
    """Move damaged steps aside, so that a job without an intact checkpoint starts from scratch.

    All processes call it if no checkpoint is intact.

    Raises:
      UsageError: The job has committed a checkpoint before, and this is not allowed.
    """
    problem = run_on_process_0(lambda: _lost_work(directory, checkpoints))
    if problem is None:
        return
    if not is_allowed:
        raise UsageError(
            f"{problem}. Training would start from scratch",
            field="--job_log_dir",
            value=os.fspath(directory),
            hint=f"Mount or restore {checkpoints}, give another --job_log_dir, or start from"
            f" scratch with --{FLAG}.",
        )
    report(f"starting from scratch (--{FLAG}): {problem}")

    def move_aside() -> None:
        for step in folders.committed_steps(checkpoints):
            path = folders.step_folder(checkpoints, step)
            report(f"moved {path} aside to {folders.move_aside(path).name}")

    run_on_process_0(move_aside)


def _lost_work(directory: epath.Path, checkpoints: epath.Path) -> str | None:
    if damaged := folders.committed_steps(checkpoints):
        return f"all checkpoints of {checkpoints} are damaged: {damaged}"
    step = folders.recorded_step(directory / folders.JOB_SUBFOLDER)
    if step is None:
        return None
    path = directory / folders.RECORD_FILE
    return f"{checkpoints} has no checkpoint, but {path} records step {step}"


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
