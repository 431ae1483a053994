"""The JSON documents of checkpoints.

metadata/metadata.json                    layout version, state format, process count, retention
                                          policy (`keep`), and what the caller of `save` passed
input_states/process_00000_of_00001.json  input name to input state, one file for each process
evaluations.json                          beside the steps: {"version": 1, "evaluations":
                                          {"400": {"heldout/loss": 2.5, …}, …}}

Evaluations may come after the save of their step, whose files never change, so they lie outside.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
from etils import epath

from layerkit_runner.checkpointing.errors import LayoutVersionError, ProcessCountError
from layerkit_runner.checkpointing.policy import CheckpointPolicy
from layerkit_runner.files.atomic_write import atomic_write

# Raised when the files of a step, the names in them or the metadata change their meaning.
LAYOUT_VERSION = 1
EVALUATIONS_FILE = "evaluations.json"
_EVALUATIONS_VERSION = 1
_FILE = "metadata/metadata.json"
_INPUT_STATES = re.compile(r"process_(\d{5})_of_(\d{5})\.json")

Evaluations = dict[int, dict[str, float]]
"""Step to metrics, these by `data set/metric`."""


def compose(
    user: Mapping[str, Any], *, state_format: str, process_count: int, policy: CheckpointPolicy
) -> dict[str, Any]:
    """Return the metadata of a step that is about to be written.

    Raises:
      TypeError: `user` is not made of JSON values.
    """
    keep = dataclasses.asdict(policy) | {"keep_steps": list(policy.keep_steps)}
    if policy.keep_interval is not None:
        keep["keep_interval"] = policy.keep_interval.total_seconds()
    return {
        "layout_version": LAYOUT_VERSION,
        "state_format": state_format,
        "process_count": process_count,
        "keep": keep,
        "user": json.loads(to_json(user, name="metadata")),
    }


def read(step_directory: epath.Path) -> dict[str, Any]:
    """Return the metadata of a committed step.

    Raises:
      LayoutVersionError: A later version of this package wrote it.
    """
    about = json.loads((step_directory / _FILE).read_text())
    if about["layout_version"] > LAYOUT_VERSION:
        raise LayoutVersionError(
            f"The checkpoint {step_directory} has layout version {about['layout_version']}; this "
            f"version of layerkit-runner reads up to {LAYOUT_VERSION}. Use the newer version that "
            "wrote it."
        )
    return about


def write(step_directory: epath.Path, about: Mapping[str, Any]) -> None:
    """Replace the metadata of a step that is not committed yet."""
    (step_directory / _FILE).write_text(json.dumps(about))


def policy_of(about: Mapping[str, Any]) -> CheckpointPolicy | None:
    """Return the retention policy in a step's metadata; None if it was written without."""
    fields = about.get("keep")
    if fields is None:
        return None
    known = {field.name for field in dataclasses.fields(CheckpointPolicy)}
    values = {name: value for name, value in fields.items() if name in known}
    if values.get("keep_interval") is not None:
        values["keep_interval"] = datetime.timedelta(seconds=values["keep_interval"])
    return CheckpointPolicy(**values)


def to_json(value: Mapping[str, Any], *, name: str) -> str:
    """Return the JSON text of a value at once, so that later changes of it do no harm.

    Raises:
      TypeError: The value is not made of JSON values.
    """
    try:
        return json.dumps(dict(value))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name} must be JSON values (dict, list, str, int, float): {error}."
        ) from error


def write_input_states(directory: epath.Path, text: str) -> None:
    """Write this process's file; `text` is a JSON object, input name to state."""
    (directory / _input_states_name(jax.process_index(), jax.process_count())).write_text(text)


def read_input_states(directory: epath.Path) -> dict[str, Any]:
    """Return this process's input states by input name.

    If the number of processes has changed, these are process 0's, provided that each has
    `"scope": "global"`.

    Raises:
      ProcessCountError: It changed and the scope of some state is another.
    """
    matches = (_INPUT_STATES.fullmatch(path.name) for path in directory.iterdir())
    count = next(int(match[2]) for match in matches if match)
    is_same = count == jax.process_count()
    index = jax.process_index() if is_same else 0
    states = json.loads((directory / _input_states_name(index, count)).read_text())
    bound = [
        name
        for name, state in states.items()
        if not (isinstance(state, Mapping) and state.get("scope") == "global")
    ]
    if bound and not is_same:
        raise ProcessCountError(
            f"The checkpoint was written by {count} processes and is restored by "
            f"{jax.process_count()}, but the state of these inputs belongs to single processes: "
            f"{', '.join(bound)}. Restore with {count} processes, or use an input whose "
            'state says "scope": "global", such as a global sample index.'
        )
    return states


def _input_states_name(index: int, count: int) -> str:
    return f"process_{index:05d}_of_{count:05d}.json"


def read_evaluations(directory: epath.Path) -> Evaluations:
    """Return the recorded evaluations of a folder of checkpoints; empty if there are none.

    Raises:
      ValueError: The file is not as this package writes it.
    """
    path = directory / EVALUATIONS_FILE
    if not path.exists():
        return {}
    try:
        document = json.loads(path.read_text())
        if document["version"] > _EVALUATIONS_VERSION:
            raise ValueError(
                f"version {document['version']}, expected up to {_EVALUATIONS_VERSION}"
            )
        return {
            int(step): {name: float(value) for name, value in metrics.items()}
            for step, metrics in document["evaluations"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}); it says which checkpoints are the best. Delete it "
            "to go on without what it says."
        ) from error


def write_evaluations(
    directory: epath.Path, evaluations: Mapping[int, Mapping[str, float]]
) -> None:
    """Replace the recorded evaluations at once; leave out NaN."""
    numbers = {
        str(step): {name: value for name, value in metrics.items() if not math.isnan(value)}
        for step, metrics in sorted(evaluations.items())
    }
    document = {"version": _EVALUATIONS_VERSION, "evaluations": numbers}
    atomic_write(directory / EVALUATIONS_FILE, json.dumps(document, indent=1) + "\n")
