"""From an experiment to what will run: its methods called, deep overrides set on the results.

The order is fixed. Fields of the experiment were overridden when it was made; now `validate()`
checks them, the methods turn them into configs, and the deep paths are set on those. Nothing is
built and no weight exists yet, so a path that leads nowhere is answered before any device is
touched.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from layerkit.config import Config, assigned_fields, copy_config, field_names, is_config, target_of
from layerkit.near_names import near_names
from layerkit_inputs.extras import MissingExtraError
from layerkit_runner.config import field_types
from layerkit_runner.config.experiment import BaseExperiment, experiment_fields, reduced_values
from layerkit_runner.config.overrides import (
    OPTIONAL_ROOTS,
    ROOTS,
    Override,
    check_consistent,
    parse_fields,
)
from layerkit_runner.config.registry import (
    ExperimentEntry,
    find_experiment,
    load_experiment,
)
from layerkit_runner.errors import UsageError, first_names

if TYPE_CHECKING:
    from layerkit_runner.config.flags import ParsedFlags


@dataclasses.dataclass(frozen=True)
class ResolvedExperiment:
    """An experiment and the configs it stands for, all overrides applied.

    Two places that held the same config object before still do.
    """

    experiment: BaseExperiment
    # A config of a SingleTask.
    task: Config
    # Inputs to train on (`is_training=True`) and to evaluate on.
    datasets: list[Config]
    # Inputs to decode.
    decode_datasets: list[Config]
    partitioner: Config
    # What trains, evaluates and decodes; None for one program per data set.
    train_programs: list[Config] | None = None
    eval_programs: list[Config] | None = None
    decode_programs: list[Config] | None = None
    # In what order they run; None for that of `layerkit_runner.trainer.executor`.
    executor: Config | None = None
    # Observers that run beside the built-in ones.
    observers: list[Config] = dataclasses.field(default_factory=list)
    deep_overrides: tuple[Override, ...] = ()

    @property
    def name(self) -> str:
        """The full dotted name of the experiment's class, which `--exp` takes."""
        cls = type(self.experiment)
        return f"{cls.__module__}.{cls.__qualname__}"


def resolve(
    experiment: BaseExperiment, deep_overrides: Iterable[Override] = ()
) -> ResolvedExperiment:
    """Calls the experiment's methods and sets the deep overrides on what they return.

    Args:
      experiment: With its own fields overridden already.
      deep_overrides: Paths that start with one of `overrides.ROOTS`.

    Raises:
      UsageError: MAX_STEPS is below 1; `validate()` refuses the fields, or misses a file or a
        package; a path does not exist; a value does not fit the field it is for; two overrides
        contradict each other.
      TypeError: a method of the experiment returns something else than configs.
    """
    try:
        _check_length(experiment)
        experiment.validate()
    except (ValueError, OSError, MissingExtraError) as error:
        raise UsageError(f"{type(experiment).__qualname__} cannot run as asked: {error}") from error
    # One copy for all, so that configs which they share stay shared, and so that an experiment
    # which hands out the same config twice is not changed by the overrides.
    roots = copy_config({root: _checked(experiment, root) for root in ROOTS})
    overrides = check_consistent(deep_overrides)
    _apply(roots, overrides)
    return ResolvedExperiment(experiment, **roots, deep_overrides=overrides)


def resolve_entry(
    entry: ExperimentEntry, overrides: Sequence[Override], *, reduced: bool = False
) -> ResolvedExperiment:
    """Import an experiment and apply overrides of its fields and of deeper paths.

    Args:
      entry: The experiment.
      overrides: `--fdl.PATH=TEXT` flags.
      reduced: Whether its `reduced_fields` are set, where no override sets them.

    Raises:
      UsageError: The experiment cannot be imported, or an override does not fit.
    """
    cls = load_experiment(entry)
    fields = parse_fields(entry.name, experiment_fields(cls), overrides)
    if reduced:
        if not reduced_values(cls):
            raise UsageError(
                f"--reduced: {entry.name} does not say how it is made smaller (reduced_fields); set"
                " its fields by --fdl.NAME=VALUE."
            )
        fields = reduced_values(cls) | fields
    return resolve(cls(**fields), [o for o in overrides if o.is_deep])


def resolve_flags(flags: ParsedFlags) -> ResolvedExperiment:
    """Return the experiment that a command line names, with all its overrides applied.

    Raises:
      UsageError: There is no such experiment, or an override does not fit.
    """
    entry = find_experiment(flags.exp or "")
    return resolve_entry(entry, flags.overrides, reduced=bool(flags.given.get("reduced")))


def _check_length(experiment: BaseExperiment) -> None:
    """Raise an error for a run without a step.

    Schedules are made from MAX_STEPS, and would name lengths that the user did not set.
    """
    steps = getattr(experiment, "MAX_STEPS", None)
    if isinstance(steps, int) and steps < 1:
        raise ValueError(f"MAX_STEPS={steps}: expected a positive integer")


def _checked(experiment: BaseExperiment, root: str) -> Any:
    result = getattr(experiment, root)()
    label = f"{type(experiment).__qualname__}.{root}()"
    if root in OPTIONAL_ROOTS and result is None:
        return None
    if root in ("task", "partitioner", "executor"):
        if not is_config(result):
            raise TypeError(f"{label} must return a Config, got {result!r}")
        return result
    if not isinstance(result, (list, tuple)) or not all(is_config(item) for item in result):
        raise TypeError(f"{label} must return a list of Configs, got {result!r}")
    return list(result)


def _apply(roots: dict[str, Any], overrides: Iterable[Override]) -> None:
    # Which override has set what below which config, to catch two paths to one shared config.
    owners: dict[tuple[int, str], Override] = {}
    for override in overrides:
        root, *rest = override.parts
        if root not in ROOTS or not rest:
            raise UsageError(
                f"{override}: a path starts with one of {', '.join(ROOTS)} and goes on from there"
                f"{near_names(root, ROOTS)}"
            )
        roots[root] = _Setter(override, owners).set(roots[root], rest, root)


class _Setter:
    """Sets one override; a walk down the path that rebuilds containers on the way back."""

    def __init__(self, override: Override, owners: dict[tuple[int, str], Override]):
        self._override = override
        self._owners = owners

    def set(self, node: Any, rest: list[str], here: str, *, annotation: str | None = None) -> Any:
        """`node`, which is at path `here`, with the value set at `rest` below it."""
        if not rest:
            return self._parse(node, here, annotation)
        name, *deeper = rest
        if is_config(node):
            child, field_annotation = self._field(node, name, here)
            path = f"{here}.{name}"
            if is_config(child) and deeper:
                self.set(child, deeper, path)
                return node
            self._claim(node, rest)
            value = self.set(child, deeper, path, annotation=field_annotation)
            setattr(node, name, self._fitting(value, path, field_annotation))
            return node
        if isinstance(node, dict):
            return self._set_in_dict(node, name, deeper, here)
        if isinstance(node, (list, tuple)):
            index = self._index(node, name, deeper, here)
            items = list(node)
            items[index] = self.set(items[index], deeper, f"{here}.{index}")
            return type(node)(*items) if hasattr(node, "_fields") else type(node)(items)
        raise self._error(f"{here} is {_shown(node)}, which has no field {name!r} nor any other.")

    def _parse(self, old: Any, here: str, annotation: str | None) -> Any:
        try:
            value = field_types.parse_value(self._override.text, annotation)
        except field_types.MismatchError as error:
            raise self._error(str(error)) from None
        if is_config(old) and value is not None:
            example = next(iter(_fields(old)), "NAME")
            raise self._error(
                f"{here} is {_shown(old)}; set its fields, such as {here}.{example}, or None."
            )
        return value

    def _fitting(self, value: Any, path: str, annotation: str | None) -> Any:
        try:
            return field_types.convert(value, annotation)
        except field_types.MismatchError as error:
            raise self._error(f"{path} would not fit any more: {error}") from None

    def _field(self, config: Any, name: str, here: str) -> tuple[Any, str | None]:
        annotations = _fields(config)
        if name not in annotations and name not in assigned_fields(config):
            raise self._error(
                f"{here} is {_shown(config)}, which has no field {name!r}"
                f"{near_names(name, annotations)} Its fields: {first_names(annotations)}."
            )
        return field_value(config, name), annotations.get(name)

    def _set_in_dict(self, node: dict[Any, Any], name: str, deeper: list[str], here: str) -> Any:
        keys = {str(key): key for key in node}
        if name not in keys:
            raise self._error(
                f"{here} has no key {name!r}{near_names(name, keys)} Its keys: {first_names(keys)}."
            )
        value = self.set(node[keys[name]], deeper, f"{here}.{name}")
        return type(node)({**node, keys[name]: value})

    def _index(self, items: Sequence[Any], name: str, deeper: list[str], here: str) -> int:
        if not name.isdecimal():
            path = ".".join([here, "0", name, *deeper])
            raise self._error(f"{here} is a list; say which element, such as {path}.")
        if int(name) >= len(items):
            count = f"{len(items)} elements, 0 to {len(items) - 1}" if items else "no elements"
            raise self._error(f"{here} has no element {name}; it has {count}.")
        return int(name)

    def _claim(self, config: Any, rest: list[str]) -> None:
        earlier = self._owners.setdefault((id(config), ".".join(rest)), self._override)
        if earlier is not self._override and earlier.text != self._override.text:
            raise self._error(
                f"it contradicts {earlier}: both paths lead to the same {target_name(config)}."
            )

    def _error(self, text: str) -> UsageError:
        return UsageError(f"--fdl.{self._override.path}: {text}")


NOT_SET = "(not set)"


def field_value(config: Any, name: str) -> Any:
    """The value that `config` has for a field, be it the default; `NOT_SET` where there is none."""
    try:
        value = getattr(config, name)
    except (AttributeError, TypeError, ValueError):
        return NOT_SET
    return NOT_SET if value is inspect.Parameter.empty else value


def target_name(config: Any) -> str:
    """The name of the class or function that `config` describes a call of."""
    target = target_of(config)
    return getattr(target, "__qualname__", repr(target))


def _fields(config: Any) -> dict[str, str | None]:
    """The fields of a config, each with its annotation's text where that is known."""
    target = target_of(config)
    if dataclasses.is_dataclass(target):
        annotations: dict[str, Any] = {f.name: f.type for f in dataclasses.fields(target)}
    else:
        parameters = inspect.signature(target).parameters.values()
        annotations = {p.name: p.annotation for p in parameters}
    texts = {name: annotations.get(name) for name in field_names(config)}
    return {name: field_types.annotation_text(text) for name, text in texts.items()}


def _shown(value: Any) -> str:
    if value is NOT_SET:
        return "not set"
    if is_config(value):
        return f"a config of {target_name(value)}"
    return repr(value) if isinstance(value, (int, float, str, type(None))) else type(value).__name__
