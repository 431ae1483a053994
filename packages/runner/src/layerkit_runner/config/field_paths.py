"""Lookup of the experiment's field that sets a configuration path which an error names."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

from layerkit.errors import UserError, setting_words
from layerkit_runner.config.config_text import plain_value
from layerkit_runner.config.config_tree import NOT_SET, value_at, walk
from layerkit_runner.config.experiment import experiment_fields
from layerkit_runner.config.overrides import ROOTS
from layerkit_runner.config.resolve import ResolvedExperiment


def source_field(resolved: ResolvedExperiment, path: str) -> str | None:
    """Return the field of the experiment that gives a configuration path its value.

    Return None if an override sets the path, or no single field does.
    """
    if any(f"{path}.".startswith(f"{each.path}.") for each in resolved.deep_overrides):
        return None
    experiment, (root, *names) = resolved.experiment, path.split(".")
    fields = experiment_fields(type(experiment))
    value = value_at(getattr(resolved, root, None), names)
    if value is NOT_SET:
        return None
    traced = copy.copy(experiment)
    for name in fields:
        object.__setattr__(traced, name, _marked(getattr(experiment, name), name))
    # The fields of the copy carry their names, and the name found at the path is the answer. A
    # method may raise an error for such a value, or ignore the fields.
    with contextlib.suppress(Exception):
        mark = _mark(value_at(getattr(traced, root)(), names))
        if mark is not None and plain_value(value) == plain_value(getattr(experiment, mark)):
            return mark
    # A conversion loses the name, and None and bools cannot carry one. Then the answer is the
    # field that has the same name as the path and the same value.
    same_name = names[-1].upper() if names else ""
    is_same = same_name in fields and plain_value(getattr(experiment, same_name)) == plain_value(
        value
    )
    return same_name if is_same else None


def override_path(resolved: ResolvedExperiment, path: str) -> str:
    """Return the name after `--fdl.` that sets a path: the experiment's field, or the path."""
    return source_field(resolved, path) or path


def _marked(value: Any, name: str) -> Any:
    """Return an equal value that carries the name of a field, or the value itself if it cannot."""
    kind = type(value)
    if kind in (list, tuple):
        value = kind(_marked(item, name) for item in value)
    if kind not in (int, float, str, list, tuple, dict):
        return value
    return type(kind.__name__, (kind,), {"experiment_field": name})(value)


def _mark(value: Any) -> str | None:
    """Return the field name that a value carries, or that all of its elements carry."""
    mark: str | None = getattr(value, "experiment_field", None)
    if mark is None and isinstance(value, (list, tuple)) and value:
        marks = {_mark(item) for item in value}
        return marks.pop() if len(marks) == 1 else None
    return mark


@contextlib.contextmanager
def naming_flags(resolved: ResolvedExperiment) -> Iterator[None]:
    """Replace configuration paths in errors by the flags that set them.

    The `field` and the `settings` of an error are replaced. If the error or its cause has
    `remedies`, flags for them are added to the hint; any one of them helps. See
    `layerkit_inputs.bad_records.UnfitFieldError`.
    """
    try:
        yield
    except UserError as error:
        root, dot, _ = (error.field or "").partition(".")
        if error.field and dot and root in ROOTS and error.owner is None:
            error.field = f"--fdl.{override_path(resolved, error.field)}"
        error.settings = _flags(resolved, error.settings) or error.settings
        flags = [_flags(resolved, {name: value}) for name, value in _remedies(error).items()]
        if any(flags):
            suggestion = f"Flags: {', or '.join(setting_words(each) for each in flags if each)}"
            error.hint = f"{error.hint} {suggestion}" if error.hint else suggestion
        raise


def _remedies(error: BaseException) -> Mapping[str, Any]:
    cause: BaseException | None = error
    while cause is not None:
        if remedies := getattr(cause, "remedies", None):
            return remedies
        cause = cause.__cause__
    return {}


def _flags(resolved: ResolvedExperiment, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by flag for `settings`, values by path or by name."""
    values = {path: value for path, value in settings.items() if "." in path}
    for root in ("task", "datasets", "decode_datasets"):
        for path, current in walk(getattr(resolved, root), root):
            name = path.rpartition(".")[2]
            if name in settings and current != settings[name]:
                values[path] = settings[name]
    return {f"--fdl.{override_path(resolved, path)}": value for path, value in values.items()}
