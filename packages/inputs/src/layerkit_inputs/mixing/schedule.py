"""A deterministic schedule of components by weights, which keeps the shares at every position.

Random draws keep the weights only in the long run: after 10,000 rows a share of one half is off by
50 rows as often as not. This schedule assigns turns: after any number of turns, each component has
had its share of them, with an error below one turn. Tijdeman (1980), "The chairman assignment
problem", proves that such a schedule exists.

Weights may change at some positions, or linearly between two. The errors are carried over a change,
so they do not add up. A turn depends on no later weights, which a resumed run may change; so after
a change an error may be above one for a few turns. Turns that a component without weight lacks go
to others until it has a weight again, and the error may last as long. It was at most 1.53 in
random schedules. Between two changes the schedule is periodic after some turns, so the component of
any turn is a table lookup.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from layerkit.config.checks import require

LONGEST_PERIOD = 1 << 20
"""Largest period of a schedule in turns; weights are rounded to shares of that many turns."""


_NUM_CHANGE_STEPS = 64
_CHANGE_PERIOD = 1 << 12
# Later than all positions.
_NEVER = 1 << 62

Weight = float | Sequence[float]
"""A weight, or a pair: the weights at the begin and at the end of the turns of a piece."""


class _Piece(NamedTuple):
    """Turns with the same shares.

    Attributes:
      start: Position of the first turn.
      counts: Turns of each component in a period.
      left_out: Whether each component has no weight; a small weight may be rounded to no turns.
    """

    start: int
    counts: list[int]
    left_out: list[bool]


class MixingSchedule:
    """Turns of components, in proportion to their weights.

    >>> schedule = MixingSchedule({"web": 3, "books": 1})
    >>> component, number = schedule.turns(np.arange(8))
    >>> component.tolist(), number.tolist()
    ([0, 0, 1, 0, 0, 0, 1, 0], [0, 1, 0, 2, 3, 4, 1, 5])

    Attributes:
      names: Names of the components.
      counts: Turns of each component in a period of the last weights, int64 `[components]`.
      period: Turns of all components in such a period.
    """

    def __init__(
        self,
        weights: Mapping[str, Weight],
        *,
        later_weights: Mapping[int, Mapping[str, Weight]] | None = None,
    ):
        """Assign the turns of all periods.

        Weights are kept exactly if their shares have a common denominator up to `LONGEST_PERIOD`,
        such as weights of at most four decimals that sum to 1. Others are rounded to multiples of
        `1 / LONGEST_PERIOD`. A linear change is a staircase of up to 64 steps, whose shares have a
        common denominator up to 4096, or are rounded.

        Args:
          weights: Weight of each component by name, in any unit. A pair changes linearly until the
            first position of `later_weights`.
          later_weights: Weights by the position from which they replace the weights before. A
            component without a weight has no turns, and goes on where it was when it has one again.

        Raises:
          ConfigError: There are no weights, positions do not increase, a weight is too small for
            one turn, or the last weights are pairs.
        """
        by_start = {0: weights, **(later_weights or {})}
        self.names = tuple(dict.fromkeys(name for part in by_start.values() for name in part))
        self._by_start = {
            start: {name: _pair(part.get(name, 0)) for name in self.names}
            for start, part in by_start.items()
        }
        self._pieces = _pieces(self._by_start)
        self.counts = np.array(self._pieces[-1].counts, np.int64)
        self.period = int(self.counts.sum())
        self._parts = _assign_turns(self._pieces)
        self._starts = np.array([part.start for part in self._parts])
        self._sizes = np.array([len(part.component) for part in self._parts])
        self._offsets = np.cumsum(self._sizes) - self._sizes
        self._done = np.stack([part.done for part in self._parts])
        self._gained = np.stack([part.gained for part in self._parts])
        self._component = np.concatenate([part.component for part in self._parts])
        self._number = np.concatenate([part.numbers() for part in self._parts])

    def turns(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Look up the turns at some positions.

        Args:
          positions: Zero-based numbers of turns, int `[positions]`.

        Returns:
          Index of the component, int32 `[positions]`, and zero-based number of the turn among the
          turns of that component, int64 `[positions]`.
        """
        positions = np.asarray(positions, np.int64)
        part = np.searchsorted(self._starts, positions, side="right") - 1
        periods, places = np.divmod(positions - self._starts[part], self._sizes[part])
        places += self._offsets[part]
        component = self._component[places]
        number = self._done[part, component] + periods * self._gained[part, component]
        return component, number + self._number[places]

    def identity(self, position: int = 0) -> dict[str, Any]:
        """Return what determines the turns before a position; later weights may change.

        It is `[name, count]` of each component of constant weights, in order, and the weights and
        the end of a linear change.
        """
        identity: dict[str, Any] = {}
        starts = [*self._by_start]
        for start, end in itertools.zip_longest(starts, starts[1:]):
            if start >= max(position, 1):
                break
            counts = next(piece.counts for piece in self._pieces if piece.start == start)
            turns = [[name, n] for name, n in zip(self.names, counts, strict=True) if n]
            pairs = self._by_start[start]
            if any(first != last for first, last in pairs.values()):
                turns = [[name, *map(float, pair)] for name, pair in pairs.items()] + [["end", end]]
            identity[f"turns from row {start}" if start else "turns"] = turns
        return identity

    def shares(self, position: int = 0) -> dict[str, float]:
        """Return the share of each component after rounding, at a position."""
        counts = [piece.counts for piece in self._pieces if piece.start <= position][-1]
        return {name: n / sum(counts) for name, n in zip(self.names, counts, strict=True)}


def _pair(weight: Weight) -> tuple[Fraction, Fraction]:
    pair = tuple(weight) if isinstance(weight, Sequence) else (weight, weight)
    require(len(pair) == 2, None, "weight", weight, "a number, or a pair: first and last weight")
    # The text of a float: 0.1 means one tenth, not the nearest double.
    first, last = (Fraction(repr(float(number))) for number in pair)
    return first, last


def _pieces(by_start: Mapping[int, Mapping[str, tuple[Fraction, Fraction]]]) -> list[_Piece]:
    """Return pieces with rounded shares, of which a linear change has up to 64."""
    pieces = []
    starts = [*by_start]
    for (start, pairs), end in itertools.zip_longest(by_start.items(), starts[1:]):
        size = 1 if end is None else end - start
        expected = f"positions that increase, but {end} follows {start}"
        require(size > 0, None, "later_weights", starts[1:], expected)
        changes = any(first != last for first, last in pairs.values())
        values = {name: [*map(float, pair)] for name, pair in pairs.items()}
        label = f"weights from position {start}"
        expected = "numbers, since no later weights end this linear change"
        require(end is not None or not changes, None, label, values, expected)
        num_steps = min(_NUM_CHANGE_STEPS, size) if changes else 1
        for step in range(num_steps):
            middle = Fraction(2 * step + 1, 2 * num_steps)
            weights = [first + (last - first) * middle for first, last in pairs.values()]
            is_valid = sum(weights) > 0 and min(weights) >= 0
            require(is_valid, None, label, values, "numbers from 0, not all 0")
            shares = [weight / sum(weights) for weight in weights]
            counts = _turns_per_period(shares, _CHANGE_PERIOD if changes else LONGEST_PERIOD)
            are_kept = changes or [n > 0 for n in counts] == [share > 0 for share in shares]
            shown, expected = [*map(float, shares)], f"at least one row in {sum(counts)}"
            require(are_kept, None, f"shares from row {start}", shown, expected)
            # Rounded to the nearest, since errors of rounding down would add up.
            begin = start + (2 * size * step + num_steps) // (2 * num_steps)
            pieces.append(_Piece(begin, counts, [not weight for weight in weights]))
    return pieces


def _turns_per_period(shares: Sequence[Fraction], longest: int) -> list[int]:
    """Return the turns of each component in a period of at most `longest` turns."""
    near = [share.limit_denominator(longest) for share in shares]
    period = math.lcm(*(share.denominator for share in near))
    is_close = all(abs(a - b) < 1e-12 for a, b in zip(near, shares, strict=True))
    if period > longest or not is_close or sum(near) != 1:
        period, near = longest, list(shares)
    counts = [int(share * period) for share in near]
    # The components that lost most by rounding down get the remaining turns.
    by_loss = sorted(range(len(near)), key=lambda i: counts[i] - near[i] * period)
    for index in by_loss[: period - sum(counts)]:
        counts[index] += 1
    return counts


class _Part(NamedTuple):
    """Turns that repeat until the next part.

    Attributes:
      start: Position of the first turn.
      component: Component of each turn, int32 `[turns]`.
      done: Turns of each component before the start, int64 `[components]`.
      gained: Turns of each component in `component`, int64 `[components]`.
    """

    start: int
    component: np.ndarray
    done: np.ndarray
    gained: np.ndarray

    def numbers(self) -> np.ndarray:
        """Return the number of each turn among the turns of its component, int32 `[turns]`."""
        numbers = np.empty(len(self.component), np.int32)
        order = np.argsort(self.component, kind="stable")
        numbers[order] = np.concatenate([np.arange(count) for count in self.gained])
        return numbers


def _assign_turns(pieces: Sequence[_Piece]) -> list[_Part]:
    """Return the turns of all pieces; those of the last part repeat for ever.

    A piece is periodic as soon as a period has given each component its turns, since the errors
    before and after it are equal.
    """
    steps = max(2 * len(pieces[0].counts) - 2, 1)
    unit = steps * math.lcm(*(sum(piece.counts) for piece in pieces))
    # Units of several weights may not fit into 64 bits.
    integer = np.dtype(np.int64 if unit < 1 << 40 else object)
    parts: list[_Part] = []
    # Turns that each component had, and by how much its share is above them, in 1 / unit.
    done = np.zeros(len(pieces[0].counts), np.int64)
    debt = done.astype(integer)
    ends = [*(piece.start for piece in pieces[1:]), _NEVER]
    for (position, counts, left_out), end in zip(pieces, ends, strict=True):
        rates = np.array(counts, integer) * (unit // sum(counts))
        while position < end:
            size = min(sum(counts), end - position)
            component = _assign_period(
                rates, debt, left_out, size=size, unit=unit, bound=unit - unit // steps
            )
            gained = np.bincount(component, minlength=len(counts))
            parts.append(_Part(position, component, done, gained))
            repeats = (gained == counts).all()
            if repeats and end == _NEVER:
                break
            times = (end - position) // size if repeats else 1
            position, done = position + times * size, done + times * gained
            debt = debt + times * (size * rates - gained.astype(integer) * unit)
    return parts


def _assign_period(
    rates: np.ndarray,
    debt: np.ndarray,
    left_out: Sequence[bool],
    *,
    size: int,
    unit: int,
    bound: int,
) -> np.ndarray:
    """Return the component of each turn of a period, int32 `[size]`.

    Each turn of a component has an earliest and a latest position, between which the component is
    off its share by no more than a bound. Tijdeman shows that a schedule exists for the bound
    1 - 1 / (2 components - 2). Earliest deadline first then finds one: each position goes to the
    turn with the earliest deadline among those whose earliest position has come.

    A component without weight may be behind its share by almost a turn. The turns that it lacks go
    to the others, those with the next earliest positions; it has them once it has a weight again.

    Args:
      rates: Shares of a turn in integers of 1 / `unit`, int64 `[components]`.
      debt: Shares minus turns before the period, in these integers.
      left_out: Whether each component has no weight, and so no turns.
      size: Number of turns.
      unit: Integers per turn.
      bound: Bound of the error, in these integers.
    """
    limits = ((debt + size * rates + bound) // unit).astype(np.int64).clip(0)
    limits = np.where(left_out, 0, limits + limits[left_out].sum() * (rates > 0))
    component = np.repeat(np.arange(len(limits)), limits)
    number = np.concatenate([np.arange(limit) for limit in limits]).astype(debt.dtype)
    rate, ahead = np.where(rates > 0, rates, unit)[component], number * unit - debt[component]
    earliest = (-(-(ahead + unit - bound) // rate) - 1).astype(np.int64)
    latest = np.where(rates[component] > 0, (ahead + bound) // rate, _NEVER)
    order = np.lexsort((component, earliest))
    waiting = collections.deque(
        zip(
            earliest[order].tolist(), latest[order].tolist(), component[order].tolist(), strict=True
        )
    )
    turns = np.empty(size, np.int32)
    possible: list[tuple[int, int]] = []
    for turn in range(size):
        while waiting and (waiting[0][0] <= turn or not possible):
            heapq.heappush(possible, waiting.popleft()[1:])
        turns[turn] = heapq.heappop(possible)[1]
    return turns
