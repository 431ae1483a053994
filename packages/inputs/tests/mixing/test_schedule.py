from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerkit.errors import ConfigError
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


def random_pieces(random):
    """Return (weights, number of turns) of up to four pieces, whose weights may change."""
    pieces = []
    for size in random.integers(1, [300, 20, 3, 300])[: random.integers(1, 5)]:
        pairs = {
            name: random.integers(1, 10, 2).tolist() for name in random.permutation([*"abcdef"])
        }
        names = [*pairs][: random.integers(1, 7)]
        linear = random.random(len(names)) < 0.5
        pieces.append(
            (
                {n: pairs[n] if x else pairs[n][0] for n, x in zip(names, linear, strict=True)},
                int(size),
            )
        )
    return pieces


@pytest.mark.parametrize("seed", range(30))
def test_errors_stay_near_one_turn_across_changes(seed):
    pieces = [*random_pieces(np.random.default_rng(seed)), ({"a": 1, "b": 2}, 100)]
    starts = np.cumsum([0, *(size for _, size in pieces)]).tolist()
    weights = [weights for weights, _ in pieces]
    schedule = MixingSchedule(
        weights[0], later_weights=dict(zip(starts[1:], weights[1:], strict=False))
    )
    exact = []
    for now, size in pieces:
        pairs = np.array([np.broadcast_to(now.get(name, 0), 2) for name in schedule.names])
        part = (np.arange(size)[:, None] + 0.5) / size  # the middle of each turn
        values = pairs[:, 0] * (1 - part) + pairs[:, 1] * part
        exact.append(values / values.sum(axis=1, keepdims=True))
    shares = np.concatenate(exact)
    rounded = np.array([[*schedule.shares(n).values()] for n in range(len(shares))])
    # The staircase and the rounding of a linear change.
    assert np.abs(np.cumsum(shares - rounded, axis=0)).max() < 0.25
    component, number = schedule.turns(np.arange(len(shares)))
    turns = np.cumsum(np.eye(len(schedule.names))[component], axis=0)
    errors = np.abs(turns - np.cumsum(rounded, axis=0)).max(axis=1)
    # Turns do not depend on later weights, so the error may pass one turn after a change.
    is_constant = not any(isinstance(weight, list) for weight in weights[0].values())
    assert errors[: starts[1] if is_constant else 1].max() < 1 and errors.max() < 1.5
    for index in range(len(schedule.names)):
        of_component = number[component == index]
        assert of_component.tolist() == list(range(len(of_component)))


def test_component_that_is_left_out_has_no_turns_and_later_those_it_lacks():
    """After two turns, docs lacks 2/3 of a turn, so it has the first one after turn 8."""
    two, three = {"web": 1, "code": 1}, {"web": 1, "code": 1, "docs": 1}
    schedule = MixingSchedule(three, later_weights={2: two, 8: three})
    component, _ = schedule.turns(np.arange(14))
    assert component.tolist() == [0, 1] * 4 + [2, 0, 1] * 2


@given(data=st.data())
def test_components_have_turns_only_where_they_have_weights(data):
    names = [*"abcd"][: data.draw(st.integers(2, 4))]
    some = st.dictionaries(st.sampled_from(names), st.integers(1, 5), min_size=1)
    pieces = data.draw(st.lists(st.tuples(st.integers(1, 40), some), min_size=1, max_size=5))
    starts = np.cumsum([size for size, _ in pieces]).tolist()
    later = dict(zip(starts, (weights for _, weights in pieces), strict=True))
    schedule = MixingSchedule(dict.fromkeys(names, 1), later_weights=later)
    component, number = schedule.turns(np.arange(starts[-1] + 60))
    given_so_far = np.cumsum(np.eye(len(names))[component], axis=0)
    for start, stop in zip(starts, [*starts[1:], len(component)], strict=True):
        left_out = [n not in later[start] for n in names]
        assert not np.diff(given_so_far[start - 1 : stop], axis=0)[:, left_out].any()
    shares = np.array([[*schedule.shares(n).values()] for n in range(len(component))])
    assert np.abs(given_so_far - np.cumsum(shares, axis=0)).max() < 2
    for index in range(len(names)):
        turns = number[component == index]
        assert turns.tolist() == list(range(len(turns)))


def test_long_pieces_are_looked_up_without_the_turns_before():
    later = {10**9: {"a": [0.7, 0.2], "b": [0.3, 0.8]}, 2 * 10**9: {"a": 0.2, "b": 0.8}}
    schedule = MixingSchedule({"a": 0.7, "b": 0.3}, later_weights=later)
    assert schedule._component.size < 1e6
    shares = {10**9: 0.7, 2 * 10**9: 0.575, 10**12: 0.20075}
    for position, share in shares.items():
        component, number = schedule.turns(np.arange(position - 200, position))
        before = number[component == 0][-1] + 1
        assert before == pytest.approx(share * position, rel=1e-6)


def test_turns_and_identity_before_a_change_do_not_depend_on_it():
    weights, position = {"a": 3, "b": 2, "c": 1}, 43
    plain = MixingSchedule(weights)
    later = MixingSchedule(weights, later_weights={position: {"c": [1, 5]}, 99: {"a": 1}})
    places = np.arange(position)
    for one, other in zip(plain.turns(places), later.turns(places), strict=True):
        np.testing.assert_array_equal(one, other)
    assert plain.identity(position) == later.identity(position)
    assert plain.identity(position + 1) != later.identity(position + 1)


@pytest.mark.parametrize(
    ("later", "message"),
    [
        ({5: {"a": 1}, 3: {"a": 2}}, "positions that increase"),
        ({5: {"a": [1, 2]}}, "no later weights end this linear change"),
        ({5: {"a": 0, "b": 0}}, "not all 0"),
        ({5: {"a": -1, "b": 2}}, "numbers from 0"),
        ({5: {"a": [1, 2, 3]}}, "first and last weight"),
        ({5: {"a": 1e-9, "b": 1}}, "at least one row in"),
    ],
)
def test_errors_name_the_weights_of_a_change(later, message):
    with pytest.raises(ConfigError, match=message):
        MixingSchedule({"a": 1, "b": 1}, later_weights=later)
