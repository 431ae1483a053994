from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerkit_runner.errors import UsageError
from layerkit_runner.tools.plan.hardware import device_kind, parse_target, sized, usual_topology


@pytest.mark.parametrize(
    ("text", "kind", "num_devices", "num_slices", "topology"),
    [
        ("cpux256", "cpu", 256, 1, ()),
        ("h100x256", "h100", 256, 32, ()),
        ("a100x4", "a100", 4, 1, ()),
        ("v5p:8x8x4", "v5p", 256, 1, (8, 8, 4)),
        ("v5e:4x4*2", "v5e", 32, 2, (4, 4)),
        # A chip of these is two devices.
        ("v7x:2x2x1", "v7x", 8, 1, (2, 2, 1)),
    ],
)
def test_target_is_parsed(text, kind, num_devices, num_slices, topology):
    found = parse_target(text)
    assert found.kind is device_kind(kind)
    assert (found.num_devices, found.num_slices) == (num_devices, num_slices)
    assert found.topology == topology
    assert parse_target(found.describe()) == found


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("h100x12", "--target", "h100x12"),
        ("v5p:8x8", "--target", "v5p:8x8"),
        ("v5e:4x4*0", "--target", "v5e:4x4*0"),
        ("v4-7", "--target", "v4-7"),
        ("8", "--target", "8"),
        ("h10x8", "kind of device", "h10"),
    ],
)
def test_invalid_target_raises(raises, text, field, value):
    with raises(UsageError, field=field, value=value):
        parse_target(text)


@given(st.sampled_from(["v4", "v5e", "v5p", "v6e"]), st.integers(1, 4096))
def test_usual_topology_has_the_given_number_of_chips(name, chips):
    kind = device_kind(name)
    try:
        found = usual_topology(kind, chips)
    except UsageError:
        # A topology exists for each power of two.
        assert chips & (chips - 1) != 0
        return
    assert math.prod(found) == chips
    assert len(found) == (2 if name in ("v5e", "v6e") else 3)


def test_target_gets_the_size_of_a_mesh(raises):
    found = sized(parse_target("v7x"), 16, num_slices=2)
    assert (found.topology, found.num_devices, found.num_slices) == ((2, 2, 1), 16, 2)
    with raises(UsageError, owner="--target=v7x", field="devices of the mesh", value=7):
        sized(parse_target("v7x"), 7, num_slices=1)
