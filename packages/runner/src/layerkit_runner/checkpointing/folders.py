"""Names of the step folders: which are committed, unfinished or moved aside.

Orbax makes and commits the folders. Listing them here needs no Orbax. A step is committed by a
rename where that is atomic, and by a last file on Google's object store, which has no rename.
"""

from __future__ import annotations

import os
import re

from etils import epath

from layerkit_runner.files.atomic_write import is_remote

STEP_PREFIX = "checkpoint"
STEP_DIGITS = 8
# Name of the folder of checkpoints in a job folder.
JOB_SUBFOLDER = "checkpoints"
COMMIT_FILE = "commit_success.txt"
_ASIDE_PREFIX = "damaged_"
_TEMPORARY_SUFFIX = ".orbax-checkpoint-tmp"
_STEP_NAME = re.compile(rf"{STEP_PREFIX}_(\d{{{STEP_DIGITS},}})")
_UNFINISHED_NAME = re.compile(_STEP_NAME.pattern + re.escape(_TEMPORARY_SUFFIX) + ".*")


def step_folder(directory: epath.Path, step: int) -> epath.Path:
    """Return the folder of a step: `checkpoint_00000042` for step 42."""
    return directory / f"{STEP_PREFIX}_{step:0{STEP_DIGITS}d}"


def step_in_name(path: epath.Path) -> int | None:
    """Return the step in the name of a step folder, finished or not; None for other folders."""
    match = _STEP_NAME.fullmatch(path.name) or _UNFINISHED_NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def is_there(path: epath.Path) -> bool:
    """Return whether a path exists; a dangling link does."""
    return path.exists() or (not is_remote(path) and os.path.lexists(path))


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


def set_apart(directory: epath.Path) -> list[epath.Path]:
    """Return the folders of unfinished saves and of damaged steps that were moved aside."""
    aside = [path for path in _children(directory) if path.name.startswith(_ASIDE_PREFIX)]
    return sorted([*unfinished(directory), *aside])


def new_unfinished(directory: epath.Path, step: int) -> epath.Path:
    """Create an empty folder in which a step is written before `commit`."""
    path = step_folder(directory, step)
    if not _is_without_rename(path):
        path = path.parent / f"{path.name}{_TEMPORARY_SUFFIX}"
    if path.exists():
        path.rmtree()
    path.mkdir(parents=True)
    return path


def commit(unfinished_path: epath.Path, final: epath.Path) -> None:
    """Commit a step that was written to a folder of `new_unfinished`."""
    (unfinished_path / COMMIT_FILE).write_text("Copied or converted completely.")
    if unfinished_path != final:
        unfinished_path.rename(final)


def move_aside(path: epath.Path) -> epath.Path:
    """Rename the folder of a damaged step to an unused name and return the new path."""
    aside = path.parent / f"{_ASIDE_PREFIX}{path.name}"
    number = 1
    while is_there(aside):
        number += 1
        aside = path.parent / f"{_ASIDE_PREFIX}{path.name}_{number}"
    return path.rename(aside)


def _children(directory: epath.Path) -> list[epath.Path]:
    return list(directory.iterdir()) if directory.exists() else []


def _is_committed(path: epath.Path) -> bool:
    return not _is_without_rename(path) or (path / COMMIT_FILE).exists()


def _is_without_rename(path: epath.Path) -> bool:
    return str(path).startswith("gs://")
