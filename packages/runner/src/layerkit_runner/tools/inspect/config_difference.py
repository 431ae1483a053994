"""`--diff_config=OTHER`: the fields in which an experiment differs from another configuration.

The experiment of `--exp`, with its overrides, is "here". The other one is "there": an experiment
without overrides, or a job folder, whose `config.json` has the configuration of its run. As with
`diff`, the exit code is 0 without differences and 1 with differences.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from layerkit_runner.config.config_tree import config_json
from layerkit_runner.config.recorded import differing_names, load_recorded_config
from layerkit_runner.config.registry import find_experiment
from layerkit_runner.config.requests import ParsedFlags, ResolvedExperiment
from layerkit_runner.files.text import draw_table
from layerkit_runner.run.resolve import resolve_entry, resolve_flags

# A name, and values by path. Paths of the experiment's fields start with `experiment.`.
Side = tuple[str, Mapping[str, Any]]


def run_diff_config(flags: ParsedFlags) -> int:
    """Print the fields in which two configurations differ; return 1 if there are any."""
    other = flags.values["diff_config"]
    if "://" in other or os.sep in other or os.path.isdir(os.path.expanduser(other)):
        there = recorded_side(other)
        here = resolved_side(resolve_flags(flags))
    else:
        entry = find_experiment(other, flag="--diff_config")
        here = resolved_side(resolve_flags(flags))
        there = resolved_side(resolve_entry(entry, ()))
    differing = differences(here[1], there[1])
    if flags.options.json:
        print(
            json.dumps({"here": here[0], "there": there[0], "differences": differing}), flush=True
        )
    else:
        print(difference_text(here, there, differing), flush=True)
    return 1 if differing else 0


def recorded_side(folder: str) -> Side:
    """Return the configuration recorded in a job folder."""
    recorded = load_recorded_config(folder, flag="--diff_config")
    name = f"{recorded.experiment}, as recorded in {folder}"
    return name, _values(recorded.fields, recorded.config)


def resolved_side(resolved: ResolvedExperiment) -> Side:
    """Return the configuration of an experiment as `config.json` records it."""
    recorded = json.loads(json.dumps(config_json(resolved)))
    return recorded["experiment"], _values(recorded["fields"], recorded["config"])


def _values(fields: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    return {**{f"experiment.{name}": value for name, value in fields.items()}, **config}


def differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the fields that differ, as `{path: {"here": value, "there": value}}`.

    If a side lacks the field, its key is missing. Fields of `here` come first.
    """
    sides = {"here": here, "there": there}
    return {
        path: {name: side[path] for name, side in sides.items() if path in side}
        for path in differing_names(here, there)
    }


def difference_text(here: Side, there: Side, differing: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a line for each difference; a side without the field has a dash."""
    lines = [f"here   {here[0]}", f"there  {there[0]}"]
    if not differing:
        return "\n".join([*lines, "nothing differs"])
    rows = []
    for path, values in differing.items():
        texts = {side: v if isinstance(v, str) else repr(v) for side, v in values.items()}
        rows.append((path, texts.get("here", "–"), texts.get("there", "–")))
    count = len({**here[1], **there[1]})
    drawn = draw_table(rows, head=("field", "here", "there"))
    return "\n".join([*lines, "", *drawn, "", f"{len(differing)} of {count} fields differ"])
