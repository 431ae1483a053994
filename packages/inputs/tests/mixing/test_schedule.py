from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerkit_inputs.mixing.schedule import LONGEST_PERIOD, MixingSchedule

some_weights = st.lists(st.integers(1, 60), min_size=1, max_size=7).map(
    lambda weights: {f"c{number}": weight for number, weight in enumerate(weights)}
)


@given(weights=some_weights)
def test_every_prefix_keeps_the_shares_within_one_turn(weights):
    schedule = MixingSchedule(weights)
    positions = np.arange(2 * schedule.period)
    component, number = schedule.turns(positions)
    given_so_far = np.cumsum(np.eye(len(weights))[component], axis=0)
    shares = np.array(list(weights.values())) / sum(weights.values())
    assert np.abs(given_so_far - np.outer(positions + 1, shares)).max() < 1
    for index in range(len(weights)):
        turns = number[component == index]
        assert turns.tolist() == list(range(len(turns)))


@given(weights=some_weights, positions=st.lists(st.integers(0, 10**12), min_size=1, max_size=5))
def test_mixing_order_repeats_after_a_period(weights, positions):
    schedule = MixingSchedule(weights)
    component, number = schedule.turns(np.array(positions))
    for position, index, turn in zip(positions, component, number, strict=True):
        first, first_turn = schedule.turns(np.array([position % schedule.period]))
        assert index == first[0]
        passed = position // schedule.period * schedule.counts[index]
        assert turn == passed + first_turn[0]


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ({"a": 0.7, "b": 0.2, "c": 0.1}, [7, 2, 1]),
        ({"a": 1 / 3, "b": 2 / 3}, [1, 2]),
        ({"a": 20, "b": 30}, [2, 3]),
        ({"a": 0.1234, "b": 0.8766}, [617, 4383]),
        ({"only": 5.0}, [1]),
        ({"a": 1e-5, "b": 1 - 1e-5}, [1, 99_999]),
    ],
)
def test_counts_are_exact_if_shares_have_a_common_denominator(weights, counts):
    assert MixingSchedule(weights).counts.tolist() == counts


def test_counts_are_rounded_to_the_longest_period():
    weights = {"a": 0.5772156649, "b": 0.6931471806, "c": 0.00001}
    schedule = MixingSchedule(weights)
    assert schedule.period == LONGEST_PERIOD == schedule.counts.sum()
    for name, share in schedule.shares().items():
        assert abs(share - weights[name] / sum(weights.values())) < 1 / LONGEST_PERIOD
