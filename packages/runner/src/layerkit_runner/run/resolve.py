"""Resolution of an experiment into configs, with all overrides applied, and back.

`resolve` calls `validate()` and the methods that return configs, and then sets the deep overrides.
It instantiates no config, so an unknown path is reported before any device is used. `source_field`
finds the experiment's field that sets a path which an error names.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from layerkit.config import copy_config, is_config
from layerkit.errors import UserError, setting_words
from layerkit_runner.config.config_tree import (
    NOT_SET,
    PathSetter,
    field_value,
    plain_value,
    target_name,
    value_at,
    walk,
)
from layerkit_runner.config.experiment import BaseExperiment, experiment_fields, reduced_values
from layerkit_runner.config.flags import check_folder
from layerkit_runner.config.overrides import (
    OPTIONAL_ROOTS,
    ROOTS,
    Override,
    check_consistent,
    parse_fields,
)
from layerkit_runner.config.registry import ExperimentEntry, find_experiment, load_experiment
from layerkit_runner.config.requests import ParsedFlags, ResolvedExperiment
from layerkit_runner.errors import UsageError, as_usage_error


def resolve(
    experiment: BaseExperiment, deep_overrides: Iterable[Override] = ()
) -> ResolvedExperiment:
    """Call the experiment's methods and set the deep overrides on what they return."""
    with as_usage_error(owner=type(experiment).__qualname__):
        experiment.validate()
    # All roots are copied in one call, so that shared configs stay shared. The overrides are set on
    # the copy, because the experiment may return the same object again.
    roots = copy_config({root: _checked(experiment, root) for root in ROOTS})
    overrides = check_consistent(deep_overrides)
    return ResolvedExperiment(experiment, **_set(roots, overrides), deep_overrides=overrides)


def with_overrides(
    resolved: ResolvedExperiment, deep_overrides: Iterable[Override]
) -> ResolvedExperiment:
    """Return a copy of a resolved experiment with further deep overrides, which take precedence."""
    roots = copy_config({root: getattr(resolved, root) for root in ROOTS})
    added = check_consistent(deep_overrides)
    paths = {override.path for override in added}
    kept = [override for override in resolved.deep_overrides if override.path not in paths]
    found = _set(roots, added)
    found["notes"] = resolved.notes + found["notes"]
    return dataclasses.replace(resolved, **found, deep_overrides=check_consistent([*kept, *added]))


def _set(roots: dict[str, Any], overrides: Iterable[Override]) -> dict[str, Any]:
    """Set overrides on the configs of an experiment, which are changed; return them and notes."""
    setter = PathSetter()
    for override in overrides:
        root = override.parts[0]
        if root not in ROOTS or not override.is_deep:
            expected = f"a path below {', '.join(ROOTS[:-1])} or {ROOTS[-1]}"
            raise UsageError(field=str(override), expected=expected)
        roots[root] = setter.set(roots[root], override)
    return roots | {"notes": tuple(setter.notes)}


def resolve_entry(
    entry: ExperimentEntry, overrides: Sequence[Override], *, reduced: bool = False
) -> ResolvedExperiment:
    """Import an experiment and apply `--reduced`, overrides of its fields and deep overrides."""
    cls = load_experiment(entry)
    fields = parse_fields(entry.name, experiment_fields(cls), overrides)
    if reduced:
        if not reduced_values(cls):
            raise UsageError(
                "reduced_fields is not defined",
                owner=entry.name,
                field="--reduced",
                hint="Set fields by --fdl.NAME=VALUE",
            )
        fields = reduced_values(cls) | fields
    return resolve(cls(**fields), [o for o in overrides if o.is_deep])


def resolve_flags(flags: ParsedFlags) -> ResolvedExperiment:
    """Resolve the experiment of `--exp` with all overrides of the command line."""
    entry = find_experiment(flags.exp or "")
    check_folder(flags)
    return resolve_entry(entry, flags.overrides, reduced=bool(flags.values.get("reduced")))


def _checked(experiment: BaseExperiment, root: str) -> Any:
    """Return the configs of a method; raise `UsageError` if it returns something else."""
    result = getattr(experiment, root)()
    if root in OPTIONAL_ROOTS and result is None:
        return None
    is_one = root in ("task", "partitioner", "executor")
    if is_one and is_config(result):
        return result
    if not is_one and isinstance(result, (list, tuple)) and all(map(is_config, result)):
        return list(result)
    raise UsageError(
        owner=type(experiment).__qualname__,
        field=f"{root}()",
        value=result,
        expected="a Config" if is_one else "a list of Configs",
        hint="Return a list: [Config(CLASS, FIELD=VALUE)]"
        if is_config(result)
        else "Return Config(CLASS, FIELD=VALUE) in place of an instance.",
    )


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
    if same_name in fields and plain_value(getattr(experiment, same_name)) == plain_value(value):
        return same_name
    return None


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
    `layerkit_inputs.base.bad_records.UnfitFieldError`.
    """
    try:
        yield
    except UserError as error:
        paths = _paths(resolved, error)
        flags_of_field = {f"--fdl.{override_path(resolved, path)}" for path in paths}
        if len(flags_of_field) == 1:
            error.field = flags_of_field.pop()
            outer, _, owner = (error.owner or "").rpartition(": ")
            error.owner = outer or None if owner.partition(".")[0] in ROOTS else error.owner
        error.settings = _flags(resolved, error.settings) or error.settings
        flags = [_flags(resolved, {name: value}) for name, value in _remedies(error).items()]
        if any(flags):
            suggestion = f"Flags: {', or '.join(setting_words(each) for each in flags if each)}"
            error.hint = f"{error.hint} {suggestion}" if error.hint else suggestion
        raise


def _paths(resolved: ResolvedExperiment, error: UserError) -> list[str]:
    """Return the configuration paths that the field of an error may be, given its owner and value.

    The owner is None if the field is a path itself, or else the path of a config or the name of a
    data set, perhaps after the name of the experiment.
    """
    field = error.field or ""
    if error.owner is None:
        root, dot, _ = field.partition(".")
        return [field] if dot and root in ROOTS else []
    owner = error.owner.rpartition(": ")[2]
    root, *names = owner.split(".")
    configs = [(owner, owner, value_at(getattr(resolved, root), names))] if root in ROOTS else []
    for root in ("datasets", "decode_datasets"):
        for index, config in enumerate(getattr(resolved, root)):
            name = field_value(config, "name")
            name = target_name(config) if name in ("", None, NOT_SET) else name
            configs.append((name, f"{root}.{index}", config))
    return [
        f"{path}.{field}"
        for name, path, config in configs
        if name == owner and plain_value(field_value(config, field)) == plain_value(error.value)
    ]


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
