from __future__ import annotations

import pytest

from layerkit_runner.errors import UsageError
from layerkit_runner.tools.plan.hardware import device_kind, parse_target


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
    result = parse_target(text)
    assert result.kind is device_kind(kind)
    assert (result.num_devices, result.num_slices) == (num_devices, num_slices)
    assert result.topology == topology
    assert parse_target(result.describe()) == result


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("h100x12", "number of h100 devices", 12),
        ("v5p:8x8", "--target", "v5p:8x8"),
        ("v5e:4x4*0", "--target", "v5e:4x4*0"),
        ("v5p", "--target", "v5p"),
        ("8", "--target", "8"),
        ("h10x8", "kind of device", "h10"),
    ],
)
def test_invalid_target_raises(raises, text, field, value):
    with raises(UsageError, field=field, value=value):
        parse_target(text)
