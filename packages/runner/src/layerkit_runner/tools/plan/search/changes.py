"""Changes of an experiment, as flags that a user can copy and as the experiment that they make.

The usual fields of experiments (`CHECKPOINT_POLICY`, `ICI_MESH_SHAPE`, …) are taken where the
experiment has them and they do what their names say, and deep paths elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from layerkit.config import field_names, is_config
from layerkit_runner.config.experiment import experiment_fields
from layerkit_runner.config.overrides import Override
from layerkit_runner.config.resolve import ResolvedExperiment, resolve
from layerkit_runner.errors import UsageError

ROWS = "PERCORE_BATCH_SIZE"
REMAT = "CHECKPOINT_POLICY"
ICI_MESH = "ICI_MESH_SHAPE"
DCN_MESH = "DCN_MESH_SHAPE"
SOFTMAX_CHUNK = "SOFTMAX_CHUNK_SIZE"
ACCUMULATION = "task.train.gradient_accumulation_steps"
FIRST_MOMENT = "task.train.learner.optimizer.mu_dtype"

# What the usual fields set; each path that leads to a field.
_PATHS = {
    ICI_MESH: ("partitioner.ici_mesh_shape",),
    DCN_MESH: ("partitioner.dcn_mesh_shape",),
    SOFTMAX_CHUNK: ("task.model.lm_tpl.softmax_tpl.chunk_size",),
    ACCUMULATION: (ACCUMULATION,),
    FIRST_MOMENT: (FIRST_MOMENT,),
}

Changes = Mapping[str, Any]
"""Values by the names above."""


def changed(resolved: ResolvedExperiment, changes: Changes) -> ResolvedExperiment:
    """The experiment with these changes; all other overrides stay.

    Raises:
      UsageError: the experiment has no such field, or refuses the value.
    """
    declared = experiment_fields(type(resolved.experiment))
    overridden = {override.path for override in resolved.deep_overrides}
    by_field = {
        name: value
        for name, value in changes.items()
        if name in declared and overridden.isdisjoint(_paths(resolved, name))
    }
    result = _with(resolved, changes, by_field)
    # A field of that name may do something else in an experiment of another making.
    working = {name: value for name, value in by_field.items() if _took(result, name, value)}
    return result if working == by_field else _with(resolved, changes, working)


def _with(resolved: ResolvedExperiment, changes: Changes, by_field: Changes) -> ResolvedExperiment:
    """The experiment with changes, some of them by its own fields and the others by paths."""
    experiment = resolved.experiment
    if by_field:
        experiment = type(experiment)(**{**experiment.overrides, **by_field})
    by_path: dict[str, Any] = {}
    for name in changes:
        if name in by_field:
            continue
        paths = _paths(resolved, name)
        if not paths:
            raise UsageError(f"{resolved.name} has no {name} that could be changed")
        by_path |= dict.fromkeys(paths, changes[name])
    kept = [override for override in resolved.deep_overrides if override.path not in by_path]
    more = [Override(path, literal(value)) for path, value in by_path.items()]
    return resolve(experiment, [*kept, *more])


def _took(resolved: ResolvedExperiment, name: str, value: Any) -> bool:
    """Whether what a change is to set has that value now."""
    if name == REMAT:  # names of policies have synonyms, which need not be equal
        return True
    wanted = list(value) if isinstance(value, tuple) else value
    for path in _paths(resolved, name):
        found = _value_at(resolved, path)
        if (list(found) if isinstance(found, tuple) else found) != wanted:
            return False
    return True


def can_change(resolved: ResolvedExperiment, name: str) -> bool:
    """Whether there is something in the experiment that this change sets."""
    return name in experiment_fields(type(resolved.experiment)) or bool(_paths(resolved, name))


def current(resolved: ResolvedExperiment, name: str) -> Any:
    """The value that the experiment has now, or None."""
    paths = _paths(resolved, name)
    return _value_at(resolved, paths[0]) if paths else None


def overriding_flags(resolved: ResolvedExperiment) -> list[str]:
    """What was overridden in an experiment, as `--fdl.NAME=VALUE` without blanks."""
    fields = [(name, literal(value)) for name, value in resolved.experiment.overrides.items()]
    deep = [(override.path, override.text) for override in resolved.deep_overrides]
    return [_flag(name, text) for name, text in (*fields, *deep)]


def new_flags(before: ResolvedExperiment, after: ResolvedExperiment) -> list[str]:
    """The flags of `after` that `before` does not have."""
    had = overriding_flags(before)
    return [flag for flag in overriding_flags(after) if flag not in had]


def literal(value: Any) -> str:
    """A value as the command line takes it, without blanks.

    >>> literal([1, 4, 1]), literal("full"), literal(0.5), literal(None)
    ('[1,4,1]', 'full', '0.5', 'None')
    """
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(literal, value))}]"
    return repr(value)


def _flag(name: str, text: str) -> str:
    flag = f"--fdl.{name}={text}"
    # A shell reads brackets and blanks of its own.
    return flag if all(c.isalnum() or c in "-_.=/:,+[]" for c in flag) else f"'{flag}'"


def _paths(resolved: ResolvedExperiment, name: str) -> list[str]:
    """The deep paths of what a change sets; nothing where there is no such field."""
    if name == ROWS:
        rows = [
            f"datasets.{index}.percore_batch_size"
            for index, dataset in enumerate(resolved.datasets)
            if dataset.is_training and dataset.percore_batch_size is not None
        ]
        # Several data sets that take turns have numbers of rows of their own.
        return rows if len(rows) == 1 else []
    if name == REMAT:
        return list(_paths_of_policies(resolved.task, "task"))
    return [path for path in _PATHS.get(name, ()) if _has(resolved, path)]


# In a pipeline what stages keep goes before what layers keep within them.
_POLICY_FIELDS = ("stage_remat", "remat")


def _paths_of_policies(value: Any, here: str) -> Iterator[str]:
    """Paths of the rematerialisation policies of all stacks below; templates are configs."""
    if is_config(value):
        names = field_names(value)
        policy = next((name for name in _POLICY_FIELDS if name in names), None)
        if policy is not None:
            yield f"{here}.{policy}"
        inner: dict[Any, Any] = {name: getattr(value, name, None) for name in names}
    elif isinstance(value, dict):
        inner = value
    elif isinstance(value, (list, tuple)):
        inner = dict(enumerate(value))
    else:
        return
    for name, item in inner.items():
        yield from _paths_of_policies(item, f"{here}.{name}")


def _has(resolved: ResolvedExperiment, path: str) -> bool:
    parent, _, name = path.rpartition(".")
    try:
        return name in field_names(_value_at(resolved, parent))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return False


def _value_at(resolved: ResolvedExperiment, path: str) -> Any:
    root, *rest = path.split(".")
    value = getattr(resolved, root)
    for name in rest:
        if isinstance(value, (list, tuple)):
            value = value[int(name)]
        elif isinstance(value, dict):
            value = value[name]
        else:
            value = getattr(value, name)
    return value
