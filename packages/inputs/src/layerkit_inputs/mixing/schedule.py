"""A deterministic schedule of components by weights, which keeps the shares at every position.

Random draws keep the weights only in the long run: after 10,000 rows a share of one half is off by
50 rows as often as not. This schedule assigns turns: after any number of turns, each component has
had its share of them, with an error below one turn. Tijdeman (1980), "The chairman assignment
problem", proves that such a schedule exists.

The schedule is periodic, so the component of any turn is a table lookup.
"""

from __future__ import annotations

import collections
import heapq
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from layerkit.config.checks import require

LONGEST_PERIOD = 1 << 20
"""Largest period of a schedule in turns; weights are rounded to shares of that many turns."""


class MixingSchedule:
    """Periodic turns of components, in proportion to their weights.

    >>> schedule = MixingSchedule({"web": 3, "books": 1})
    >>> component, number = schedule.turns(np.arange(8))
    >>> component.tolist(), number.tolist()
    ([0, 0, 1, 0, 0, 0, 1, 0], [0, 1, 0, 2, 3, 4, 1, 5])

    Attributes:
      names: Names of the components.
      counts: Turns of each component in a period, int64 `[components]`.
      period: Turns of all components in a period.
    """

    def __init__(self, weights: Mapping[str, float]):
        """Assign the turns of one period.

        Weights are kept exactly if their shares have a common denominator up to `LONGEST_PERIOD`,
        such as weights of at most four decimals that sum to 1. Others are rounded to multiples of
        `1 / LONGEST_PERIOD`.

        Args:
          weights: Weight of each component by name, in any unit.

        Raises:
          ConfigError: There are no weights, or a weight is not above 0 or too small for one turn.
        """
        self.names = tuple(weights)
        counts = _turns_per_period(weights)
        self.counts = np.array(counts, np.int64)
        self.period = sum(counts)
        self._component = _assign_turns(counts)
        order = np.argsort(self._component, kind="stable")
        self._number = np.empty(self.period, np.int32)
        self._number[order] = _counted(counts)

    def turns(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Look up the turns at some positions.

        Args:
          positions: Zero-based numbers of turns, int `[positions]`.

        Returns:
          Index of the component, int32 `[positions]`, and zero-based number of the turn among the
          turns of that component, int64 `[positions]`.
        """
        periods, places = np.divmod(np.asarray(positions, np.int64), self.period)
        component = self._component[places]
        return component, periods * self.counts[component] + self._number[places]

    def counts_before(self, position: int) -> np.ndarray:
        """Return the number of turns of each component before a position, int64 `[components]`."""
        periods, place = divmod(position, self.period)
        rest = np.bincount(self._component[:place], minlength=len(self.counts))
        return periods * self.counts + rest

    def identity(self) -> list[list[Any]]:
        """Return `[name, count]` of each component in order, which determine the schedule."""
        return [[name, count] for name, count in zip(self.names, self.counts.tolist(), strict=True)]

    def shares(self) -> dict[str, float]:
        """Return the share of each component after rounding."""
        return {name: count / self.period for name, count in self.identity()}


class PiecewiseSchedule:
    """Turns of components whose weights change at some positions.

    Each component goes on with the number after its last turn in the piece before.

    Attributes:
      names: Names of all components.
      pieces: Schedule of the components that have turns, by the first position of its piece.
    """

    def __init__(self, names: Sequence[str], pieces: Mapping[int, MixingSchedule]):
        """Count the turns before each piece; the first piece begins at position 0."""
        self.names = tuple(names)
        self.pieces = dict(sorted(pieces.items()))
        self._begins = np.array([*self.pieces], np.int64)
        # Index in `names` of each component of a piece, and its turns before the piece.
        self._indices = [
            np.array([self.names.index(name) for name in piece.names])
            for piece in self.pieces.values()
        ]
        self._before = np.zeros((len(pieces), len(names)), np.int64)
        for number, piece in enumerate([*self.pieces.values()][:-1]):
            size = int(self._begins[number + 1] - self._begins[number])
            self._before[number + 1] = self._before[number]
            self._before[number + 1][self._indices[number]] += piece.counts_before(size)

    def turns(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Look up the turns at some positions; see `MixingSchedule.turns`."""
        positions = np.asarray(positions, np.int64)
        places = self._begins.searchsorted(positions, side="right") - 1
        component, turn = np.empty(len(positions), np.int32), np.empty(len(positions), np.int64)
        pieces = [*self.pieces.values()]
        for number in np.unique(places).tolist():
            here = places == number
            index, turn[here] = pieces[number].turns(positions[here] - self._begins[number])
            component[here] = self._indices[number][index]
        turn += self._before[places, component]
        return component, turn

    def identity(self, position: int) -> dict[str, Any]:
        """Return what determines the turns before a position; later pieces may change."""
        begun = {at: p.identity() for at, p in self.pieces.items() if at < max(position, 1)}
        return {f"turns from row {at}" if at else "turns": turns for at, turns in begun.items()}


def _turns_per_period(weights: Mapping[str, float]) -> list[int]:
    # The text of a float: 0.1 means one tenth, not the nearest double.
    written = [Fraction(repr(float(weight))) for weight in weights.values()]
    shares = [weight / sum(written) for weight in written]
    near = [share.limit_denominator(LONGEST_PERIOD) for share in shares]
    period = math.lcm(*(share.denominator for share in near))
    is_close = all(abs(a - b) < 1e-12 for a, b in zip(near, shares, strict=True))
    if period > LONGEST_PERIOD or not is_close or sum(near) != 1:
        period, near = LONGEST_PERIOD, shares
    counts = [int(share * period) for share in near]
    # The components that lost most by rounding down get the remaining turns.
    by_loss = sorted(range(len(near)), key=lambda i: counts[i] - near[i] * period)
    for index in by_loss[: period - sum(counts)]:
        counts[index] += 1
    for name, count in zip(weights, counts, strict=True):
        expected = f"a share of at least one row in {LONGEST_PERIOD}"
        require(count > 0, None, f"weights[{name!r}]", weights[name], expected)
    return counts


def _assign_turns(counts: list[int]) -> np.ndarray:
    """Return the component of each turn of a period, int32 `[period]`.

    Each turn of a component has an earliest and a latest position, between which the component is
    off its share by no more than a bound. Tijdeman shows that a schedule exists for the bound
    1 - 1 / (2 components - 2). Earliest deadline first then finds one: each position goes to the
    turn with the earliest deadline among those whose earliest position has come.
    """
    sizes = np.array(counts, np.int64)
    period, steps = int(sizes.sum()), max(2 * len(counts) - 2, 1)
    component = np.repeat(np.arange(len(counts)), sizes)
    number = _counted(counts)
    # In integers: the bound is (steps - 1) / steps, and a share is sizes / period.
    width = steps * sizes[component]
    earliest = -(-(number * steps + 1) * period // width) - 1
    latest = (number * steps + steps - 1) * period // width
    order = np.lexsort((component, earliest))
    waiting = collections.deque(
        zip(
            earliest[order].tolist(), latest[order].tolist(), component[order].tolist(), strict=True
        )
    )
    turns = np.empty(period, np.int32)
    possible: list[tuple[int, int]] = []
    for turn in range(period):
        while waiting and waiting[0][0] <= turn:
            heapq.heappush(possible, waiting.popleft()[1:])
        turns[turn] = heapq.heappop(possible)[1]
    return turns


def _counted(counts: list[int]) -> np.ndarray:
    """Return 0, 1, …, count - 1 of each component, concatenated: int64 `[period]`."""
    return np.concatenate([np.arange(count) for count in counts])
