"""The folder of a job: whose run it holds, and with which configuration.

`config.json` and its readable form `config.txt` are written when a training job starts. They say
what command makes the same run again, and keep a folder from being used by two experiments. While
it trains, `.running` keeps it from being used by two runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from etils import epath

from layerkit_runner.checkpointing import folders
from layerkit_runner.checkpointing.errors import SaveError
from layerkit_runner.config.config_text import config_json, config_text
from layerkit_runner.config.experiment import reduced_overrides, reduced_values
from layerkit_runner.config.field_paths import override_path
from layerkit_runner.config.flags import RunOptions, parse_flags, run_words
from layerkit_runner.config.recorded import RecordedConfig, read_recorded_config
from layerkit_runner.config.resolve import ResolvedExperiment
from layerkit_runner.distributed.process_exchange import from_process_0
from layerkit_runner.errors import UsageError
from layerkit_runner.files.atomic_write import atomic_write, check_links, remove_stale_partials
from layerkit_runner.files.locks import NoLocksError, delete_and_unlock, try_lock

# Written by a sweep; a folder that holds it is not trained in.
STUDY_RECORD = "study.json"
# Locked while a job trains here; holds its host and process.
_RUNNING = ".running"
_MOST_CHANGES = 8
# The flags that only the first start of a job reads.
_BEGINNING = (
    "init_from",
    "init_draw",
    "restore_checkpoint_dir",
    "restore_checkpoint_step",
    "restore_cast_dtypes",
)


def check_same_experiment(directory: epath.Path, resolved: ResolvedExperiment) -> None:
    """Refuses a folder that holds a run of another experiment.

    Raises:
      UsageError: names both.
    """
    before = read_recorded_config(os.fspath(directory))
    if before is not None and before.experiment != resolved.name:
        raise UsageError(
            f"{directory} holds a run of {before.experiment}, not of {resolved.name};"
            " give another --job_log_dir."
        )


def check_writable(directory: epath.Path) -> None:
    """Refuses a folder that cannot be written, before any work is done for it.

    Leaves nothing behind: a run that is refused for another reason writes nothing.

    Raises:
      UsageError: says what the file system said.
    """
    if "://" in os.fspath(directory):
        return  # a store has no folders; it answers the first write
    missing, parent = directory, directory.parent
    try:
        if directory.exists():
            if not directory.is_dir():
                raise NotADirectoryError("it is a file")
            if not os.access(directory, os.W_OK | os.X_OK):
                raise PermissionError("it may not be written to")
            check_links(directory)
            return
        while not parent.exists():
            missing, parent = parent, parent.parent
        # Only the attempt tells: some file systems take no folders whatever their rights say.
        missing.mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(f"--job_log_dir={directory} cannot be written: {error}") from error
    # Another process of the same job may use it already.
    with contextlib.suppress(OSError):
        missing.rmdir()


def check_no_sweep(directory: epath.Path) -> None:
    """Refuses to train in the folder of a sweep, which would not be taken for one afterwards.

    Raises:
      UsageError: says how the sweep goes on.
    """
    if (directory / STUDY_RECORD).exists():
        raise UsageError(
            f"{directory} holds a sweep ({STUDY_RECORD}): --study=FILE goes on with it; to train"
            " one run, give another --job_log_dir."
        )


@contextlib.contextmanager
def only_trainer(directory: epath.Path) -> Iterator[None]:
    """Keeps other training jobs out of the folder, since each would delete the other's saves.

    The operating system frees the folder when the process ends, in whatever way. Where it has no
    locks, as in a store, the folder is not guarded. A folder that was made for this alone goes
    again.

    Raises:
      UsageError: names the process that trains there.
    """
    if "://" in os.fspath(directory):
        yield
        return
    path = Path(directory) / _RUNNING
    made = [folder for folder in path.parents if not folder.exists()]
    with contextlib.ExitStack() as stack:
        stack.callback(_remove_empty, made)
        try:
            held = try_lock(path)
        except NoLocksError:
            path.unlink(missing_ok=True)
            yield
            return
        if held is None:
            raise UsageError(
                f"a run trains in {directory} already, {_holder(path)}; wait for its end or stop"
                " it, or give another --job_log_dir."
            )
        stack.callback(delete_and_unlock, held)
        with contextlib.suppress(OSError):  # a full disk, which is told when something must be kept
            held.truncate(0)
            held.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode())
            held.flush()
        for folder in (directory, directory / "checkpoints"):
            remove_stale_partials(folder)
        yield


def _remove_empty(folders: Sequence[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # the run has written there
            folder.rmdir()


def _holder(path: Path) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError):  # it is just being written, or deleted
        holder = json.loads(path.read_text())
        return f"process {holder['pid']} on {holder['host']}"
    return "another process"


def write_config(
    directory: epath.Path,
    resolved: ResolvedExperiment,
    options: RunOptions,
    *,
    goes_on: bool = False,
    report: Callable[[str], None],
) -> None:
    """Writes the configuration; reports what differs from the one that was there.

    Args:
      directory: The folder of the job.
      resolved: The experiment with its overrides.
      options: Of the run at hand.
      goes_on: Whether the job began before; then it stays on record what it began with.
      report: Told the differences.
    """
    before = read_recorded_config(os.fspath(directory))
    if goes_on and before is not None:
        options = _begun_as(before, options)
    config = config_json(resolved, options)
    recorded = config["config"] if before is None else before.config
    for line in changed_lines(recorded, config["config"]):
        report(f"changed since this folder was last written: {line}")
    atomic_write(directory / "config.txt", config_text(resolved))
    atomic_write(directory / "config.json", json.dumps(config, indent=2) + "\n")


def _begun_as(record: RecordedConfig, options: RunOptions) -> RunOptions:
    """The options with what the recorded job began with, which a later command need not say."""
    try:
        first = parse_flags(record.arguments).options
    except UsageError:  # none are there, or they are of another version
        return options
    return dataclasses.replace(options, **{name: getattr(first, name) for name in _BEGINNING})


def changed_lines(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """One line for each path whose value differs."""
    paths = [path for path in {**before, **after} if before.get(path) != after.get(path)]
    return [f"{path}: {before.get(path)!r} → {after.get(path)!r}" for path in paths]


def changes_since_recorded(directory: epath.Path, resolved: ResolvedExperiment) -> list[str]:
    """Return lines that name the fields in which an experiment differs from a folder's record.

    Args:
      directory: Folder of a job.
      resolved: The experiment at hand.

    Returns:
      A headline, and a line for each of the experiment's own fields that differs. Where none of
      these does, the same for the fields of its configs. Nothing where nothing differs.
    """
    recorded = read_recorded_config(os.fspath(directory))
    if recorded is None:
        return []
    config = config_json(resolved)
    lines = changed_lines(recorded.fields, config["fields"])
    lines = lines or changed_lines(recorded.config, config["config"])
    if not lines:
        return []
    shown = [f"  {line}" for line in lines[:_MOST_CHANGES]]
    more = len(lines) - len(shown)
    return [
        f"{directory} was last written with other fields (there → here):",
        *shown,
        *([f"  … and {more} more; --diff_config={directory} shows all"] if more else []),
    ]


def recorded_num_train_steps(directory: epath.Path) -> int | None:
    """The last step of the training job of this folder; None where nothing says it."""
    recorded = read_recorded_config(os.fspath(directory))
    return None if recorded is None else recorded.config.get("task.train.num_train_steps")


def longer(resolved: ResolvedExperiment, num_steps: int) -> dict[str, str | None]:
    """Changes that make a run of so many steps."""
    path = "task.train.num_train_steps"
    return {path: None, last_step_path(resolved): str(num_steps)}


def last_step_path(resolved: ResolvedExperiment) -> str:
    """Return the override that sets the length of a run.

    A field of the experiment, if one gives the length, may stretch schedules, too.
    """
    return override_path(resolved, "task.train.num_train_steps")


def command_line(
    resolved: ResolvedExperiment,
    options: RunOptions,
    *,
    mode: str = "train",
    changes: Mapping[str, str | None] | None = None,
    flags: Sequence[str] = (),
) -> str:
    """A command, for a shell, that runs this experiment in this folder.

    The environment variable RUNNER_COMMAND says how `runner` is called here, where it has another
    name than that.

    Args:
      resolved: The experiment with its overrides.
      options: Of the run at hand; the command has those that mean something in its mode.
      mode: What the command is to do.
      changes: Override paths, each with the text that stands in place of its present one; None
        takes the override out.
      flags: Further words.
    """
    overrides = {**config_json(resolved)["overrides"], **(changes or {})}
    words = [f"--exp={resolved.name}"]
    reduced = _reduced_fields(resolved, changes or {})
    if reduced:
        words.append("--reduced")
        overrides = {path: text for path, text in overrides.items() if path not in reduced}
    words += [f"--fdl.{path}={text}" for path, text in overrides.items() if text is not None]
    words.append(f"--job_log_dir={options.job_log_dir}")
    if mode != "train":
        words.append(f"--mode={mode}")
    words += run_words(options, mode=mode)
    return " ".join([os.environ.get("RUNNER_COMMAND", "runner"), shlex.join([*words, *flags])])


def _reduced_fields(resolved: ResolvedExperiment, changes: Mapping[str, str | None]) -> set[str]:
    """The fields that `--reduced` sets to what they have; none where it would set others too."""
    experiment = resolved.experiment
    taken_out = {path for path, text in changes.items() if text is None}
    if taken_out & reduced_values(type(experiment)).keys():
        return set()
    return reduced_overrides(experiment) - changes.keys()


FILE_NAME = "last_checkpoint.json"
FLAG = "allow_restart_from_scratch"


def record_checkpoint(directory: epath.Path, step: int) -> None:
    """Record in the folder of a job that a step is committed.

    A record of the same step is left as it is, so that a run that is refused writes nothing.

    Raises:
      SaveError: The record cannot be written.
    """
    path, text = directory / FILE_NAME, json.dumps({"step": step}) + "\n"
    try:
        if not (path.exists() and path.read_bytes() == text.encode()):
            atomic_write(path, text)
    except OSError as error:
        raise SaveError(f"{path} could not be written: {error}; step {step} is saved.") from error


def forget_checkpoint(directory: epath.Path) -> None:
    """Delete the record, as a run that starts from scratch does before its first step."""
    (directory / FILE_NAME).unlink(missing_ok=True)


def check_restart(
    directory: epath.Path,
    checkpoints: epath.Path,
    *,
    is_allowed: bool,
    report: Callable[[str], None],
) -> None:
    """Raise an error if a job without a sound checkpoint has committed one before.

    To be called by all processes where no checkpoint is sound. Process 0 decides.

    Args:
      directory: The folder of the job.
      checkpoints: The folder of its checkpoints.
      is_allowed: Whether the job may start from scratch all the same. Steps that are damaged are
        moved aside then.
      report: Called with a line that says what was found, and one for each step that was moved.

    Raises:
      UsageError: A step is recorded or there, and starting from scratch is not allowed.
    """
    found = from_process_0(lambda: _lost_work(directory, checkpoints))
    if found is None:
        return
    if not is_allowed:
        raise UsageError(
            f"{found}. Expected a sound checkpoint, since training would start from scratch."
            f" Mount or restore {checkpoints}, give another --job_log_dir, or start this job from"
            f" scratch by --{FLAG}."
        )
    report(f"{found}; the run starts from scratch, as --{FLAG} allows")
    from_process_0(lambda: _move_aside(checkpoints, report))


def _lost_work(directory: epath.Path, checkpoints: epath.Path) -> str | None:
    """Return what shows that work would be lost; None if nothing does."""
    damaged = folders.committed_steps(checkpoints)
    if damaged:
        return f"{checkpoints} holds no sound checkpoint: damaged={damaged}"
    if not (directory / FILE_NAME).exists():
        return None
    try:
        step = json.loads((directory / FILE_NAME).read_text())["step"]
    except (OSError, ValueError, KeyError, TypeError):
        step = "unknown"
    return f"{checkpoints} holds no checkpoint, but {directory / FILE_NAME} has step={step}"


def _move_aside(checkpoints: epath.Path, report: Callable[[str], None]) -> None:
    for step in folders.committed_steps(checkpoints):
        path = folders.step_folder(checkpoints, step)
        report(f"{path} was moved aside to {folders.move_aside(path).name}")
