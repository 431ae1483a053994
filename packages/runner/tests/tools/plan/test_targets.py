from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerkit_runner.errors import UsageError
from layerkit_runner.tools.plan.hardware import device_kind
from layerkit_runner.tools.plan.targets import parse_target, sized, usual_topology


@pytest.mark.parametrize(
    ("text", "kind", "num_devices", "num_slices", "topology"),
    [
        ("cpu", "cpu", None, 1, ()),
        ("cpux256", "cpu", 256, 1, ()),
        ("h100", "h100", None, 1, ()),
        ("h100x256", "h100", 256, 32, ()),
        ("H100x8", "h100", 8, 1, ()),
        ("a100x4", "a100", 4, 1, ()),
        ("a100-40gbx16", "a100-40gb", 16, 2, ()),
        ("v5p:8x8x4", "v5p", 256, 1, (8, 8, 4)),
        ("v5e:4x4*2", "v5e", 32, 2, (4, 4)),
        # A chip of these is two devices, and two TensorCores.
        ("v7x:2x2x1", "v7x", 8, 1, (2, 2, 1)),
        ("tpu7x-128", "v7x", 128, 1, (4, 4, 4)),
        # Google Cloud counts TensorCores of v4 and v5p, and chips of the others.
        ("v4-8", "v4", 4, 1, (2, 2, 1)),
        ("v4-128", "v4", 64, 1, (4, 4, 4)),
        ("2xv4-128", "v4", 128, 2, (4, 4, 4)),
        ("v4-384", "v4", 192, 1, (4, 4, 12)),
        ("v5p-256", "v5p", 128, 1, (4, 4, 8)),
        ("v5p-768", "v5p", 384, 1, (4, 8, 12)),
        ("v5litepod-16", "v5e", 16, 1, (4, 4)),
        ("v6e-8", "v6e", 8, 1, (2, 4)),
        ("v6e-256", "v6e", 256, 1, (16, 16)),
    ],
)
def test_targets(text, kind, num_devices, num_slices, topology):
    found = parse_target(text)
    assert found.kind is device_kind(kind)
    assert (found.num_devices, found.num_slices) == (num_devices, num_slices)
    assert found.topology == topology
    assert parse_target(found.describe()) == found


def test_the_devices_of_this_machine():
    found = parse_target("here")
    assert found.is_here
    assert found.describe() == "here"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("h100x12", "12 devices are no whole number of nodes of 8; use 8 or 16"),
        ("h10x8", "no kind of device 'h10' is known; did you mean 'h100'?"),
        ("v5px8", "a TPU slice has a shape: v5p:4x4x4, or v5p-128 as Google Cloud names it"),
        ("v5p:8x8", "a slice of v5p has 3 dimensions of at least 1, as in v5p:4x4x4"),
        ("v5e:4x0", "a slice of v5e has 2 dimensions of at least 1, as in v5e:4x4"),
        ("v5e:4x4*0", "a plan needs at least 1 slice"),
        ("h100:8", "h100 has no topology; write h100x8 for eight of them"),
        ("v4-7", "the number in v4-7 counts TensorCores, two on each chip, so it is even"),
        ("v5e-12", "no slice of v5e has 12 chip(s); give its shape, as in v5e:4x4"),
        ("cpux0", "a plan needs at least 1 device"),
        ("8", "no form of a target. Targets: cpux8 (simulated), "),
        ("cpu8", "no kind of device 'cpu8' is known; did you mean 'cpu'?"),
    ],
)
def test_invalid_targets_are_rejected(text, problem):
    with pytest.raises(UsageError) as caught:
        parse_target(text)
    assert str(caught.value).startswith(f"--target={text}: {problem}")


@given(st.sampled_from(["v4", "v5e", "v5p", "v6e"]), st.integers(1, 4096))
def test_a_usual_topology_has_the_chips_that_were_asked_for(name, chips):
    kind = device_kind(name)
    try:
        found = usual_topology(kind, chips)
    except UsageError:
        # Powers of two are always to be had.
        assert chips & (chips - 1) != 0
        return
    assert math.prod(found) == chips
    assert len(found) == (2 if name in ("v5e", "v6e") else 3)


def test_a_target_for_a_mesh():
    found = sized(parse_target("v7x"), per_slice=8, num_slices=2)
    assert (found.topology, found.num_devices, found.num_slices) == ((2, 2, 1), 16, 2)
    with pytest.raises(UsageError, match="a chip of v7x is two devices, and 7 is odd"):
        sized(parse_target("v7x"), per_slice=7, num_slices=1)
