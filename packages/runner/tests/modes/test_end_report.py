from __future__ import annotations

from layerkit_runner.modes.end_report import memory_lines


def test_memory_is_told_where_it_is_known():
    assert memory_lines({"memory/host_rss_bytes": 3e9}) == []
    scalars = {"memory/device_peak_bytes_in_use": 61.25e9, "memory/host_rss_bytes": 3e9}
    assert memory_lines(scalars) == ["memory: 61.25 GB at most on one device"]
