"""Study files of `--study=FILE`: the searched fields, the metric and the method.

docs/sweeps.md describes the file. Ranges, choices and options of samplers and pruners are checked
by Optuna's classes.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from optuna import pruners, samplers
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from layerkit.config.checks import check_choice, check_integers, require
from layerkit.errors import UserError
from layerkit_runner.errors import UsageError
from layerkit_runner.files.bounded_documents import DocumentError, parse_json, parse_toml, read_text

Direction = Literal["minimize", "maximize"]
_DIRECTIONS: tuple[Direction, ...] = ("minimize", "maximize")
_KEYS = ("metric", "space", "direction", "num_trials", "sampler", "pruner")
_RANGE = ("low", "high", "log", "step")
_MAX_BYTES = 100_000
_NUM_TRIALS = 20

Value = None | bool | int | float | str
# Types that Optuna can store. Other choices, such as a list, are stored as their text.
_PLAIN = (type(None), bool, int, float, str)

_SAMPLERS: dict[str, Callable[..., samplers.BaseSampler]] = {
    "tpe": samplers.TPESampler,
    "random": samplers.RandomSampler,
    "grid": samplers.GridSampler,
}
_PRUNERS: dict[str, Callable[..., pruners.BasePruner]] = {
    "none": pruners.NopPruner,
    "median": pruners.MedianPruner,
    "percentile": pruners.PercentilePruner,
    "successive_halving": pruners.SuccessiveHalvingPruner,
    "hyperband": pruners.HyperbandPruner,
}


@dataclasses.dataclass(frozen=True)
class StudyFile:
    """Content of a study file; `sampler` and `pruner` are names with their options."""

    path: str
    space: Mapping[str, BaseDistribution]
    metric: str
    direction: Direction
    num_trials: int
    sampler: tuple[str, Mapping[str, Any]]
    pruner: tuple[str, Mapping[str, Any]]

    def make_sampler(self, number: int) -> samplers.BaseSampler:
        """Return the sampler of the trial with a number."""
        name, given = self.sampler
        options = {"seed": 0, **given}
        if name == "grid":
            return samplers.GridSampler(grid(self.space), **options)
        options["seed"] += number
        # The constant liar avoids the values of trials that run in other processes.
        more = {"constant_liar": True} if name == "tpe" else {}
        return _SAMPLERS[name](**more, **options)

    def make_pruner(self) -> pruners.BasePruner:
        """Return the pruner; its steps are training steps."""
        name, options = self.pruner
        return _PRUNERS[name](**options)


def override_text(value: Value) -> str:
    """Return the text of a value in `--fdl.NAME=TEXT`."""
    return value if isinstance(value, str) else repr(value)


def read_study_file(path: str, *, num_trials: int | None = None) -> StudyFile:
    """Read and check a study file; `num_trials` overrides the number in it."""
    try:
        return _parse(path, _document(path), num_trials)
    except UserError as error:
        error.owner = f"--study={path}"
        raise


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
    space = parse_space(document["space"])
    if num_trials is None:
        num_trials = document.get("num_trials")
        check_integers(None, minimum=1, num_trials=num_trials)
    sampler = _method("sampler", document.get("sampler", "tpe"), _SAMPLERS)
    check_integers(None, minimum=0, **{"sampler.seed": sampler[1].get("seed", 0)})
    if sampler[0] == "grid":
        size = math.prod(len(values) for values in grid(space).values())
        num_trials = size if num_trials is None else min(num_trials, size)
    pruner = _method("pruner", document.get("pruner", "none"), _PRUNERS)
    file = StudyFile(path, space, metric, direction, num_trials or _NUM_TRIALS, sampler, pruner)
    for kind, make in (("sampler", lambda: file.make_sampler(0)), ("pruner", file.make_pruner)):
        try:
            make()
        except (TypeError, ValueError) as error:
            raise UsageError(str(error), field=kind, value=document[kind]) from error
    return file


def _check_keys(field: str, given: Iterable[str], valid: Collection[str]) -> None:
    for key in given:
        if key not in valid:
            raise UsageError("unknown key", field=field, value=key, choices=valid)


def _method(kind: str, given: Any, valid: Collection[str]) -> tuple[str, dict[str, Any]]:
    options = {"name": given} if isinstance(given, str) else given
    is_named = isinstance(options, dict) and isinstance(options.get("name"), str)
    require(is_named, None, kind, given, "a name, or {name = …, OPTION = …}")
    check_choice(None, valid, **{kind: options["name"]})
    return options["name"], {key: value for key, value in options.items() if key != "name"}


def parse_space(document: Any) -> dict[str, BaseDistribution]:
    """Return the search space of a study file, by the path of each field.

    A path may also be written as nested tables, which is how TOML reads dots without quotes.
    """
    is_table = isinstance(document, dict) and bool(document)
    expected = "a table of fields, such as RATE = {low = 1e-4, high = 1e-2}"
    require(is_table, None, "space", document, expected)
    return {path: _distribution(f"space.{path}", given) for path, given in _flat("", document)}


def _flat(prefix: str, document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, given in document.items():
        if isinstance(given, dict) and given and all(isinstance(v, dict) for v in given.values()):
            yield from _flat(f"{prefix}{name}.", given)
        else:
            yield f"{prefix}{name}", given


def _distribution(field: str, given: Any) -> BaseDistribution:
    require(isinstance(given, dict), None, field, given, "{low, high} or {choices}")
    _check_keys(field, given, (*_RANGE, "choices"))
    if "choices" in given:
        values = given["choices"]
        is_valid = len(given) == 1 and isinstance(values, list) and bool(values)
        require(is_valid, None, field, given, "a list of choices and no other key")
        plain = [value if isinstance(value, _PLAIN) else repr(value) for value in values]
        is_distinct = all(value not in plain[:index] for index, value in enumerate(plain))
        require(is_distinct, None, field, values, "distinct values")
        return CategoricalDistribution(plain)
    numbers = [given.get("low"), given.get("high"), *([given["step"]] if "step" in given else [])]
    # isinstance would accept True.
    is_valid = all(type(number) in (int, float) and math.isfinite(number) for number in numbers)
    require(is_valid, None, field, given, "finite numbers low and high, or choices")
    is_float = any(isinstance(number, float) for number in numbers)
    try:
        with warnings.catch_warnings(action="error"):  # of a step that does not divide the range
            return (FloatDistribution if is_float else IntDistribution)(**given)
    except (TypeError, ValueError, UserWarning) as error:
        raise UsageError(str(error), field=field, value=given) from error


def as_floats(distribution: BaseDistribution) -> BaseDistribution:
    """Return a distribution with floats in place of integers, for a field that holds a float."""
    if not isinstance(distribution, IntDistribution):
        return distribution
    step = distribution.step if distribution.step > 1 else None
    return FloatDistribution(distribution.low, distribution.high, log=distribution.log, step=step)


def end_values(distribution: BaseDistribution) -> list[Value]:
    """Return all choices, or the ends of a range."""
    if isinstance(distribution, CategoricalDistribution):
        return list(distribution.choices)
    assert isinstance(distribution, (IntDistribution, FloatDistribution))
    return [distribution.low, distribution.high]


def grid(space: Mapping[str, BaseDistribution]) -> dict[str, list[Value]]:
    """Return all values of each field; a range of floats without a step is an error."""
    found = {}
    for path, each in space.items():
        if isinstance(each, CategoricalDistribution):
            found[path] = list(each.choices)
            continue
        assert isinstance(each, (IntDistribution, FloatDistribution))
        if each.log or each.step is None:
            expected = "choices or a range with a step, which the grid sampler needs"
            raise UsageError(field=f"space.{path}", expected=expected)
        count = round((each.high - each.low) / each.step) + 1
        found[path] = [each.low + i * each.step for i in range(count)]
    return found
