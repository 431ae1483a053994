"""Which kind of folder a path names: a job's, its checkpoints', one step's, or Hugging Face's."""

from __future__ import annotations

import dataclasses
import re

from etils import epath

from layerkit.near_names import near_names
from layerkit_runner.checkpointing import folders
from layerkit_runner.errors import UsageError, first_names
from layerkit_runner.files.atomic_write import absolute

_STEP_NAME = re.compile(rf"{folders.STEP_PREFIX}_(\d+)")


@dataclasses.dataclass(frozen=True)
class CheckpointFolder:
    """A folder of checkpoints.

    Attributes:
      directory: Absolute.
      step: The one that the path names; None where it names all.
    """

    directory: epath.Path
    step: int | None


@dataclasses.dataclass(frozen=True)
class HuggingFaceFolder:
    """A folder with `config.json` and safetensors files."""

    directory: epath.Path


def recognise(given: str) -> CheckpointFolder | HuggingFaceFolder:
    """Looks at what lies in a folder.

    Args:
      given: A path of this machine, or a store's, such as `gs://bucket/run`.

    Raises:
      UsageError: there is no such folder, or nothing to begin from in it.
    """
    directory = absolute(given)
    if not directory.is_dir():
        parent = directory.parent
        beside = [path.name for path in parent.iterdir()] if parent.is_dir() else []
        what = f"{given} is a file" if directory.exists() else f"there is no folder {given}"
        raise UsageError(f"{what}{near_names(directory.name, beside)}")
    named = _STEP_NAME.fullmatch(directory.name)
    if named and (directory / "state").is_dir():
        return CheckpointFolder(directory.parent, int(named[1]))
    for place in (directory, directory / "checkpoints"):
        if folders.committed_steps(place):
            return CheckpointFolder(place, None)
    children = [path.name for path in directory.iterdir()]
    if "config.json" in children and any(name.endswith(".safetensors") for name in children):
        return HuggingFaceFolder(directory)
    raise UsageError(
        "expected the folder of a job, of its checkpoints or one of them, or of Hugging Face"
        f" (config.json and *.safetensors); {given} {_found(children)}"
    )


def _found(children: list[str]) -> str:
    if not children:
        return "is empty"
    if "checkpoints" in children:
        return "is that of a job without a checkpoint"
    if any(name.endswith(".bin") for name in children):
        return "has *.bin, which is not read: save the model anew, which writes safetensors"
    return f"holds {first_names(sorted(children), limit=5)}"
