"""What a sweep searches: for each field a range of numbers, or a list of choices.

    LEARNING_RATE = {low = 1e-4, high = 1e-2, log = true}
    NUM_LAYERS    = {low = 2, high = 8, step = 2}
    NORM          = {choices = ["rms_norm", "layer_norm"]}

A range of whole numbers stays whole, and both ends belong to it. A choice that is no plain value,
such as a mesh, is known to Optuna by its text.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from layerkit.near_names import near_names
from layerkit_runner.errors import UsageError

if TYPE_CHECKING:
    import optuna

# What Optuna keeps of a choice as it is.
_PLAIN = (type(None), bool, int, float, str)

Value = None | bool | int | float | str


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`.

    Attributes:
      low: The first.
      high: The last; all of low, high and step are whole numbers, or none is.
      log: Whether each power of ten is as likely as another.
      step: The distance of one number from the next; None for any (or any whole) number.
    """

    low: int | float
    high: int | float
    log: bool = False
    step: int | float | None = None

    def samples(self) -> list[Value]:
        """Values to check a field's type by."""
        return [self.low, self.high, *([] if self.step is None else [self.low + self.step])]

    def all_values(self) -> list[Value] | None:
        """Each value there is; None where they cannot be counted."""
        step = self.step
        if step is None:
            if isinstance(self.low, float) or self.log:
                return None
            step = 1
        return [self.low + i * step for i in range(round((self.high - self.low) / step) + 1)]

    def as_floats(self) -> Range:
        """The same for a field that holds a float."""
        step = None if self.step is None else float(self.step)
        return Range(float(self.low), float(self.high), self.log, step)

    def suggest(self, trial: optuna.Trial, name: str) -> Value:
        """The value that a trial takes; drawn when it is first asked for."""
        if isinstance(self.low, float):
            return trial.suggest_float(name, self.low, self.high, log=self.log, step=self.step)
        step = 1 if self.step is None else int(self.step)
        return trial.suggest_int(name, int(self.low), int(self.high), log=self.log, step=step)


@dataclasses.dataclass(frozen=True)
class Choices:
    """One of `values`; a value that is not plain stands as its text."""

    values: tuple[Value, ...]

    def samples(self) -> list[Value]:
        """Values to check a field's type by: all of them."""
        return list(self.values)

    def all_values(self) -> list[Value]:
        """Each value there is."""
        return list(self.values)

    def suggest(self, trial: optuna.Trial, name: str) -> Value:
        """The value that a trial takes; drawn when it is first asked for."""
        return trial.suggest_categorical(name, self.values)


Parameter = Range | Choices


def override_text(value: Value) -> str:
    """A value as `--fdl.NAME=TEXT` takes it."""
    return value if isinstance(value, str) else repr(value)


def parse_space(document: Mapping[str, Any]) -> dict[str, Parameter]:
    """The search space of a study file, by the path of each field.

    Args:
      document: Path to `{low, high, log, step}` or `{choices}`. A path may also be written as
        tables inside tables, which is what TOML makes of dots without quotes.

    Raises:
      UsageError: lists everything that is wrong.
    """
    space: dict[str, Parameter] = {}
    problems: list[str] = []
    for path, given in _flat("", document):
        try:
            space[path] = _parameter(given)
        except ValueError as error:
            problems.append(f"space.{path}: {error}")
    if not space and not problems:
        problems.append("space is empty; give a field, such as LEARNING_RATE, a range or choices.")
    if problems:
        raise UsageError("\n".join(problems))
    return space


def _flat(prefix: str, document: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for name, given in document.items():
        if isinstance(given, dict) and given and all(isinstance(v, dict) for v in given.values()):
            yield from _flat(f"{prefix}{name}.", given)
        else:
            yield f"{prefix}{name}", given


def _parameter(given: Any) -> Parameter:
    if not isinstance(given, dict):
        raise ValueError(f"expected {{low, high}} or {{choices}}, got {given!r}.")
    valid = [field.name for field in dataclasses.fields(Range)] + ["choices"]
    for key in given:
        if key not in valid:
            raise ValueError(
                f"there is no {key!r}{near_names(key, valid)} Keys: {', '.join(valid)}"
            )
    if "choices" in given:
        if len(given) > 1:
            other = next(key for key in given if key != "choices")
            raise ValueError(f"has both choices and {other}; keep one of them.")
        return _choices(given["choices"])
    missing = [key for key in ("low", "high") if key not in given]
    if missing:
        raise ValueError(f"has no {missing[0]}; expected low and high, or choices.")
    return _range(**given)


def _choices(values: Any) -> Choices:
    if not isinstance(values, list) or not values:
        raise ValueError(f"choices is a list of values, not {values!r}.")
    plain = [value if isinstance(value, _PLAIN) else repr(value) for value in values]
    for index, value in enumerate(plain):
        if value in plain[:index]:
            raise ValueError(f"choices holds {value!r} twice.")
    return Choices(tuple(plain))


def _range(low: Any, high: Any, log: Any = False, step: Any = None) -> Range:  # noqa: FBT002
    numbers = {"low": low, "high": high, **({} if step is None else {"step": step})}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{name} is a number, not {value!r}.")
        if not math.isfinite(value):
            raise ValueError(f"{name}={value} must be finite.")
    if not isinstance(log, bool):
        raise ValueError(f"log is true or false, not {log!r}.")
    if not low < high:
        raise ValueError(f"low={low} must be less than high={high}.")
    if log and low <= 0:
        raise ValueError(f"low={low} must be above 0 where log is true.")
    if step is not None:
        if log:
            raise ValueError("a range has log or step, not both.")
        steps = (high - low) / step if step > 0 else 0
        if steps < 1 or abs(steps - round(steps)) > 1e-6:
            raise ValueError(f"step={step} must divide high - low = {high - low:g}.")
    if any(isinstance(value, float) for value in numbers.values()):
        return Range(low, high, log, step).as_floats()
    return Range(low, high, log, step)
