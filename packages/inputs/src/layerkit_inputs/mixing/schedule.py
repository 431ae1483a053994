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
from collections.abc import Mapping
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

    def identity(self) -> list[list[Any]]:
        """Return `[name, count]` of each component in order, which determine the schedule."""
        return [[name, count] for name, count in zip(self.names, self.counts.tolist(), strict=True)]

    def shares(self) -> dict[str, float]:
        """Return the share of each component after rounding."""
        return {name: count / self.period for name, count in self.identity()}


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
