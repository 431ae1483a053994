"""Study files of `--study=FILE`: the searched fields, the metric and the method.

docs/sweeps.md describes the file. This module imports neither Optuna nor JAX, so that a mistake is
reported at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from layerkit.checks import check_choice, check_integers, require
from layerkit.errors import UserError
from layerkit_runner.config.overrides import Override, parse_fields, parse_override
from layerkit_runner.errors import UsageError, to_usage_error
from layerkit_runner.files.bounded_documents import DocumentError, parse_json, parse_toml, read_text

if TYPE_CHECKING:
    import optuna

Direction = Literal["minimize", "maximize"]
_DIRECTIONS: tuple[Direction, ...] = ("minimize", "maximize")
_KEYS = ("metric", "space", "direction", "num_trials", "sampler", "pruner")
_MAX_BYTES = 100_000
_NUM_TRIALS = 20

Value = None | bool | int | float | str
# Types that Optuna can store. Other choices, such as a list, are stored as their text.
_PLAIN = (type(None), bool, int, float, str)

# Supported options of Optuna's samplers and pruners, and their types. Steps are training steps.
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
# Optuna's lower bounds of options, where they are not 0.
_MINIMUM = {"min_resource": 1, "max_resource": 1, "reduction_factor": 2, "n_min_trials": 1}


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers to search, all integers or all floats.

    Attributes:
      low: Smallest value.
      high: Largest value.
      log: True to sample the logarithm uniformly.
      step: Difference of consecutive values; None for every integer or float.
    """

    low: int | float
    high: int | float
    log: bool = False
    step: int | float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the range as it is recorded in `study.json`."""
        return dataclasses.asdict(self)

    def samples(self) -> list[Value]:
        """Return values that a field of the right type accepts."""
        return [self.low, self.high, *([] if self.step is None else [self.low + self.step])]

    def all_values(self) -> list[Value]:
        """Return every value; an empty list if they cannot be counted."""
        if self.log or (self.step is None and isinstance(self.low, float)):
            return []
        step = 1 if self.step is None else self.step
        return [self.low + i * step for i in range(round((self.high - self.low) / step) + 1)]

    def as_floats(self) -> Range:
        """Return the range with floats, for a field that holds a float."""
        step = None if self.step is None else float(self.step)
        return Range(float(self.low), float(self.high), self.log, step)

    def suggest(self, trial: optuna.Trial, name: str) -> Value:
        """Return the value of a trial, which Optuna draws on the first call."""
        if isinstance(self.low, float):
            return trial.suggest_float(name, self.low, self.high, log=self.log, step=self.step)
        step = 1 if self.step is None else int(self.step)
        return trial.suggest_int(name, int(self.low), int(self.high), log=self.log, step=step)


@dataclasses.dataclass(frozen=True)
class Choices:
    """Values to search. A value that Optuna cannot store, such as a list, is stored as its text."""

    values: tuple[Value, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the choices as they are recorded in `study.json`."""
        return {"choices": list(self.values)}

    def samples(self) -> list[Value]:
        """Return all values."""
        return list(self.values)

    all_values = samples

    def suggest(self, trial: optuna.Trial, name: str) -> Value:
        """Return the value of a trial, which Optuna draws on the first call."""
        return trial.suggest_categorical(name, self.values)


Parameter = Range | Choices


@dataclasses.dataclass(frozen=True)
class Method:
    """The name of a sampler or pruner, and options to pass to Optuna."""

    name: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class StudyFile:
    """Content of a study file, where `space` has the `--fdl` path of each searched field."""

    path: str
    space: Mapping[str, Parameter]
    metric: str
    direction: Direction
    num_trials: int
    sampler: Method
    pruner: Method


def override_text(value: Value) -> str:
    """Return the text of a value in `--fdl.NAME=TEXT`."""
    return value if isinstance(value, str) else repr(value)


def read_study_file(path: str, *, num_trials: int | None = None) -> StudyFile:
    """Read and check a study file; `num_trials` overrides the number in it.

    Raises:
      UserError: The file does not exist, or a key or value is wrong.
    """
    try:
        return _parse(path, _document(path), num_trials)
    except UserError as error:
        error.owner = f"--study={path}"
        raise


def check_fields(
    study: StudyFile,
    experiment: str,
    fixed: Iterable[Override],
    annotations: Mapping[str, str | None] | None,
) -> None:
    """Check the search space against an experiment; of a deep path, only the first field.

    Args:
      study: Study file.
      experiment: Name of the experiment, for messages.
      fixed: Overrides of the command line, which apply to all trials.
      annotations: Annotations of the experiment's fields; None if they are known only after the
        experiment is imported.

    Raises:
      UsageError: A field is unknown, has a value of the wrong type, or is set twice.
    """
    owner = f"--study={study.path}"
    setters = [(f"space.{path}", path) for path in study.space]
    setters += [(str(override), override.path) for override in fixed]
    for path, parameter in study.space.items():
        for setter, other in setters:
            is_itself = setter == f"space.{path}"
            if not is_itself and (_is_part(path, other) or _is_part(other, path)):
                hint = f"{setter} sets it as well; keep one of them."
                raise UsageError("field set twice", owner=owner, field=f"space.{path}", hint=hint)
        for value in parameter.samples():
            try:
                override = parse_override(path, override_text(value))
                if annotations is not None or override.is_deep:
                    parse_fields(experiment, annotations or {}, [override])
            except UserError as error:
                raise to_usage_error(error, owner=owner) from error


def _is_part(path: str, of: str) -> bool:
    return f"{path}.".startswith(f"{of}.")


def _document(path: str) -> dict[str, Any]:
    file = Path(path).expanduser()
    parse = {".toml": parse_toml, ".json": parse_json}.get(file.suffix)
    if parse is None:
        raise UsageError(expected="a file name that ends in .toml or .json")
    try:
        document = parse(read_text(file, max_bytes=_MAX_BYTES))
    except FileNotFoundError:
        beside = [other.name for other in file.parent.iterdir()] if file.parent.is_dir() else []
        near = difflib.get_close_matches(file.name, beside)
        raise UsageError("file not found", value=file.name, choices=near) from None
    except OSError as error:
        raise UsageError(f"cannot read the file: {error}") from error
    except DocumentError as error:
        raise UsageError(f"not valid {file.suffix[1:].upper()}: {error}") from error
    require(isinstance(document, dict), None, "content", document, f"keys {', '.join(_KEYS)}")
    return document


def _parse(path: str, document: dict[str, Any], num_trials: int | None) -> StudyFile:
    _check_keys("", document, _KEYS)
    for key in ("metric", "space"):
        if key not in document:
            raise UsageError("missing key", field=key)
    metric = document["metric"]
    dataset, _, name = metric.partition("/") if isinstance(metric, str) else ("", "", "")
    require(dataset and name, None, "metric", metric, "DATASET/METRIC, such as heldout/loss")
    direction = document.get("direction", "minimize")
    check_choice(None, _DIRECTIONS, direction=direction)
    parameters = parse_space(document["space"])
    sampler = _method("sampler", document.get("sampler", "tpe"), SAMPLERS)
    pruner = _method("pruner", document.get("pruner", "none"), PRUNERS)
    if num_trials is None:
        num_trials = document.get("num_trials")
        check_integers(None, minimum=1, num_trials=num_trials)
    if sampler.name == "grid":
        size = math.prod(len(values) for values in grid(parameters).values())
        num_trials = size if num_trials is None else min(num_trials, size)
    return StudyFile(
        path, parameters, metric, direction, num_trials or _NUM_TRIALS, sampler, pruner
    )


def _check_keys(field: str, given: Iterable[str], valid: Collection[str]) -> None:
    for key in given:
        if key not in valid:
            raise UsageError("unknown key", field=field, value=key, choices=valid)


def grid(space: Mapping[str, Parameter]) -> dict[str, list[Value]]:
    """Return all values of each field; a range of floats without a step is an error."""
    values = {path: parameter.all_values() for path, parameter in space.items()}
    for path, found in values.items():
        if not found:
            expected = "choices or a range with a step, which the grid sampler needs"
            raise UsageError(field=f"space.{path}", expected=expected)
    return values


def parse_space(document: Any) -> dict[str, Parameter]:
    """Return the search space of a study file, by the path of each field.

    A path may also be written as nested tables, which is how TOML reads dots without quotes.
    """
    is_table = isinstance(document, dict) and bool(document)
    expected = "a table of fields, such as RATE = {low = 1e-4, high = 1e-2}"
    require(is_table, None, "space", document, expected)
    return {path: _parameter(f"space.{path}", given) for path, given in _flat("", document)}


def _flat(prefix: str, document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, given in document.items():
        if isinstance(given, dict) and given and all(isinstance(v, dict) for v in given.values()):
            yield from _flat(f"{prefix}{name}.", given)
        else:
            yield f"{prefix}{name}", given


def _parameter(field: str, given: Any) -> Parameter:
    require(isinstance(given, dict), None, field, given, "{low, high} or {choices}")
    _check_keys(field, given, [*(each.name for each in dataclasses.fields(Range)), "choices"])
    if "choices" not in given:
        require("low" in given and "high" in given, None, field, given, "low and high, or choices")
        return _range(field, Range(**given))
    require(len(given) == 1, None, field, given, "either low and high, or choices")
    values = given["choices"]
    is_list = isinstance(values, list) and bool(values)
    require(is_list, None, f"{field}.choices", values, "a list of values")
    plain = [value if isinstance(value, _PLAIN) else repr(value) for value in values]
    for index, value in enumerate(plain):
        require(value not in plain[:index], None, f"{field}.choices", values, "distinct values")
    return Choices(tuple(plain))


def _range(field: str, given: Range) -> Range:
    low, high, log, step = dataclasses.astuple(given)
    numbers = {"low": low, "high": high, **({} if step is None else {"step": step})}
    for name, value in numbers.items():
        # isinstance would accept True.
        is_number = type(value) in (int, float) and math.isfinite(value)
        require(is_number, None, f"{field}.{name}", value, "a finite number")
    require(isinstance(log, bool), None, f"{field}.log", log, "true or false")
    require(low < high, None, f"{field}.low", low, f"a number less than high={high}")
    require(low > 0 or not log, None, f"{field}.low", low, "a number above 0, since log=true")
    if step is not None:
        require(not log, None, f"{field}.step", step, "no step, since log=true")
        steps = (high - low) / step if step > 0 else 0
        is_divisor = steps >= 1 and abs(steps - round(steps)) <= 1e-6
        expected = f"a divisor of high - low = {high - low:g}"
        require(is_divisor, None, f"{field}.step", step, expected)
    has_float = any(isinstance(value, float) for value in numbers.values())
    return given.as_floats() if has_float else given


def _method(kind: str, given: Any, valid: Mapping[str, Mapping[str, type]]) -> Method:
    document = {"name": given} if isinstance(given, str) else given
    is_named = isinstance(document, dict) and isinstance(document.get("name"), str)
    require(is_named, None, kind, given, "a name, or {name = …, OPTION = …}")
    options = dict(document)
    name = options.pop("name")
    check_choice(None, valid, **{kind: name})
    _check_keys(f"{kind} {name}", options, valid[name])
    for option, value in options.items():
        options[option] = _option(f"{kind}.{option}", value, valid[name][option])
    required = _REQUIRED.get(name)
    if required is not None and required not in options:
        raise UsageError(f"missing option of {name}", field=f"{kind}.{required}")
    first, last = options.get("min_resource"), options.get("max_resource")
    if first is not None and last is not None:
        require(first <= last, None, f"{kind}.min_resource", first, f"at most max_resource={last}")
    return Method(name, options)


def _option(field: str, value: Any, kind: type[Any]) -> Any:
    option = field.rpartition(".")[2]
    if kind is float and type(value) is int:
        value = float(value)
    if kind is bool:
        require(type(value) is bool, None, field, value, "true or false")
    elif kind is int:
        check_integers(None, minimum=_MINIMUM.get(option, 0), **{field: value})
    else:
        is_valid = type(value) is float and 0 <= value <= 100
        require(is_valid, None, field, value, "a number from 0 to 100")
    return value
