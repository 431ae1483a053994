"""The file that `--study=FILE` names: what to search, by which metric, and how.

TOML or JSON, by its ending:

    metric = "heldout/loss"        # DATASET/METRIC, as in metrics.jsonl
    direction = "minimize"         # or "maximize"
    num_trials = 20
    sampler = "tpe"                # or {name = "tpe", seed = 1, …}; random, grid
    pruner = "median"              # or {name = "median", n_warmup_steps = 500, …}

    [space]
    LEARNING_RATE = {low = 1e-4, high = 1e-2, log = true}
    "task.train.learner.ema_decay" = {choices = [0.99, 0.999]}

Only metric and space are required. The options of samplers and pruners are Optuna's own; its steps
and resources are training steps here. This module imports neither Optuna nor JAX: a mistake is
answered at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from layerkit.near_names import near_names
from layerkit_runner.config.overrides import Override, parse_fields, parse_override
from layerkit_runner.errors import UsageError, first_names
from layerkit_runner.files.bounded_documents import DocumentError, parse_json, parse_toml, read_text
from layerkit_runner.tools.sweep.search_space import Parameter, override_text, parse_space

_KEYS = ("metric", "space", "direction", "num_trials", "sampler", "pruner")
Direction = Literal["minimize", "maximize"]
_DIRECTIONS: tuple[Direction, ...] = ("minimize", "maximize")
# A study is a page at most.
_MAX_BYTES = 100_000
# Where nobody says how many: enough for the sampler to learn from.
_NUM_TRIALS = 20

# The options of each, with their types. Steps and resources are counted in training steps.
SAMPLERS: dict[str, dict[str, type]] = {
    "tpe": {"seed": int, "n_startup_trials": int, "multivariate": bool},
    "random": {"seed": int},
    "grid": {"seed": int},
}
PRUNERS: dict[str, dict[str, type]] = {
    "none": {},
    "median": {"n_startup_trials": int, "n_warmup_steps": int, "n_min_trials": int},
    "percentile": {
        "percentile": float,
        "n_startup_trials": int,
        "n_warmup_steps": int,
        "n_min_trials": int,
    },
    "successive_halving": {
        "min_resource": int,
        "reduction_factor": int,
        "min_early_stopping_rate": int,
    },
    "hyperband": {"min_resource": int, "max_resource": int, "reduction_factor": int},
}
# Optuna's default, 1, would count single steps of training.
_NEEDED = {"percentile": "percentile", "hyperband": "min_resource"}
# Optuna's smallest values, where they are not 0.
_SMALLEST = {"min_resource": 1, "max_resource": 1, "reduction_factor": 2, "n_min_trials": 1}


@dataclasses.dataclass(frozen=True)
class Method:
    """A sampler or pruner: its name here, and options of Optuna's."""

    name: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class StudyFile:
    """What to search.

    Attributes:
      path: Of the file, as it was given.
      space: By the path of each field, as `--fdl` takes it.
      metric: `DATASET/METRIC` of an evaluation.
      direction: `minimize` or `maximize`.
      num_trials: How many in all, however often the sweep is stopped.
      sampler: What draws values.
      pruner: What stops a trial early.
    """

    path: str
    space: Mapping[str, Parameter]
    metric: str
    direction: Direction
    num_trials: int
    sampler: Method
    pruner: Method


def read_study_file(path: str, *, num_trials: int | None = None) -> StudyFile:
    """Reads and checks a study file.

    Args:
      path: Ends in `.toml` or `.json`.
      num_trials: In place of what the file says.

    Raises:
      UsageError: there is no such file, or lists what is wrong in it.
    """
    try:
        return _parse(path, _document(path), num_trials)
    except UsageError as error:
        raise UsageError(f"--study={path}: {error}") from error


def check_fields(
    study: StudyFile,
    experiment: str,
    fixed: Iterable[Override],
    annotations: Mapping[str, str | None] | None,
) -> None:
    """Whether the search space is one of this experiment; deep paths only as far as their roots.

    Args:
      study: What to search.
      experiment: Its name, for messages.
      fixed: Overrides of the command line, for all trials.
      annotations: The experiment's fields, each with the text of its annotation; None where only an
        import would tell.

    Raises:
      UsageError: lists the fields that do not exist, that hold no such value, or that the command
        line sets as well.
    """
    problems: list[str] = []
    given = {override.path: override for override in fixed}
    for path, parameter in study.space.items():
        for other, setting in given.items():
            if _is_part(path, other) or _is_part(other, path):
                problems.append(f"space.{path} is searched, and {setting} sets it; keep one.")
        for other in study.space:
            if other != path and _is_part(path, other):
                problems.append(f"space.{path} is a part of space.{other}; keep one.")
        for value in parameter.samples():
            try:
                override = parse_override(path, override_text(value))
                if annotations is not None or override.is_deep:
                    parse_fields(experiment, annotations or {}, [override])
            except UsageError as error:
                problems.append(f"space.{path}: {error}")
    if problems:
        # A name that is wrong is wrong with each value.
        raise UsageError(f"--study={study.path}: " + "\n".join(dict.fromkeys(problems)))


def _is_part(path: str, of: str) -> bool:
    return f"{path}.".startswith(f"{of}.")


def _document(path: str) -> dict[str, Any]:
    file = Path(path).expanduser()
    if file.suffix not in (".toml", ".json"):
        raise UsageError("a study file ends in .toml or .json.")
    try:
        text = read_text(file, max_bytes=_MAX_BYTES)
    except FileNotFoundError:
        beside = [other.name for other in file.parent.iterdir()] if file.parent.is_dir() else []
        raise UsageError(f"there is no such file{near_names(file.name, beside)}") from None
    except (OSError, DocumentError) as error:
        raise UsageError(f"cannot be read: {error}") from error
    try:
        document = parse_toml(text) if file.suffix == ".toml" else parse_json(text)
    except DocumentError as error:
        raise UsageError(f"is not {file.suffix[1:].upper()}: {error}") from error
    if not isinstance(document, dict):
        raise UsageError(f"expected an object with {', '.join(_KEYS)}.")
    return document


def _parse(path: str, document: dict[str, Any], num_trials: int | None) -> StudyFile:
    for key in document:
        if key not in _KEYS:
            raise UsageError(
                f"there is no {key!r}{near_names(key, _KEYS)} Keys: {', '.join(_KEYS)}"
            )
    for key in ("metric", "space"):
        if key not in document:
            raise UsageError(f"{key} is missing.")
    metric, space = document["metric"], document["space"]
    dataset, _, name = metric.partition("/") if isinstance(metric, str) else ("", "", "")
    if not dataset or not name:
        raise UsageError(f"metric={metric!r} is written DATASET/METRIC, such as heldout/loss.")
    direction = document.get("direction", "minimize")
    if direction not in _DIRECTIONS:
        near = near_names(str(direction), _DIRECTIONS)
        raise UsageError(f"direction={direction!r} is minimize or maximize{near}")
    if not isinstance(space, dict):
        raise UsageError(f"space is a table of fields, not {space!r}.")
    parameters = parse_space(space)
    sampler = _method("sampler", document.get("sampler", "tpe"), SAMPLERS)
    pruner = _method("pruner", document.get("pruner", "none"), PRUNERS)
    if num_trials is None:
        num_trials = document.get("num_trials")
        if num_trials is not None and (type(num_trials) is not int or num_trials < 1):
            raise UsageError(f"num_trials={num_trials!r} is a whole number, at least 1.")
    if sampler.name == "grid":
        size = _grid_size(parameters)
        num_trials = size if num_trials is None else min(num_trials, size)
    return StudyFile(
        path, parameters, metric, direction, num_trials or _NUM_TRIALS, sampler, pruner
    )


def _grid_size(space: Mapping[str, Parameter]) -> int:
    counts = []
    for path, parameter in space.items():
        values = parameter.all_values()
        if values is None:
            raise UsageError(f"space.{path}: a grid needs choices, or a range with a step.")
        counts.append(len(values))
    return math.prod(counts)


def _method(kind: str, given: Any, valid: Mapping[str, Mapping[str, type]]) -> Method:
    if isinstance(given, str):
        given = {"name": given}
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        raise UsageError(f"{kind}={given!r}; expected a name, or {{name = …, OPTION = …}}.")
    options = dict(given)
    name = options.pop("name")
    if name not in valid:
        near = near_names(name, valid)
        raise UsageError(f"{kind}={name!r} is not known{near} There are {', '.join(valid)}.")
    for option, value in options.items():
        if option not in valid[name]:
            known = f" It has {first_names(valid[name])}." if valid[name] else ""
            raise UsageError(
                f"{kind} {name} has no option {option!r}{near_names(option, valid[name])}{known}"
            )
        options[option] = _option(f"{kind} {name}: {option}", option, value, valid[name][option])
    needed = _NEEDED.get(name)
    if needed is not None and needed not in options:
        raise UsageError(f"{kind} {name} needs {needed}.")
    first, last = options.get("min_resource"), options.get("max_resource")
    if first is not None and last is not None and first > last:
        raise UsageError(f"{kind} {name}: min_resource={first} is above max_resource={last}.")
    return Method(name, options)


def _option(label: str, option: str, value: Any, kind: type) -> Any:
    if kind is float and type(value) is int:
        value = float(value)
    fits = type(value) is kind  # True is no whole number
    if not fits:
        expected = {int: "a whole number", float: "a number", bool: "true or false"}[kind]
        raise UsageError(f"{label}={value!r} is not {expected}.")
    if kind is not bool and value < _SMALLEST.get(option, 0):
        raise UsageError(f"{label}={value} must be at least {_SMALLEST.get(option, 0)}.")
    if option == "percentile" and value > 100:
        raise UsageError(f"{label}={value} must be at most 100.")
    return value
