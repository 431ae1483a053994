"""Flags for what an input says would let its data be read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from layerkit_runner.configuration.config_text import config_json
from layerkit_runner.configuration.resolve import ResolvedExperiment
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
    if name.upper() in configured["fields"]:
        return f"--fdl.{name.upper()}={value}"
    paths = [
        path
        for path, current in configured["config"].items()
        if path.startswith(_ROOTS) and path.rpartition(".")[2] == name and current != value
    ]
    return " ".join(f"--fdl.{path}={value}" for path in paths)
