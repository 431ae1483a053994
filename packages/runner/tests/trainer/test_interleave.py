"""Whose turn a step is."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerkit_runner.trainer import TrainPrograms

TURNS = st.lists(st.integers(1, 7), min_size=1, max_size=5)


@given(turns=TURNS)
def test_turns_come_round(turns: list[int]):
    # Of a program nothing but its number of steps counts here.
    listed = [SimpleNamespace(steps=steps) for steps in turns]
    programs = TrainPrograms(listed, max_inflight_steps=1)
    rounds = itertools.cycle([p for p in listed for _ in range(p.steps)])
    for step, expected in zip(range(1, 40), rounds, strict=False):
        assert programs.of_step(step) is expected
    assert programs.num_turn_steps == sum(turns)
    assert sum(programs.share(each) for each in listed) == pytest.approx(1)
