"""`--diff_config=OTHER`: the fields in which an experiment differs from another configuration.

The experiment of `--exp`, with its overrides, is "here". The other one is "there": an experiment
without overrides, or a job folder, whose `config.json` has the configuration of its run. As with
`diff`, the exit code is 0 without differences and 1 with differences.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

from layerkit_runner.config.config_text import config_json
from layerkit_runner.config.flags import ParsedFlags, near_folders
from layerkit_runner.config.recorded import FILE_NAME, read_recorded_config
from layerkit_runner.config.registry import find_experiment
from layerkit_runner.config.resolve import ResolvedExperiment, resolve_entry, resolve_flags
from layerkit_runner.errors import UsageError
from layerkit_runner.files.text import aligned

# Longer values are printed on separate lines.
_COLUMN = 32


@dataclasses.dataclass(frozen=True)
class Side:
    """One of two configurations.

    Attributes:
      name: Name of the experiment, with the folder if it was recorded.
      values: Values by path. Paths of the experiment's fields start with `experiment.`.
    """

    name: str
    values: Mapping[str, Any]


def run_diff_config(flags: ParsedFlags) -> int:
    """Print the fields in which two configurations differ; return 1 if there are any."""
    other = flags.given["diff_config"]
    if is_folder(other):
        there = recorded_side(other)
        here = resolved_side(resolve_flags(flags))
    else:
        entry = find_experiment(other, flag="--diff_config")
        here = resolved_side(resolve_flags(flags))
        there = resolved_side(resolve_entry(entry, ()))
    found = differences(here, there)
    describe = difference_json if flags.options.json else difference_text
    print(describe(here, there, found), flush=True)
    return 1 if found else 0


def is_folder(other: str) -> bool:
    """Return whether `--diff_config` names a folder, not an experiment."""
    return "://" in other or os.sep in other or os.path.isdir(os.path.expanduser(other))


def recorded_side(folder: str) -> Side:
    """Return the configuration recorded in a job folder.

    Raises:
      UsageError: The folder has no configuration, or one that cannot be read.
    """
    recorded = read_recorded_config(folder)
    if recorded is None:
        raise UsageError(
            field="--diff_config",
            value=folder,
            expected=f"a folder with {FILE_NAME}, which a training run writes",
            choices=near_folders(folder),
        )
    name = f"{recorded.experiment}, as recorded in {folder}"
    return _side(name, recorded.fields, recorded.config)


def resolved_side(resolved: ResolvedExperiment) -> Side:
    """Return the configuration of an experiment in the form in which it is recorded."""
    recorded = json.loads(json.dumps(config_json(resolved)))
    return _side(recorded["experiment"], recorded["fields"], recorded["config"])


def _side(name: str, fields: Mapping[str, Any], config: Mapping[str, Any]) -> Side:
    return Side(name, {**{f"experiment.{path}": v for path, v in fields.items()}, **config})


def differences(here: Side, there: Side) -> dict[str, dict[str, Any]]:
    """Return the values of each field that differs, by path and by `here` and `there`.

    A side that lacks the field has no key. Fields of `here` come first.
    """
    found = {}
    for path in {**here.values, **there.values}:
        sides = {"here": here.values, "there": there.values}
        values = {name: side[path] for name, side in sides.items() if path in side}
        # 1, 1.0 and True are equal in Python, but not as the value of a field.
        if len(values) < 2 or json.dumps(values["here"]) != json.dumps(values["there"]):
            found[path] = values
    return found


def difference_text(here: Side, there: Side, found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a line for each difference, or three if the values are long."""
    lines = [f"here   {here.name}", f"there  {there.name}"]
    if not found:
        return "\n".join([*lines, "nothing differs"])
    rows = {
        path: {side: v if isinstance(v, str) else repr(v) for side, v in values.items()}
        for path, values in found.items()
    }
    short = {
        path: values
        for path, values in rows.items()
        if len(values) == 2 and all(len(value) <= _COLUMN for value in values.values())
    }
    pairs = [(path, values["here"], values["there"]) for path, values in short.items()]
    heading, *table = aligned([("field", "here", "there"), *pairs])
    lines += ["", heading] if short else [""]
    for path, values in rows.items():
        if path in short:
            lines.append(table.pop(0))
        elif len(values) == 1:
            [(side, value)] = values.items()
            lines.append(f"{path.ljust(heading.index('  here'))}  only {side}: {value}")
        else:
            lines += [path, f"    here   {values['here']}", f"    there  {values['there']}"]
    count = len({**here.values, **there.values})
    return "\n".join([*lines, "", f"{len(found)} of {count} fields differ"])


def difference_json(here: Side, there: Side, found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return one JSON object: `here` and `there`, and the `differences` by path."""
    return json.dumps({"here": here.name, "there": there.name, "differences": found})
