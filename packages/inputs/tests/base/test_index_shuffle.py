"""Index shuffles: permutations, place by place, that no simple test tells from random ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerkit_inputs.base.index_shuffle import _permuted, shuffled_rows, window_shuffled_rows

seeds = st.integers(0, 2**64 - 1)


def order(num_rows, *, seed=0, epoch=0, window=None):
    places = np.arange(num_rows)
    if window is None:
        return shuffled_rows(places, num_rows, seed=seed, epoch=epoch)
    return window_shuffled_rows(places, num_rows, window=window, seed=seed, epoch=epoch)


@given(num_rows=st.integers(1, 400), seed=seeds, epoch=seeds)
def test_each_row_comes_exactly_once(num_rows, seed, epoch):
    assert sorted(order(num_rows, seed=seed, epoch=epoch)) == list(range(num_rows))


@given(num_rows=st.integers(1, 300), window=st.integers(1, 320), seed=seeds, epoch=seeds)
def test_each_row_of_the_windows_comes_exactly_once(num_rows, window, seed, epoch):
    found = order(num_rows, seed=seed, epoch=epoch, window=window)
    assert sorted(found) == list(range(num_rows))
    for start in range(0, num_rows, window):
        rows = found[start : start + window]
        # Neighbors in storage, the last row being the first one's.
        gaps = np.diff(np.sort(rows), append=np.sort(rows)[0] + num_rows)
        assert np.sort(gaps)[:-1].tolist() == [1] * (len(rows) - 1)


@given(num_rows=st.integers(1, 2**62), seed=seeds, data=st.data())
def test_any_place_is_found_without_the_others(num_rows, seed, data):
    places = data.draw(st.lists(st.integers(0, num_rows - 1), min_size=1, max_size=5, unique=True))
    for window in (None, 1000):
        shuffled = shuffled_rows if window is None else window_shuffled_rows
        more = {} if window is None else {"window": window}
        rows = shuffled(np.array(places), num_rows, seed=seed, epoch=1, **more)
        assert len(set(rows.tolist())) == len(places)
        assert rows.min() >= 0 and rows.max() < num_rows
        last = shuffled(np.array(places[-1:]), num_rows, seed=seed, epoch=1, **more)
        assert last[0] == rows[-1]


def test_orders_stay_as_they_are():
    # A change would give runs that go on other data than before.
    assert order(10).tolist() == [6, 1, 4, 8, 3, 0, 7, 9, 5, 2]
    assert order(10, seed=1, epoch=3, window=4).tolist() == [0, 1, 9, 8, 2, 4, 3, 5, 7, 6]


def test_seeds_and_epochs_have_orders_of_their_own():
    for window in (None, 8):
        orders = {
            tuple(order(50, seed=seed, epoch=epoch, window=window))
            for seed in (0, 1, 2)
            for epoch in (0, 1, 2)
        }
        assert len(orders) == 9


NUM_ORDERS = 20_000


def many_orders(num_rows):
    """Orders under keys of their own, `[orders, num_rows]`; epochs have such keys, and windows."""
    keys = np.random.default_rng(0).integers(2**64, size=(8, NUM_ORDERS), dtype=np.uint64)
    columns = [_permuted(np.full(NUM_ORDERS, n), num_rows, keys) for n in range(num_rows)]
    return np.stack(columns, axis=1)


def excess(counts):
    """By how many standard deviations chi-square is above its mean, all cells being as likely."""
    expected = np.mean(counts)
    degrees = np.size(counts) - 1
    return (np.sum((counts - expected) ** 2 / expected) - degrees) / math.sqrt(2 * degrees)


@pytest.mark.parametrize("num_rows", [3, 4, 5, 6])
def test_all_orders_of_few_rows_come_equally_often(num_rows):
    codes = many_orders(num_rows) @ num_rows ** np.arange(num_rows)
    counts = np.unique(codes, return_counts=True)[1]
    assert len(counts) == math.factorial(num_rows)
    assert abs(excess(counts)) < 4


@pytest.mark.parametrize("num_rows", [7, 16, 33])
def test_every_row_comes_to_every_place_and_after_every_other_equally_often(num_rows):
    orders = many_orders(num_rows)
    for place in range(0, num_rows - 1, 4):
        assert abs(excess(np.bincount(orders[:, place], minlength=num_rows))) < 4
        steps = (orders[:, place + 1] - orders[:, place]) % num_rows
        assert abs(excess(np.bincount(steps, minlength=num_rows)[1:])) < 4


def test_windows_are_shuffled_each_in_its_own_way():
    found = order(5 * NUM_ORDERS, window=5).reshape(NUM_ORDERS, 5)
    first = np.min(found, axis=1, keepdims=True)
    inside = np.max(found - first, axis=1) == 4  # all but the window around the end of the data
    codes = (found - first)[inside] @ 5 ** np.arange(5)
    assert abs(excess(np.unique(codes, return_counts=True)[1])) < 4
    # And so are the windows themselves: each tenth of the epoch has some of each tenth of the data.
    tenths = np.histogram2d(first[:, 0], np.arange(NUM_ORDERS), bins=10)[0]
    assert abs(excess(tenths)) < 4


def test_neighbors_of_many_rows_are_spread_over_all_of_them():
    rows = shuffled_rows(np.arange(100_000), 2**40 + 12345, seed=3, epoch=0)
    counts = np.histogram(rows, bins=100, range=(0, 2**40 + 12345))[0]
    assert abs(excess(counts)) < 4
