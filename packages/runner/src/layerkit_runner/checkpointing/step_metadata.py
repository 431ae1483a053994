"""What a step says of itself: `metadata/metadata.json`, JSON of a few keys.

layout_version   of the files of a step, the names in them, and this file
state_format     `tensorstore` or `msgpack`, for people; readers look at the files
process_count    of the job that wrote it
keep             the rules by which checkpoints stayed when it was written; see `policy.py`
user             what the caller of `save` passed
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Mapping
from typing import Any

from etils import epath

from layerkit_runner.checkpointing.errors import LayoutVersionError
from layerkit_runner.checkpointing.policy import CheckpointPolicy

FOLDER, FILE = "metadata", "metadata.json"

# Raised when the files of a step, the names in them or the metadata change their meaning.
LAYOUT_VERSION = 1


def compose(
    user: Mapping[str, Any], *, state_format: str, process_count: int, policy: CheckpointPolicy
) -> dict[str, Any]:
    """Returns the metadata of a step that is about to be written.

    Raises:
      TypeError: `user` is not made of JSON values.
    """
    return {
        "layout_version": LAYOUT_VERSION,
        "state_format": state_format,
        "process_count": process_count,
        "keep": _policy_to_json(policy),
        "user": json.loads(to_json(user, name="metadata")),
    }


def read(step_directory: epath.Path) -> dict[str, Any]:
    """Returns the metadata of a committed step.

    Raises:
      LayoutVersionError: a later version of this package wrote it.
    """
    about = json.loads((step_directory / FOLDER / FILE).read_text())
    if about["layout_version"] > LAYOUT_VERSION:
        raise LayoutVersionError(
            f"The checkpoint {step_directory} has layout version {about['layout_version']}; this "
            f"version of layerkit-runner reads up to {LAYOUT_VERSION}. Use the newer version that "
            "wrote it."
        )
    return about


def write(step_directory: epath.Path, about: Mapping[str, Any]) -> None:
    """Replaces the metadata of a step that is not committed yet."""
    (step_directory / FOLDER / FILE).write_text(json.dumps(about))


def policy_of(about: Mapping[str, Any]) -> CheckpointPolicy | None:
    """Returns the rules that a step's metadata hold; None if it was written without."""
    fields = about.get("keep")
    if fields is None:
        return None
    known = {field.name for field in dataclasses.fields(CheckpointPolicy)}
    values = {name: value for name, value in fields.items() if name in known}
    if values.get("keep_interval") is not None:
        values["keep_interval"] = datetime.timedelta(seconds=values["keep_interval"])
    return CheckpointPolicy(**values)


def _policy_to_json(policy: CheckpointPolicy) -> dict[str, Any]:
    fields = dataclasses.asdict(policy)
    if policy.keep_interval is not None:
        fields["keep_interval"] = policy.keep_interval.total_seconds()
    return {**fields, "keep_steps": list(policy.keep_steps)}


def to_json(value: Mapping[str, Any], *, name: str) -> str:
    """Renders at once, so that a mistake is the caller's and later changes do no harm.

    Raises:
      TypeError: the value is not made of JSON values.
    """
    try:
        return json.dumps(dict(value))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name} must be JSON values (dict, list, str, int, float): {error}."
        ) from error
