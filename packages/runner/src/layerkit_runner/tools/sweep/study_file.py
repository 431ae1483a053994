"""Study files: which fields `--study=FILE` searches, by which metric, and how.

docs/sweeps.md describes the file. This module imports neither Optuna nor JAX, so that a mistake is
reported at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from layerkit.errors import first_names
from layerkit.near_names import near_names
from layerkit_runner.config.overrides import Override, parse_fields, parse_override
from layerkit_runner.errors import UsageError
from layerkit_runner.files.bounded_documents import DocumentError, parse_json, parse_toml, read_text

if TYPE_CHECKING:
    import optuna

Direction = Literal["minimize", "maximize"]
_DIRECTIONS: tuple[Direction, ...] = ("minimize", "maximize")
_KEYS = ("metric", "space", "direction", "num_trials", "sampler", "pruner")
_MAX_BYTES = 100_000
_NUM_TRIALS = 20  # enough for a sampler to learn from

Value = None | bool | int | float | str
# Types that Optuna stores as they are. Other choices, such as a list, are stored as their text.
_PLAIN = (type(None), bool, int, float, str)

# Options of Optuna's samplers and pruners, with their types. Its steps are training steps here.
SAMPLERS: dict[str, dict[str, type]] = {
    "tpe": {"seed": int, "n_startup_trials": int, "multivariate": bool},
    "random": {"seed": int},
    "grid": {"seed": int},
}
_MEDIAN: dict[str, type] = {"n_startup_trials": int, "n_warmup_steps": int, "n_min_trials": int}
_HALVING: dict[str, type] = {"min_resource": int, "reduction_factor": int}
PRUNERS: dict[str, dict[str, type]] = {
    "none": {},
    "median": _MEDIAN,
    "percentile": {"percentile": float, **_MEDIAN},
    "successive_halving": {**_HALVING, "min_early_stopping_rate": int},
    "hyperband": {**_HALVING, "max_resource": int},
}
# Optuna's default of min_resource, 1, would be a single training step.
_REQUIRED = {"percentile": "percentile", "hyperband": "min_resource"}
# Optuna's smallest values, where they are not 0.
_SMALLEST = {"min_resource": 1, "max_resource": 1, "reduction_factor": 2, "n_min_trials": 1}


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`; low, high and step are all whole numbers, or none is."""

    low: int | float
    high: int | float
    log: bool = False
    step: int | float | None = None  # None: every number, or every whole number

    def described(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def samples(self) -> list[Value]:
        """Return the values to check a field's type with."""
        return [self.low, self.high, *([] if self.step is None else [self.low + self.step])]

    def all_values(self) -> list[Value]:
        """Return every value; none if they cannot be counted."""
        if self.log or (self.step is None and isinstance(self.low, float)):
            return []
        step = 1 if self.step is None else self.step
        return [self.low + i * step for i in range(round((self.high - self.low) / step) + 1)]

    def as_floats(self) -> Range:
        """Return the same range for a field that holds a float."""
        step = None if self.step is None else float(self.step)
        return Range(float(self.low), float(self.high), self.log, step)

    def suggest(self, trial: optuna.Trial, name: str) -> Value:
        """Return the value of a trial; Optuna draws it on the first call."""
        if isinstance(self.low, float):
            return trial.suggest_float(name, self.low, self.high, log=self.log, step=self.step)
        step = 1 if self.step is None else int(self.step)
        return trial.suggest_int(name, int(self.low), int(self.high), log=self.log, step=step)


@dataclasses.dataclass(frozen=True)
class Choices:
    """One of `values`. A value that Optuna cannot store, such as a list, is given as its text."""

    values: tuple[Value, ...]

    def described(self) -> dict[str, Any]:
        return {"choices": list(self.values)}

    def samples(self) -> list[Value]:
        return list(self.values)

    all_values = samples

    def suggest(self, trial: optuna.Trial, name: str) -> Value:
        return trial.suggest_categorical(name, self.values)


Parameter = Range | Choices


@dataclasses.dataclass(frozen=True)
class Method:
    """A sampler or a pruner, with Optuna's options for it."""

    name: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class StudyFile:
    """The content of a study file; `space` maps the paths of fields, as `--fdl` takes them."""

    path: str
    space: Mapping[str, Parameter]
    metric: str
    direction: Direction
    num_trials: int
    sampler: Method
    pruner: Method


def override_text(value: Value) -> str:
    """Return a value as `--fdl.NAME=TEXT` takes it."""
    return value if isinstance(value, str) else repr(value)


def read_study_file(path: str, *, num_trials: int | None = None) -> StudyFile:
    """Read and check a study file; `num_trials` replaces the number in it.

    Raises:
      UsageError: There is no such file, or something in it is wrong.
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
    """Check the search space against the fields of an experiment; of deep paths, only the root.

    Args:
      study: The study file.
      experiment: Name of the experiment, for messages.
      fixed: Overrides of the command line, which hold for all trials.
      annotations: Annotations of the experiment's fields; None if only an import can tell them.

    Raises:
      UsageError: Lists all problems.
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
        # A wrong name gives the same message for each of its values.
        raise UsageError(f"--study={study.path}: " + "\n".join(dict.fromkeys(problems)))


def _is_part(path: str, of: str) -> bool:
    return f"{path}.".startswith(f"{of}.")


def _document(path: str) -> dict[str, Any]:
    file = Path(path).expanduser()
    parse = {".toml": parse_toml, ".json": parse_json}.get(file.suffix)
    if parse is None:
        raise UsageError("a study file ends in .toml or .json.")
    try:
        document = parse(read_text(file, max_bytes=_MAX_BYTES))
    except FileNotFoundError:
        beside = [other.name for other in file.parent.iterdir()] if file.parent.is_dir() else []
        raise UsageError(f"there is no such file{near_names(file.name, beside)}") from None
    except OSError as error:
        raise UsageError(f"cannot be read: {error}") from error
    except DocumentError as error:
        raise UsageError(f"is not {file.suffix[1:].upper()}: {error}") from error
    if not isinstance(document, dict):
        raise UsageError(f"expected an object with {', '.join(_KEYS)}.")
    return document


def _parse(path: str, document: dict[str, Any], num_trials: int | None) -> StudyFile:
    _check_keys(document, _KEYS)
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
        size = math.prod(len(values) for values in grid(parameters).values())
        num_trials = size if num_trials is None else min(num_trials, size)
    return StudyFile(
        path, parameters, metric, direction, num_trials or _NUM_TRIALS, sampler, pruner
    )


def _check_keys(given: Iterable[str], valid: Iterable[str]) -> None:
    valid = list(valid)
    for key in given:
        if key not in valid:
            near = near_names(key, valid)
            raise UsageError(f"there is no {key!r}{near} Keys: {', '.join(valid)}")


def grid(space: Mapping[str, Parameter]) -> dict[str, list[Value]]:
    """Return all values of each field; a range without a step is a UsageError."""
    values = {path: parameter.all_values() for path, parameter in space.items()}
    for path, found in values.items():
        if not found:
            raise UsageError(f"space.{path}: a grid needs choices, or a range with a step.")
    return values


def parse_space(document: Mapping[str, Any]) -> dict[str, Parameter]:
    """Return the search space of a study file, by the path of each field.

    A path may also be written as nested tables, which is how TOML reads dots without quotes.
    """
    space: dict[str, Parameter] = {}
    problems: list[str] = []
    for path, given in _flat("", document):
        try:
            space[path] = _parameter(given)
        except UsageError as error:
            problems.append(f"space.{path}: {error}")
    if not space and not problems:
        problems.append(
            "space is empty; give a field, such as task.train.learner.learning_rate, a range or"
            " choices."
        )
    if problems:
        raise UsageError("\n".join(problems))
    return space


def _flat(prefix: str, document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, given in document.items():
        if isinstance(given, dict) and given and all(isinstance(v, dict) for v in given.values()):
            yield from _flat(f"{prefix}{name}.", given)
        else:
            yield f"{prefix}{name}", given


def _parameter(given: Any) -> Parameter:
    if not isinstance(given, dict):
        raise UsageError(f"expected {{low, high}} or {{choices}}, got {given!r}.")
    _check_keys(given, [*(field.name for field in dataclasses.fields(Range)), "choices"])
    if "choices" not in given:
        missing = [key for key in ("low", "high") if key not in given]
        if missing:
            raise UsageError(f"has no {missing[0]}; expected low and high, or choices.")
        return _range(Range(**given))
    if len(given) > 1:
        other = next(key for key in given if key != "choices")
        raise UsageError(f"has both choices and {other}; keep one of them.")
    values = given["choices"]
    if not isinstance(values, list) or not values:
        raise UsageError(f"choices is a list of values, not {values!r}.")
    plain = [value if isinstance(value, _PLAIN) else repr(value) for value in values]
    for index, value in enumerate(plain):
        if value in plain[:index]:
            raise UsageError(f"choices holds {value!r} twice.")
    return Choices(tuple(plain))


def _range(given: Range) -> Range:
    low, high, log, step = dataclasses.astuple(given)
    numbers = {"low": low, "high": high, **({} if step is None else {"step": step})}
    for name, value in numbers.items():
        if type(value) not in (int, float):  # True is no number here
            raise UsageError(f"{name} is a number, not {value!r}.")
        if not math.isfinite(value):
            raise UsageError(f"{name}={value} must be finite.")
    if not isinstance(log, bool):
        raise UsageError(f"log is true or false, not {log!r}.")
    if not low < high:
        raise UsageError(f"low={low} must be less than high={high}.")
    if log and low <= 0:
        raise UsageError(f"low={low} must be above 0 where log is true.")
    if step is not None:
        if log:
            raise UsageError("a range has log or step, not both.")
        steps = (high - low) / step if step > 0 else 0
        if steps < 1 or abs(steps - round(steps)) > 1e-6:
            raise UsageError(f"step={step} must divide high - low = {high - low:g}.")
    has_float = any(isinstance(value, float) for value in numbers.values())
    return given.as_floats() if has_float else given


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
    required = _REQUIRED.get(name)
    if required is not None and required not in options:
        raise UsageError(f"{kind} {name} needs {required}.")
    first, last = options.get("min_resource"), options.get("max_resource")
    if first is not None and last is not None and first > last:
        raise UsageError(f"{kind} {name}: min_resource={first} is above max_resource={last}.")
    return Method(name, options)


def _option(label: str, option: str, value: Any, kind: type[Any]) -> Any:
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:  # True is no whole number
        expected = {int: "a whole number", float: "a number", bool: "true or false"}[kind]
        raise UsageError(f"{label}={value!r} is not {expected}.")
    if kind is not bool and value < _SMALLEST.get(option, 0):
        raise UsageError(f"{label}={value} must be at least {_SMALLEST.get(option, 0)}.")
    if option == "percentile" and value > 100:
        raise UsageError(f"{label}={value} must be at most 100.")
    return value
