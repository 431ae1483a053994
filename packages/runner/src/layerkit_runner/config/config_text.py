"""A resolved experiment as text and as JSON, which `--mode=inspect` prints and a run records.

The text has a line `path = value` for each field at any depth, with the path of `--fdl.PATH=VALUE`.
The value of a config is the name of its class, or `the same as PATH` if it appears again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from layerkit.config import field_types, is_config
from layerkit_runner.config.config_tree import (
    NOT_SET,
    Name,
    plain_value,
    target_name,
    value_text,
    walk,
)
from layerkit_runner.config.experiment import experiment_fields
from layerkit_runner.config.overrides import ROOTS
from layerkit_runner.config.requests import ResolvedExperiment, to_argv
from layerkit_runner.run_options import RunOptions


def config_text(resolved: ResolvedExperiment) -> str:
    """Return lines `path = value`: the experiment, its fields, then the resolved configs."""
    lines = [f"experiment = {resolved.name}"]
    for name, value in _experiment_values(resolved):
        lines.append(f"experiment.{name} = {value_text(value)}")
    lines.extend(f"{path} = {value_text(value)}" for path, value in _walk(resolved))
    return "\n".join(lines) + "\n"


def config_json(
    resolved: ResolvedExperiment, options: RunOptions | None = None, *, mode: str = "train"
) -> dict[str, Any]:
    """Return a resolved experiment as JSON, with the arguments that resolve it again.

    `options` is None if there is no run. Values that JSON cannot represent are texts.
    """
    # `--json` selects the format of this output and is not part of the run.
    run = [] if options is None else to_argv(dataclasses.replace(options, json=False), mode=mode)
    named = [] if options is None or mode == "train" else [f"--mode={mode}"]
    fields = {name: override_text(value) for name, value in resolved.experiment.overrides.items()}
    overrides = fields | {o.path: o.text for o in resolved.deep_overrides}
    return {
        "experiment": resolved.name,
        "overrides": overrides,
        "arguments": [
            f"--exp={resolved.name}",
            *(f"--fdl.{path}={text}" for path, text in overrides.items()),
            *named,
            *run,
        ],
        "fields": {name: plain_value(value) for name, value in _experiment_values(resolved)},
        "config": {path: plain_value(value) for path, value in _walk(resolved)},
    }


def printed_config(
    resolved: ResolvedExperiment, options: RunOptions | None, *, mode: str, as_json: bool
) -> str:
    """Return the text that `--print_config` prints; see `config_text` and `config_json`."""
    if as_json:
        return json.dumps(config_json(resolved, options, mode=mode))
    return config_text(resolved).rstrip("\n")


def _experiment_values(resolved: ResolvedExperiment) -> Iterator[tuple[str, Any]]:
    for name in experiment_fields(type(resolved.experiment)):
        yield name, getattr(resolved.experiment, name)


def _walk(resolved: ResolvedExperiment) -> Iterator[tuple[str, Any]]:
    seen: dict[int, str] = {}
    for root in ROOTS:
        value = getattr(resolved, root)
        if value is None or (root == "observers" and not value):
            continue
        for path, node in walk(value, root, seen):
            if is_config(node):
                first = seen.get(id(node), path)
                yield path, Name(target_name(node) if first == path else f"the same as {first}")
            else:
                yield path, Name(node) if node is NOT_SET else node


def override_text(value: Any) -> str:
    """Return the text of VALUE in `--fdl.PATH=VALUE` that sets a value, unquoted where possible."""
    # As bare words, `true` and `false` are rejected.
    if isinstance(value, str) and value not in ("true", "false"):
        with contextlib.suppress(field_types.FieldTypeError):
            if field_types.parse_literal(value) == value:
                return value
    return value_text(value)
