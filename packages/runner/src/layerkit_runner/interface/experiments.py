"""Experiments of Python code: by name, class or object, with overrides as Python values."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from layerkit.config.nested_map import NestedMap
from layerkit_runner.config.config_tree import config_text, override_text
from layerkit_runner.config.experiment import BaseExperiment, experiment_fields
from layerkit_runner.config.registry import find_experiment, load_experiment
from layerkit_runner.config.requests import Override, ResolvedExperiment, parse_override
from layerkit_runner.errors import UsageError, as_usage_error
from layerkit_runner.run.resolve import add_overrides, resolve

ExperimentLike = str | type[BaseExperiment] | BaseExperiment | ResolvedExperiment
"""An experiment: its name, its class, an instance, or the result of `get_experiment`."""


def get_experiment(
    experiment: ExperimentLike, overrides: Mapping[str, Any] | None = None
) -> ResolvedExperiment:
    """Return an experiment and the configs of its task, data sets and partitioner.

    Args:
      experiment: Name as in `--exp`, class, instance, or a `ResolvedExperiment`, which is copied.
      overrides: Values by field (`NUM_LAYERS`) or path (`task.model.lm_tpl.num_layers`), as the
        flags `--fdl.PATH=VALUE` set them; None for none.

    Raises:
      UserError: The experiment is unknown, or an override does not fit.
    """
    fields = dict(overrides or {})
    deep = [make_override(path, fields.pop(path)) for path in list(fields) if "." in path]
    if isinstance(experiment, ResolvedExperiment):
        if fields:
            problem = "fields of an experiment are set before its configs are made"
            expected = "a path into its configs, such as task.train.num_train_steps"
            value = next(iter(fields))
            raise UsageError(problem, field="overrides", value=value, expected=expected)
        return add_overrides(experiment, deep)
    if isinstance(experiment, BaseExperiment):
        return resolve(type(experiment)(**{**changed_fields(experiment), **fields}), deep)
    return resolve(experiment_class(experiment)(**fields), deep)


def experiment_class(experiment: str | type[BaseExperiment]) -> type[BaseExperiment]:
    """Return the class of an experiment by its name, or a class itself."""
    if isinstance(experiment, type) and issubclass(experiment, BaseExperiment):
        return experiment
    if not isinstance(experiment, str):
        raise UsageError(field="experiment", value=experiment, expected="a name, or an experiment")
    # A class that a notebook or a script defines is in no file that could be searched.
    module, _, name = experiment.rpartition(".")
    cls = getattr(sys.modules.get(module), name, None)
    if isinstance(cls, type) and issubclass(cls, BaseExperiment):
        return cls
    return load_experiment(find_experiment(experiment, flag="experiment"))


def changed_fields(experiment: BaseExperiment) -> dict[str, Any]:
    """Return the fields of an instance that its constructor or an assignment has set."""
    values = {name: getattr(experiment, name) for name in experiment_fields(type(experiment))}
    return {
        name: value
        for name, value in values.items()
        if name in experiment.overrides or value != getattr(type(experiment), name)
    }


def make_override(path: str, value: Any) -> Override:
    """Return the override of a path by a Python value."""
    return parse_override(path, override_text(value))


def input_batches(
    experiment: ExperimentLike,
    dataset: str | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
) -> Iterator[NestedMap]:
    """Yield the batches of an experiment's data set as NumPy arrays `[rows, …]`.

    Args:
      experiment: Experiment; see `get_experiment`.
      dataset: Name of one of its data sets to train on, to evaluate or to decode; None for the
        first, which is usually that of training. Batches of training data never end.
      overrides: Overrides; see `get_experiment`.

    Raises:
      UserError: There is no such data set, or it cannot be read.
    """
    from layerkit_runner.data.host_inputs import dataset_name, make_input
    from layerkit_runner.run.job import build_parts

    resolved = get_experiment(experiment, overrides)
    configs = {dataset_name(c): c for c in [*resolved.datasets, *resolved.decode_datasets]}
    name = next(iter(configs), None) if dataset is None else dataset
    if name is None or name not in configs:
        raise UsageError(
            "unknown data set", owner=resolved.name, field="dataset", value=name, choices=configs
        )
    partitioner, _ = build_parts(resolved)
    partitioner.start()
    with contextlib.closing(make_input(configs[name], partitioner)) as source:
        while True:
            with as_usage_error():
                try:
                    batch = source.get_next()
                except StopIteration:
                    return
            yield batch


def set_num_steps(resolved: ResolvedExperiment, num_steps: int) -> ResolvedExperiment:
    """Return an experiment that trains for `num_steps` steps in total.

    The field of the experiment is set, since schedules may depend on it. If the experiment has no
    such field, or its configs were edited, the field of the task is set.
    """
    from layerkit_runner.run.job_folder import last_step_path

    task_path, path = "task.train.num_train_steps", last_step_path(resolved)
    cls, fields = type(resolved.experiment), changed_fields(resolved.experiment)
    deep = [override for override in resolved.deep_overrides if override.path != task_path]
    if (
        path is None
        or "." in path
        or config_text(resolve(cls(**fields), deep)) != config_text(resolved)
    ):
        return add_overrides(resolved, [make_override(task_path, num_steps)])
    return resolve(cls(**{**fields, path: num_steps}), deep)
