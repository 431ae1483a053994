"""From an experiment to what will run: its methods called, deep overrides set on the results.

The order is fixed. Fields of the experiment were overridden when it was made; now `validate()`
checks them, the methods turn them into configs, and the deep paths are set on those. Nothing is
built and no weight exists yet, so a path that leads nowhere is answered before any device is
touched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from layerkit.config import Config, copy_config, is_config
from layerkit.near_names import near_names
from layerkit_inputs.extras import MissingExtraError
from layerkit_runner.config.config_tree import PathSetter
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
from layerkit_runner.errors import UsageError

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
    """Call the experiment's methods and set the deep overrides on what they return.

    Args:
      experiment: Experiment with its own fields overridden.
      deep_overrides: Paths that start with one of `overrides.ROOTS`.

    Raises:
      UsageError: `validate()` refuses the fields, or misses a file or a
        package; a path does not exist; a value does not fit the field it is for; two overrides
        contradict each other.
      TypeError: a method of the experiment returns something else than configs.
    """
    try:
        experiment.validate()
    except (ValueError, OSError, MissingExtraError) as error:
        raise UsageError(f"{type(experiment).__qualname__} cannot run as asked: {error}") from error
    # One copy for all, so that configs which they share stay shared, and so that an experiment
    # which hands out the same config twice is not changed by the overrides.
    roots = copy_config({root: _checked(experiment, root) for root in ROOTS})
    overrides = check_consistent(deep_overrides)
    setter = PathSetter()
    for override in overrides:
        root = override.parts[0]
        if root not in ROOTS or not override.is_deep:
            raise UsageError(
                f"{override}: a path starts with one of {', '.join(ROOTS)} and has names below it"
                f"{near_names(root, ROOTS)}"
            )
        roots[root] = setter.set(roots[root], override)
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
