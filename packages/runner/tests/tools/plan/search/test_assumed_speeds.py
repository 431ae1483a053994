from __future__ import annotations

import pytest

from layerkit_runner.tools.plan.bounds import DeviceWork, step_bounds
from layerkit_runner.tools.plan.collectives import Traffic
from layerkit_runner.tools.plan.hardware import KINDS, device_kind, kind_of_device
from layerkit_runner.tools.plan.search.assumed_speeds import TYPICAL, assumed_speeds

WORK = DeviceWork(flops=4e12, memory_bytes=9e9, fast_bytes=7e9, slow_bytes=3e8)
UNKNOWN = ["peak FLOP/s", "memory bandwidth", "bandwidth within a slice"]


def sums(count, num_bytes):
    return [Traffic("all-reduce", "data", count, num_bytes, is_exact=True)]


@pytest.mark.parametrize("name", ["v5e", "v5p", "v6e", "h100", "b200"])
def test_where_all_is_known_nothing_is_assumed(name):
    kind = device_kind(name)
    bounds = step_bounds(WORK, kind, model_flops_per_device=1.0, tokens=None)
    speeds = assumed_speeds(kind)
    both_ends = bounds.step_seconds + bounds.step_seconds_no_overlap
    assert speeds.order_seconds(WORK, sums(1000, 7e9)) == pytest.approx(both_ends, rel=1e-12)
    assert speeds.figures(bounds.unknown) == {}


def test_a_known_device_with_an_unknown_network_between_slices():
    kind = device_kind("v4")
    bounds = step_bounds(WORK, kind, model_flops_per_device=1.0, tokens=None)
    speeds = assumed_speeds(kind)
    assert speeds.figures(bounds.unknown) == {"bandwidth between slices": 1e10}
    without = bounds.step_seconds + bounds.step_seconds_no_overlap
    # 300 MB at 10 GB/s are told twice, since they take longer than the rest.
    assert bounds.step_seconds < 0.03
    told = speeds.order_seconds(WORK, sums(1000, 7e9))
    assert told == pytest.approx(without - bounds.step_seconds + 2 * 0.03)


def test_a_device_of_known_peak_and_unknown_network_sends_in_proportion():
    speeds = assumed_speeds(kind_of_device("NVIDIA H100 PCIe", platform="gpu"))
    assert speeds.peak_flops == 756e12
    assert speeds.fast_bandwidth / 756e12 == TYPICAL.fast_bandwidth / TYPICAL.peak_flops
    assert speeds.figures(UNKNOWN[1:]).keys() == {*UNKNOWN[1:], "latency"}


def test_work_that_devices_repeat_outweighs_what_they_do_not_send():
    # `vision.digits.Digits` on cpux2, as it was compiled: over `data`, and over `tensor`, which
    # splits next to nothing of it.
    speeds = assumed_speeds(device_kind("cpu"))
    shared, repeated = (
        speeds.order_seconds(DeviceWork(338e6, moved, sent, 0.0), sums(count, sent))
        for moved, sent, count in ((15.64e6, 861e3, 1), (22.65e6, 67e3, 5))
    )
    assert repeated > 1.2 * shared


def test_of_the_same_bytes_fewer_collectives_are_sooner_done():
    speeds = assumed_speeds(device_kind("cpu"))
    work = DeviceWork(338e6, 15.64e6, 861e3, 0.0)
    once, often = (speeds.order_seconds(work, sums(count, 861e3)) for count in (1, 21))
    assert often - once == pytest.approx(20 * speeds.latency)
    assert speeds.figures(UNKNOWN)["latency"] == speeds.latency > 0


def test_the_typical_device_lies_between_the_others():
    others = [kind for kind in KINDS if kind.peak_flops and kind is not TYPICAL]
    for figure in ("memory_bandwidth", "fast_bandwidth"):
        ratios = [kind.peak_flops / getattr(kind, figure) for kind in others]
        assert min(ratios) < TYPICAL.peak_flops / getattr(TYPICAL, figure) < max(ratios)
