"""`--diff_config=OTHER`: the fields in which an experiment differs from another configuration.

The experiment of `--exp`, with its overrides, is "here". The other one is "there": an experiment
without overrides, or a job folder, whose `config.json` has the configuration of its run. As with
`diff`, the exit code is 0 without differences and 1 with differences.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from layerkit_runner.config.config_text import config_json
from layerkit_runner.config.flags import ParsedFlags, near_folders
from layerkit_runner.config.recorded import FILE_NAME, read_recorded_config
from layerkit_runner.config.registry import find_experiment
from layerkit_runner.config.resolve import ResolvedExperiment, resolve_entry, resolve_flags
from layerkit_runner.errors import UsageError

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


@dataclasses.dataclass(frozen=True)
class Difference:
    """A field that differs. `values` has keys `here` and `there`, or one if the other lacks it."""

    path: str
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


def differences(here: Side, there: Side) -> list[Difference]:
    """Return the fields that differ, in the order of `here`, then those of `there` only."""
    found = []
    for path in {**here.values, **there.values}:
        sides = {"here": here.values, "there": there.values}
        values = {name: side[path] for name, side in sides.items() if path in side}
        # 1, 1.0 and True are equal in Python, but not as the value of a field.
        if len(values) < 2 or json.dumps(values["here"]) != json.dumps(values["there"]):
            found.append(Difference(path, values))
    return found


def difference_text(here: Side, there: Side, found: Sequence[Difference]) -> str:
    """Return a line for each difference, or three if the values are long."""
    return "\n".join(_lines(here, there, found))


def _lines(here: Side, there: Side, found: Sequence[Difference]) -> Iterator[str]:
    yield f"here   {here.name}"
    yield f"there  {there.name}"
    if not found:
        yield "nothing differs"
        return
    yield ""
    rows = [(each, {side: _shown(value) for side, value in each.values.items()}) for each in found]
    short = [(each.path, values) for each, values in rows if _is_short(values)]
    width = max([len("field"), *(len(path) for path, _ in short)])
    middle = max([len("here"), *(len(values["here"]) for _, values in short)])
    if short:
        yield f"{'field':<{width}}  {'here':<{middle}}  there"
    for each, values in rows:
        if _is_short(values):
            yield f"{each.path:<{width}}  {values['here']:<{middle}}  {values['there']}"
        elif len(values) == 1:
            [(side, value)] = values.items()
            yield f"{each.path:<{width}}  only {side}: {value}"
        else:
            yield each.path
            yield f"    here   {values['here']}"
            yield f"    there  {values['there']}"
    yield ""
    yield f"{len(found)} of {len({**here.values, **there.values})} fields differ"


def _is_short(values: Mapping[str, str]) -> bool:
    return len(values) == 2 and all(len(value) <= _COLUMN for value in values.values())


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def difference_json(here: Side, there: Side, found: Sequence[Difference]) -> str:
    """Return one JSON object: `here` and `there`, and the `differences` by path."""
    return json.dumps(
        {
            "here": here.name,
            "there": there.name,
            "differences": {each.path: dict(each.values) for each in found},
        }
    )
