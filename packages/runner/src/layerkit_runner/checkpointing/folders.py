"""The folders of checkpoint steps: their names, and the JSON documents in them.

Orbax makes and commits the folders. Listing them here needs no Orbax. A step is committed by a
rename where that is atomic, and by a last file on Google's object store, which has no rename.

metadata/metadata.json                    layout version, state format, process count, retention
                                          policy (`keep`), and what the caller of `save` passed
input_states/process_00000_of_00001.json  input name to input state, one file for each process
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import re
from collections.abc import Mapping
from typing import Any

import jax
from etils import epath

from layerkit_runner.checkpointing.errors import (
    DamagedCheckpointError,
    ProcessCountError,
    later_version,
    naming_damage,
)
from layerkit_runner.checkpointing.policy import CheckpointPolicy
from layerkit_runner.files.atomic_write import is_remote, read_regular

STEP_PREFIX = "checkpoint"
STEP_DIGITS = 8
# Name of the folder of checkpoints in a job folder.
JOB_SUBFOLDER = "checkpoints"
RECORD_FILE = "last_checkpoint.json"
COMMIT_FILE = "commit_success.txt"
_ASIDE = ("damaged_", "abandoned_")
_TEMPORARY_SUFFIX = ".orbax-checkpoint-tmp"
_STEP_NAME = re.compile(rf"{STEP_PREFIX}_(\d{{{STEP_DIGITS},}})")
_UNFINISHED_NAME = re.compile(_STEP_NAME.pattern + re.escape(_TEMPORARY_SUFFIX) + ".*")
# Increased when the files of a step, the names in them or the metadata change their meaning.
LAYOUT_VERSION = 1
_METADATA_FILE = "metadata/metadata.json"
_INPUT_STATES_FOLDER = "input_states"
_INPUT_STATES = re.compile(r"process_(\d{5})_of_(\d{5})\.json")
_INPUT_STATES_NAME = "process_{:05d}_of_{:05d}.json"


def step_folder(directory: epath.Path, step: int) -> epath.Path:
    """Return the folder of a step: `checkpoint_00000042` for step 42."""
    return directory / f"{STEP_PREFIX}_{step:0{STEP_DIGITS}d}"


def step_in_name(path: epath.Path) -> int | None:
    """Return the step in the name of a step folder, finished or not; None for other folders."""
    match = _STEP_NAME.fullmatch(path.name) or _UNFINISHED_NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def record_file(directory: epath.Path) -> epath.Path | None:
    """Return the file of a job folder that records the newest committed step of `directory`.

    Return None for a folder of checkpoints that is not in a job folder.
    """
    return directory.parent / RECORD_FILE if directory.name == JOB_SUBFOLDER else None


def recorded_step(directory: epath.Path) -> int | str | None:
    """Return the newest committed step that the job folder records, or "unknown" or None.

    "unknown" means a record that cannot be read, and None that there is no record.
    """
    path = record_file(directory)
    if path is None or not is_there(path):
        return None
    try:
        step = json.loads(read_regular(path))["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return "unknown"
    return step if isinstance(step, int) else "unknown"


def is_there(path: epath.Path) -> bool:
    """Return whether a path exists. A dangling link counts as existing."""
    return path.exists() or (not is_remote(path) and os.path.lexists(path))


def checkpoints_folder(directory: epath.Path) -> epath.Path:
    """Return the folder of checkpoints, given that folder or its job folder."""
    inside = directory / JOB_SUBFOLDER
    # A job folder may have the same name.
    is_named_so = directory.name == JOB_SUBFOLDER and not inside.is_dir()
    return directory if is_named_so or committed_steps(directory) else inside


def committed_steps(directory: epath.Path) -> list[int]:
    """Return the committed steps in ascending order; empty if the folder does not exist."""
    return sorted(
        int(match[1])
        for path in _children(directory)
        if (match := _STEP_NAME.fullmatch(path.name)) and _is_committed(path)
    )


def unfinished(directory: epath.Path) -> list[epath.Path]:
    """Return the folders of unfinished saves, by name."""
    return sorted(
        path
        for path in _children(directory)
        if _UNFINISHED_NAME.fullmatch(path.name)
        or (_STEP_NAME.fullmatch(path.name) and not _is_committed(path))
    )


def unfinished_or_damaged(directory: epath.Path) -> list[epath.Path]:
    """Return the folders of unfinished saves and of steps that were moved aside."""
    aside = [path for path in _children(directory) if path.name.startswith(_ASIDE)]
    return sorted([*unfinished(directory), *aside])


def move_aside(path: epath.Path, *, reason: str = "damaged") -> epath.Path:
    """Rename the folder of a step to an unused name, `damaged_…`, and return the new path."""
    aside = path.parent / f"{reason}_{path.name}"
    number = 1
    while is_there(aside):
        number += 1
        aside = path.parent / f"{reason}_{path.name}_{number}"
    return path.rename(aside)


def _children(directory: epath.Path) -> list[epath.Path]:
    return list(directory.iterdir()) if directory.exists() else []


def _is_committed(path: epath.Path) -> bool:
    can_rename = not str(path).startswith("gs://")
    return can_rename or (path / COMMIT_FILE).exists()


def make_metadata(
    user: Mapping[str, Any], *, state_format: str, process_count: int, policy: CheckpointPolicy
) -> str:
    """Return the metadata of a step that is going to be written, as JSON."""
    keep = dataclasses.asdict(policy) | {"keep_steps": list(policy.keep_steps)}
    if policy.keep_interval is not None:
        keep["keep_interval"] = policy.keep_interval.total_seconds()
    about = {
        "layout_version": LAYOUT_VERSION,
        "state_format": state_format,
        "process_count": process_count,
        "keep": keep,
        "user": dict(user),
    }
    return json.dumps(about)


def read_metadata(step_directory: epath.Path) -> dict[str, Any]:
    """Return the metadata of a committed step.

    Raises:
      LayoutVersionError: A later version of this package wrote the step.
      DamagedCheckpointError: The file cannot be read, or lacks a value.
    """
    path = step_directory / _METADATA_FILE
    with naming_damage(path):
        about: dict[str, Any] = json.loads(read_regular(path))
        is_later = int(about["layout_version"]) > LAYOUT_VERSION
        about["user"] = dict(about["user"])
    if is_later:
        version = about["layout_version"]
        raise later_version(step_directory, "layout_version", version, LAYOUT_VERSION)
    return about


def policy_of(about: Mapping[str, Any]) -> CheckpointPolicy | None:
    """Return the retention policy in a step's metadata; None if there is none."""
    fields = about.get("keep")
    if fields is None:
        return None
    known = {field.name for field in dataclasses.fields(CheckpointPolicy)}
    values = {name: value for name, value in fields.items() if name in known}
    if values.get("keep_interval") is not None:
        values["keep_interval"] = datetime.timedelta(seconds=values["keep_interval"])
    return CheckpointPolicy(**values)


def write_documents(step_directory: epath.Path, metadata: str, input_states: str) -> None:
    """Write the input states of this process and, on process 0, the metadata; both are JSON."""
    name = _INPUT_STATES_NAME.format(jax.process_index(), jax.process_count())
    documents = {f"{_INPUT_STATES_FOLDER}/{name}": input_states}
    if jax.process_index() == 0:
        documents[_METADATA_FILE] = metadata
    for name, text in documents.items():
        path = step_directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def read_input_states(step_directory: epath.Path) -> dict[str, Any]:
    """Return this process's input states by input name.

    If the number of processes has changed, these are the states of process 0.

    Raises:
      ProcessCountError: The number has changed and a state lacks `"scope": "global"`.
      DamagedCheckpointError: The folder has no file of input states, or it cannot be read.
    """
    directory = step_directory / _INPUT_STATES_FOLDER
    matches = [_INPUT_STATES.fullmatch(path.name) for path in directory.iterdir()]
    counts = [int(match[2]) for match in matches if match]
    if not counts:
        raise DamagedCheckpointError("no input states", owner=str(directory))
    count = counts[0]
    is_same = count == jax.process_count()
    index = jax.process_index() if is_same else 0
    path = directory / _INPUT_STATES_NAME.format(index, count)
    with naming_damage(path):
        states: dict[str, Any] = json.loads(read_regular(path))
        bound = [
            name
            for name, state in states.items()
            if not (isinstance(state, Mapping) and state.get("scope") == "global")
        ]
    if bound and not is_same:
        raise ProcessCountError(
            f"the checkpoint holds input states of single processes ({', '.join(bound)})",
            field="number of processes",
            value=jax.process_count(),
            expected=f"{count}, or inputs whose state has the scope 'global'",
        )
    return states
