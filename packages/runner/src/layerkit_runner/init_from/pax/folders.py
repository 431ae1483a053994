"""Finds the checkpoints in a folder of Paxml.

Paxml writes `checkpoints/checkpoint_<step>/state` in the folder of a job, beside
`metadata/metadata`. Versions before 1.0 wrote the files of `state` into the step folder itself.
"""

from __future__ import annotations

import dataclasses
import re

from etils import epath

from layerkit_runner.checkpointing import folders
from layerkit_runner.errors import UsageError
from layerkit_runner.files.atomic_write import is_remote

# Flax's format has no leading zeros, and Paxml can leave out the prefix.
_STEP_NAME = re.compile(r"(?:checkpoint_)?(\d{1,18})")
MSGPACK_FILE = "checkpoint"
OCDBT_FILE = "manifest.ocdbt"
ZARR_PREFIX = "mdl_vars."


@dataclasses.dataclass(frozen=True)
class PaxFolder:
    """The steps that Paxml wrote into a folder of checkpoints, in ascending order."""

    directory: epath.Path
    steps: dict[int, epath.Path]

    def choose(self, step: int | None) -> tuple[int, epath.Path]:
        """Return (step, its folder); the newest for None."""
        chosen = max(self.steps) if step is None else step
        if chosen not in self.steps:
            raise UsageError(
                "no such checkpoint",
                owner=str(self.directory),
                field="step",
                value=step,
                choices=list(self.steps),
            )
        return chosen, self.steps[chosen]


def find(directory: epath.Path) -> PaxFolder | None:
    """Return the checkpoints of Paxml in a folder of a job, or of one step; None if it has none."""
    named = _STEP_NAME.fullmatch(directory.name)
    if named and _is_pax(directory):
        return PaxFolder(directory.parent, {int(named[1]): directory})
    for place in (directory, directory / folders.JOB_SUBFOLDER):
        found = {
            int(match[1]): path
            for path in (place.iterdir() if place.is_dir() else ())
            if (match := _STEP_NAME.fullmatch(path.name)) and _is_pax(path)
        }
        if found:
            return PaxFolder(place, dict(sorted(found.items())))
    return None


def state_folder(step_folder: epath.Path) -> epath.Path:
    """Return the folder of the arrays of a step."""
    inner = step_folder / "state"
    return inner if inner.is_dir() else step_folder


def _is_pax(step_folder: epath.Path) -> bool:
    """Return whether Paxml wrote and committed a step."""
    if not step_folder.is_dir():
        return False
    if is_remote(step_folder) and not (step_folder / folders.COMMIT_FILE).exists():
        return False
    state = state_folder(step_folder)
    if (state / MSGPACK_FILE).is_file():
        return True
    if (state / OCDBT_FILE).is_file():
        return (step_folder / "metadata" / "metadata").is_file()
    return any(path.name.startswith(ZARR_PREFIX) for path in state.iterdir())
