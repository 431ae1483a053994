r"""Rules that give a weight of this run the name of a stored value.

    (r"encoder/(.*)", r"lm/\1")                           another name
    (r"(.*)/layers_(\d+)/(.*)", r"\1/repeat/sub/\3[\2]")  layer i of a stacked weight
    (r"(.*)/repeat/sub/(.*)", r"\1/layers_{layer}/\2")    single layers, stacked
    (r"(.*)/repeat/sub/(.*)", r"\g<0>[0, 0, 1, 1]")       layers reordered or repeated

The pattern has to match the whole name. Groups are referred to as in `re.sub`. Brackets hold an
index of the leading axis, as in NumPy. Further brackets index further axes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from layerkit.checks import check_regex
from layerkit.errors import ConfigError
from layerkit_runner.errors import UsageError

LAYER = "{layer}"

_INDICES = re.compile(r"(?P<name>[^\[\]]*)(?P<indices>(?:\[[\d, ]+\])*)")

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Origin:
    """The stored values from which one value is made.

    Attributes:
      text: Name as the rule gives it, such as `w[3]`.
      names: Names of the stored values: one, or one for each layer.
      indices: Indices of the leading axes of the stored value. A tuple selects several, in order.
    """

    text: str
    names: tuple[str, ...]
    indices: tuple[int | tuple[int, ...], ...] = ()

    @property
    def is_stacked(self) -> bool:
        """Return whether stored values are stacked on a new first axis."""
        return LAYER in self.text

    @property
    def is_whole(self) -> bool:
        """Return whether the value equals one stored value."""
        return not self.indices and not self.is_stacked

    def shape(self, stored: Mapping[str, Shape]) -> Shape:
        """Return the shape of the value.

        Args:
          stored: Shape of each stored value by name.

        Raises:
          ConfigError: The shapes of the stored values differ, or an index is out of range.
        """
        shapes = sorted({stored[name] for name in self.names})
        if len(shapes) > 1:
            found = [list(shape) for shape in shapes]
            raise ConfigError(owner=self.text, field="shapes", value=found, expected="equal shapes")
        (shape,) = shapes
        if len(self.indices) > len(shape):
            raise ConfigError(
                owner=self.text,
                field="number of indices",
                value=len(self.indices),
                expected=f"at most the {len(shape)} axes of {list(shape)}",
            )
        taken: list[int] = []
        for index, size in zip(self.indices, shape, strict=False):
            several = index if isinstance(index, tuple) else (index,)
            if max(several) >= size:
                raise ConfigError(
                    owner=self.text,
                    field="index",
                    value=max(several),
                    expected=f"an integer in [0, {size})",
                )
            taken += [len(several)] if isinstance(index, tuple) else []
        rest = (*taken, *shape[len(self.indices) :])
        return (len(self.names), *rest) if self.is_stacked else rest


@dataclasses.dataclass(frozen=True)
class Rule:
    """A pattern of names and the stored name that it stands for.

    Attributes:
      pattern: Regular expression of names of this run.
      source: Name in the source.
      label: Path of the rule, such as `FOLDER: rules[0]`, for messages.
    """

    pattern: str
    source: str
    label: str

    def origin(self, name: str, shape: Shape) -> Origin | None:
        """Return the origin of the value called `name`; None if the rule does not match.

        Raises:
          UsageError: The rule refers to a group that the pattern lacks, or its index is malformed.
        """
        match = re.fullmatch(self.pattern, name)
        if match is None:
            return None

        def error(problem: str, expected: str | None = None) -> UsageError:
            pair = (self.pattern, self.source)
            return UsageError(problem, field=self.label, value=pair, expected=expected)

        try:
            text = match.expand(self.source)
        except (re.error, IndexError) as problem:
            raise error(str(problem)) from None
        parts = _INDICES.fullmatch(text)
        if parts is None:
            expected = "a name with indices at its end alone, such as w[3] or w[0, 0, 1]"
            raise error(f"invalid name {text!r}", expected)
        stored = parts["name"]
        groups = re.findall(r"\[([\d, ]+)\]", parts["indices"])
        numbers = [tuple(map(int, re.findall(r"\d+", group))) for group in groups]
        indices = tuple(
            several if "," in group else several[0]
            for group, several in zip(groups, numbers, strict=True)
        )
        if LAYER not in stored:
            return Origin(text, (stored,), indices)
        if indices:
            raise error(f"{LAYER} and an index in one rule", "one of the two")
        if not shape:
            raise error(f"{name} is a scalar", f"a weight with axes, since {LAYER} stacks values")
        return Origin(text, tuple(stored.replace(LAYER, str(i)) for i in range(shape[0])))

    def __str__(self) -> str:
        """Return the path of the rule and its texts."""
        return f"{self.label} ({self.pattern!r}, {self.source!r})"


def parse_rules(pairs: Sequence[tuple[str, str]], *, label: str) -> list[Rule]:
    """Return the rules of a config field.

    Raises:
      UsageError: An item is no pair of texts.
      ConfigError: A pattern is no regular expression.
    """
    rules = []
    for number, pair in enumerate(pairs):
        field = f"{label}[{number}]"
        texts = isinstance(pair, (tuple, list)) and all(isinstance(item, str) for item in pair)
        if not texts or len(pair) != 2:
            raise UsageError(field=field, value=pair, expected="(pattern, name in the source)")
        check_regex(None, **{field: pair[0]})
        rules.append(Rule(pair[0], pair[1], field))
    return rules
