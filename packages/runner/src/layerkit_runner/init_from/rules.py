r"""One rule: a pattern over the names of this run, and the name of the value in the source.

    (r"encoder/(.*)", r"lm/\1")                           another name
    (r"(.*)/layers_(\d+)/(.*)", r"\1/repeat/sub/\3[\2]")  layer i of a stacked weight
    (r"(.*)/repeat/sub/(.*)", r"\1/layers_{layer}/\2")    the layers one by one, stacked
    (r"(.*)/repeat/sub/(.*)", r"\g<0>[0, 0, 1, 1]")       layers in another order, or repeated

The pattern has to match the whole name. Groups are referred to as in `re.sub`. What follows in
brackets is an index into the leading axis, as in NumPy; several brackets go on to further axes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from layerkit_runner.errors import UsageError, check_pattern

LAYER = "{layer}"

_INDICES = re.compile(r"(?P<name>[^\[\]]*)(?P<indices>(?:\[[\d, ]+\])*)")

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Origin:
    """How one value is made of stored ones.

    Attributes:
      text: The name as the rule says it, for people.
      names: Of the stored values: one, or one for each layer.
      indices: Into the leading axes of the stored value; a tuple takes several, in this order.
    """

    text: str
    names: tuple[str, ...]
    indices: tuple[int | tuple[int, ...], ...] = ()

    @property
    def is_stacked(self) -> bool:
        """Whether the value is stacked of stored ones, on a new first axis."""
        return LAYER in self.text

    @property
    def is_whole(self) -> bool:
        """Whether the value is a stored one as it is."""
        return not self.indices and not self.is_stacked

    def shape(self, stored: Mapping[str, Shape]) -> Shape:
        """The shape of the value.

        Args:
          stored: The shape of each stored value by name.

        Raises:
          ValueError: stored values that do not fit together, or an index beyond the axis.
        """
        shapes = {stored[name] for name in self.names}
        if len(shapes) > 1:
            differing = ", ".join(str(list(shape)) for shape in sorted(shapes))
            raise ValueError(f"{self.text} names values of different shapes: {differing}")
        (shape,) = shapes
        if len(self.indices) > len(shape):
            raise ValueError(f"{self.text} has more indices than {list(shape)} has axes")
        taken: list[int] = []
        for index, size in zip(self.indices, shape, strict=False):
            several = index if isinstance(index, tuple) else (index,)
            if max(several) >= size:
                raise ValueError(
                    f"{self.text}: index {max(several)} is beyond an axis of {size}, which are"
                    f" counted from 0"
                )
            taken += [len(several)] if isinstance(index, tuple) else []
        rest = (*taken, *shape[len(self.indices) :])
        return (len(self.names), *rest) if self.is_stacked else rest


@dataclasses.dataclass(frozen=True)
class Rule:
    """A pattern and what it stands for; see the module.

    Attributes:
      pattern: Regular expression of names of this run.
      source: The name in the source.
      label: Where the rule is written, for messages.
    """

    pattern: str
    source: str
    label: str

    def origin(self, name: str, shape: Shape) -> Origin | None:
        """Where the value called `name` comes from; None where the rule does not match.

        Raises:
          UsageError: the rule refers to a group that the pattern does not have, or its index is
            none.
        """
        match = re.fullmatch(self.pattern, name)
        if match is None:
            return None
        try:
            text = match.expand(self.source)
        except (re.error, IndexError) as error:
            raise UsageError(f"{self}: {self.source!r}: {error}") from None
        parts = _INDICES.fullmatch(text)
        if parts is None:
            raise UsageError(
                f"{self}: {text!r} is no name; indices stand at its end, such as w[3] or w[0, 0, 1]"
            )
        stored, indices = parts["name"], _parse_indices(parts["indices"])
        if LAYER not in stored:
            return Origin(text, (stored,), indices)
        if not shape or indices:
            what = "it has no axes" if not shape else "it cannot have an index besides"
            raise UsageError(f"{self}: {name} cannot be stacked of {text}: {what}")
        return Origin(text, tuple(stored.replace(LAYER, str(i)) for i in range(shape[0])))

    def __str__(self) -> str:
        return f"{self.label} ({self.pattern!r}, {self.source!r})"


def parse_rules(pairs: Sequence[tuple[str, str]], *, label: str) -> list[Rule]:
    """Checks rules as they are written in a config.

    Raises:
      UsageError: one is no pair of texts, or its pattern no regular expression.
    """
    rules = []
    for number, pair in enumerate(pairs):
        here = f"{label}[{number}]"
        texts = isinstance(pair, (tuple, list)) and all(isinstance(item, str) for item in pair)
        if not texts or len(pair) != 2:
            raise UsageError(f"{here}={pair!r}: expected (pattern, name in the source)")
        check_pattern(pair[0], label=here)
        rules.append(Rule(pair[0], pair[1], here))
    return rules


def _parse_indices(text: str) -> tuple[int | tuple[int, ...], ...]:
    """`[3]` → (3,); `[0, 1]` → ((0, 1),)."""
    indices: list[int | tuple[int, ...]] = []
    for inner in re.findall(r"\[([\d, ]+)\]", text):
        numbers = tuple(int(number) for number in re.findall(r"\d+", inner))
        indices.append(numbers if "," in inner else numbers[0])
    return tuple(indices)
