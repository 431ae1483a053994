"""Resolution of an experiment into configs, with all overrides applied, and back.

`resolve` calls `validate()` and the methods that return configs, and then sets the deep overrides.
It instantiates no config, so an unknown path is reported before any device is used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from layerkit.config import copy_config, is_config
from layerkit.config.field_types import FieldTypeError
from layerkit_runner.config.config_tree import PathSetter
from layerkit_runner.config.experiment import BaseExperiment, experiment_fields, reduced_values
from layerkit_runner.config.registry import ExperimentEntry, find_experiment, load_experiment
from layerkit_runner.config.requests import (
    OPTIONAL_ROOTS,
    ROOTS,
    Override,
    ParsedFlags,
    ResolvedExperiment,
    merge_overrides,
    parse_fields,
)
from layerkit_runner.errors import (
    UsageError,
    as_usage_error,
    line_of,
    naming_code,
    naming_line,
    unknown_field,
)
from layerkit_runner.run_options import MODES


def resolve(
    experiment: BaseExperiment, deep_overrides: Iterable[Override] = ()
) -> ResolvedExperiment:
    """Call the experiment's methods and set the deep overrides on what they return."""
    with as_usage_error(owner=type(experiment).__qualname__):
        experiment.validate()
    # All roots are copied in one call, so that shared configs stay shared. The overrides are set on
    # the copy, because the experiment may return the same object again.
    with naming_code():
        roots = copy_config({root: _checked(experiment, root) for root in ROOTS})
    overrides = merge_overrides(deep_overrides)
    return ResolvedExperiment(experiment, **_set(roots, overrides), deep_overrides=overrides)


def add_overrides(
    resolved: ResolvedExperiment, deep_overrides: Iterable[Override]
) -> ResolvedExperiment:
    """Return a copy of a resolved experiment with further deep overrides, which take precedence."""
    roots = copy_config({root: getattr(resolved, root) for root in ROOTS})
    added = merge_overrides(deep_overrides)
    paths = {override.path for override in added}
    kept = [override for override in resolved.deep_overrides if override.path not in paths]
    values = _set(roots, added)
    values["notes"] = resolved.notes + values["notes"]
    return dataclasses.replace(resolved, **values, deep_overrides=merge_overrides([*kept, *added]))


def _set(roots: dict[str, Any], overrides: Iterable[Override]) -> dict[str, Any]:
    """Set overrides on the configs of an experiment, which are changed; return them and notes."""
    setter = PathSetter()
    for override in overrides:
        root = override.parts[0]
        if root not in ROOTS or not override.is_deep:
            expected = f"a path below {', '.join(ROOTS[:-1])} or {ROOTS[-1]}"
            raise UsageError(field=str(override), expected=expected)
        roots[root] = setter.set(roots[root], override)
    for root in ("datasets", "decode_datasets", "observers"):  # --fdl.datasets.1=None leaves it out
        roots[root] = [config for config in roots[root] if config is not None]
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
        values, names = reduced_values(cls), cls.stage_fields
        stages = names and fields.get(names["stages"], getattr(cls, names["stages"], None))
        if stages:  # They set the number of steps.
            values = {name: value for name, value in values.items() if name != names["num_steps"]}
        fields = values | fields
    return resolve(cls(**fields), [o for o in overrides if o.is_deep])


def resolve_flags(flags: ParsedFlags) -> ResolvedExperiment:
    """Resolve the experiment of `--exp` with all overrides of the command line."""
    entry = find_experiment(flags.exp or "")
    check_folder(flags)
    return resolve_entry(entry, flags.overrides, reduced=bool(flags.values.get("reduced")))


def check_folder(flags: ParsedFlags) -> None:
    """Check that a mode that writes has a folder to write to."""
    needs_folder = flags.mode in MODES and flags.mode != "generate" and not flags.only_prints
    if needs_folder and flags.options.job_log_dir is None:
        expected = f"a folder to write to, which --mode={flags.mode} needs"
        raise UsageError("missing flag", field="--job_log_dir", expected=expected)


def _checked(experiment: BaseExperiment, root: str) -> Any:
    """Return the configs of a method; raise `UsageError` if it returns something else."""
    try:
        with naming_line():
            result = getattr(experiment, root)()
    except AttributeError as error:
        if error.obj is not experiment:
            raise
        fields, owner = experiment_fields(type(experiment)), type(experiment).__qualname__
        raise unknown_field(f"{line_of(error)}: {owner}", str(error.name), fields) from error
    except FieldTypeError as error:
        if error.value is None and hasattr(experiment, error.field or ""):
            error.hint = f"{type(experiment).__qualname__}.{error.field}() returns None."
        raise
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
