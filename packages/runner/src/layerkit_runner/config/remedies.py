"""Flags for what an input says would let its data be read."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from layerkit_runner.config.config_text import config_json
from layerkit_runner.config.resolve import ResolvedExperiment
from layerkit_runner.errors import UsageError

_ROOTS = ("datasets.", "decode_datasets.")


@contextlib.contextmanager
def flags_named(resolved: ResolvedExperiment) -> Iterator[None]:
    """Add flags to a UsageError whose cause names fields of an input.

    Inputs know their fields, and not where an experiment has them. The cause says which fields help
    by its `remedies`, name to value; see `layerkit_inputs.bad_records.UnfitFieldError`.
    """
    try:
        yield
    except UsageError as error:
        flags = [_flags(resolved, name, value) for name, value in _remedies(error).items()]
        if any(flags):
            error.args = (f"{error} Flags: {', or '.join(filter(None, flags))}", *error.args[1:])
        raise


def _remedies(error: BaseException) -> Mapping[str, Any]:
    cause: BaseException | None = error
    while cause is not None:
        if remedies := getattr(cause, "remedies", None):
            return remedies
        cause = cause.__cause__
    return {}


def _flags(resolved: ResolvedExperiment, name: str, value: Any) -> str:
    """Return the flags that set a field of every input that has it, or that of the experiment."""
    configured = config_json(resolved)
    text = shlex.quote(json.dumps(value) if isinstance(value, list) else str(value))
    if name.upper() in configured["fields"]:
        return f"--fdl.{name.upper()}={text}"
    inputs = {
        path: current
        for path, current in configured["config"].items()
        if path.startswith(_ROOTS) and path.rpartition(".")[2] == name and current != value
    }
    source = _source_field(configured["fields"], list(inputs.values()))
    return " ".join(f"--fdl.{path}={text}" for path in ([source] if source else inputs))


def _source_field(fields: Mapping[str, Any], values: Sequence[Any]) -> str | None:
    """Return the experiment's field that gives inputs their value; None where it is not clear.

    Numbers are left out: two fields can hold the same one by chance.
    """
    if not values or any(value != values[0] for value in values):
        return None
    same = [name for name, value in fields.items() if value == values[0]]
    return same[0] if len(same) == 1 and isinstance(values[0], (str, list)) else None
