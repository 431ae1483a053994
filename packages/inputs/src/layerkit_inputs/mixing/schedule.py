"""MixingSchedule: whose turn it is, so that shares are kept at every moment.

Drawing a component at random for each row keeps the weights only in the long run: after 10,000 rows
a share of one half is off by 50 rows as often as not. Here turns are dealt out: after any number of
them, each component has had its share of them, give or take less than one; Tijdeman (1980), "The
chairman assignment problem", shows that this can be done.

The turns repeat after a period, so any turn is looked up: whose it is, and which of theirs.
"""

from __future__ import annotations

import collections
import heapq
import math
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from layerkit.near_names import near_names

LONGEST_PERIOD = 1 << 20
"""Turns after which a schedule repeats at the latest; weights are rounded to shares of as many."""


class MixingSchedule:
    """The turns of components with weights.

    >>> schedule = MixingSchedule({"web": 3, "books": 1})
    >>> component, number = schedule.turns(np.arange(8))
    >>> component.tolist(), number.tolist()
    ([0, 0, 1, 0, 0, 0, 1, 0], [0, 1, 0, 2, 3, 4, 1, 5])

    Attributes:
      names: The components.
      counts: int64 `[components]`: turns of each in a period.
      period: Turns of all in a period.
    """

    def __init__(self, weights: Mapping[str, float]):
        """Deals out the turns of one period.

        Weights whose shares have a common denominator up to `LONGEST_PERIOD` are kept exactly, such
        as all with four decimals or less that sum to 1; others are rounded to shares of it.

        Args:
          weights: Of each component, in any unit.

        Raises:
          ValueError: no weights, one that is not above 0, or one too small for a single turn.
        """
        self.names = tuple(weights)
        counts = _turns_per_period(weights)
        self.counts = np.array(counts, np.int64)
        self.period = sum(counts)
        self._component = _deal_out(counts)
        order = np.argsort(self._component, kind="stable")
        self._number = np.empty(self.period, np.int32)
        self._number[order] = _counted(counts)

    def turns(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Whose turns these are, int32 `[positions]`, and which of theirs, int64, from 0."""
        periods, places = np.divmod(np.asarray(positions, np.int64), self.period)
        component = self._component[places]
        return component, periods * self.counts[component] + self._number[places]

    def identity(self) -> list[list[Any]]:
        """What the turns follow from, as JSON values: names and counts, in order."""
        return [[name, count] for name, count in zip(self.names, self.counts.tolist(), strict=True)]

    def shares(self) -> dict[str, float]:
        """The share of each component as it is dealt out."""
        return {name: count / self.period for name, count in self.identity()}


def schedule_of(
    names: Iterable[str],
    weights: Mapping[str, float] | None,
    refuse: Callable[[str], ValueError],
) -> MixingSchedule:
    """The schedule of components with these names; without weights all have the same.

    Raises:
      ValueError: the weights are of others, or cannot be; made by `refuse`.
    """
    names = list(names)
    given = dict.fromkeys(names, 1) if weights is None else weights
    if not isinstance(given, Mapping):
        raise refuse(f"weights={given!r}; expected a dict of name -> weight.")
    for name in given:
        if name not in names:
            raise refuse(f"weights[{name!r}] is of no component{near_names(str(name), names)}")
    missing = [name for name in names if name not in given]
    if missing:
        raise refuse(f"weights has none for {missing}; expected one for every component.")
    try:
        return MixingSchedule({name: given[name] for name in names})
    except ValueError as error:
        raise refuse(str(error)) from None


def _turns_per_period(weights: Mapping[str, float]) -> list[int]:
    if not weights:
        raise ValueError("there are no weights; expected one for every component.")
    for name, weight in weights.items():
        is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not is_number or not math.isfinite(weight) or weight <= 0:
            raise ValueError(
                f"the weight of {name!r} is {weight!r}; expected a number above 0. Leave a "
                "component out to read nothing of it."
            )
    # 0.1 is meant as one tenth, not as the double next to it.
    written = [Fraction(repr(weight)) for weight in weights.values()]
    shares = [weight / sum(written) for weight in written]
    near = [share.limit_denominator(LONGEST_PERIOD) for share in shares]
    period = math.lcm(*(share.denominator for share in near))
    is_close = all(abs(a - b) < 1e-12 for a, b in zip(near, shares, strict=True))
    if period > LONGEST_PERIOD or not is_close or sum(near) != 1:
        period, near = LONGEST_PERIOD, shares
    counts = [int(share * period) for share in near]
    # What rounding down left over goes to those it took most from.
    by_loss = sorted(range(len(near)), key=lambda i: counts[i] - near[i] * period)
    for index in by_loss[: period - sum(counts)]:
        counts[index] += 1
    for name, count in zip(weights, counts, strict=True):
        if not count:
            raise ValueError(
                f"the weight of {name!r} is {weights[name]!r}, less than one row in "
                f"{LONGEST_PERIOD}; raise it, or leave the component out."
            )
    return counts


def _deal_out(counts: list[int]) -> np.ndarray:
    """Whose each turn of a period is: int32 `[period]`.

    The n-th turn of a component must not come so early that it is ahead of its share by more than
    the bound, nor so late that it is behind by more. Tijdeman shows that for the bound
    1 - 1 / (2 components - 2) all turns can be had in time; then they are where of those that may
    come the one that must come soonest always does.
    """
    sizes = np.array(counts, np.int64)
    period, steps = int(sizes.sum()), max(2 * len(counts) - 2, 1)
    component = np.repeat(np.arange(len(counts)), sizes)
    number = _counted(counts)
    # In whole numbers: the bound is (steps - 1) / steps, a share sizes / period.
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
    """0, 1, 2... for each component, one component after the other: int64 `[period]`."""
    return np.concatenate([np.arange(count) for count in counts])
