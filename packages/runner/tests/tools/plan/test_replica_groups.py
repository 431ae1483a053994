from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerkit_runner.tools.plan.collectives import axes_of_groups, axes_of_pairs, parse_groups

MESH = {"data": 2, "fsdp": 2, "tensor": 2}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{0,2},{1,3}}", [[0, 2], [1, 3]]),
        ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("[4,2]<=[8]", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        # [0 1 2 3; 4 5 6 7] transposed, then cut in pairs.
        ("[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_1'}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh[a=4,b=2] {b}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        # Device 2·j + i stands at place (i, j).
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("mesh['a'=2,'b'=2], device_ids=(0,3,1,2) {'a'}", [[0, 1], [3, 2]]),
        # Axis a is seen as [2, 4]; its second factor alone runs within halves.
        ("mesh['a'=8] {'a':(2)4}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['a'=8] {'a':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        # First and last factor of [2, 2, 2]: bits 4 and 1.
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("mesh['a'=1,'b'=8] {'a','b'}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
    ],
)
def test_all_forms_of_groups_are_read(text, expected):
    assert parse_groups(text, num_devices=8) == expected


@pytest.mark.parametrize("text", ["mesh['a'=8]", "[2,4]<=", "everyone"])
def test_an_unknown_form_is_named(text):
    with pytest.raises(ValueError, match="is of no known form"):
        parse_groups(text, num_devices=8)


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ([[0, 1], [2, 3], [4, 5], [6, 7]], "tensor"),
        ([[0, 2], [1, 3], [4, 6], [5, 7]], "fsdp"),
        ([[4, 0], [1, 5], [6, 2], [3, 7]], "data"),
        ([[0, 2, 4, 6], [1, 3, 5, 7]], "data+fsdp"),
        ([[0, 1, 4, 5], [2, 3, 6, 7]], "data+tensor"),
        ([[0, 1, 2, 3, 4, 5, 6, 7]], "data+fsdp+tensor"),
        ([[0, 3], [1, 2], [4, 7], [5, 6]], "mixed"),  # two coordinates differ, two of four members
        ([[0, 1], [2, 6], [4, 5], [3, 7]], "mixed"),  # tensor in some groups, data in others
        ([[0, 1, 2], [3, 4, 5, 6, 7]], "mixed"),
    ],
)
def test_groups_are_named_by_the_axes_they_span(groups, axes):
    assert axes_of_groups(groups, MESH) == axes


def test_part_of_an_axis_is_no_axis():
    assert axes_of_groups([[0, 1], [2, 3]], {"fsdp": 4}) == "mixed"


def test_axes_of_size_one_are_never_named():
    assert axes_of_groups([[0, 1], [2, 3]], {"data": 2, "fsdp": 1, "tensor": 2}) == "tensor"


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_every_set_of_axes_is_found_again(sizes, data):
    mesh = {f"axis{i}": size for i, size in enumerate(sizes)}
    chosen = data.draw(st.sets(st.sampled_from(range(len(sizes)))))
    kept = [axis for axis in range(len(sizes)) if axis not in chosen]
    members = math.prod(sizes[axis] for axis in chosen)
    order = [*kept, *sorted(chosen)]
    groups = np.arange(math.prod(sizes)).reshape(sizes).transpose(order).reshape(-1, members)
    expected = "+".join(f"axis{axis}" for axis in sorted(chosen) if sizes[axis] > 1)
    assert axes_of_groups(groups, mesh) == expected

    # The same groups, as XLA writes a transposed range.
    numbers = [",".join(map(str, part)) for part in (groups.shape, sizes, order)]
    text = f"[{numbers[0]}]<=[{numbers[1]}]T({numbers[2]})"
    assert parse_groups(text, num_devices=math.prod(sizes)) == groups.tolist()


def test_pairs_are_named_by_the_axes_along_which_they_move():
    assert axes_of_pairs([(0, 2), (2, 0), (1, 3), (3, 1)], MESH) == "fsdp"
    assert axes_of_pairs([(2, 4), (3, 5), (4, 2), (5, 3)], MESH) == "data+fsdp"
