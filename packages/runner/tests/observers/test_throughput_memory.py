from __future__ import annotations

import jax
import numpy as np

from layerkit_runner.observers import memory_scalars


def test_cpu_reports_host_memory_only():
    assert jax.devices()[0].memory_stats() is None
    assert set(memory_scalars()) == {"memory/host_rss_bytes"}


def test_resident_memory_grows_by_allocated_bytes():
    before = memory_scalars()["memory/host_rss_bytes"]
    held = np.ones(200_000_000, np.uint8)
    after = memory_scalars()["memory/host_rss_bytes"]
    assert 0.9 * held.nbytes < after - before < 1.5 * held.nbytes


def test_device_memory_is_the_maximum_over_devices(monkeypatch):
    class Device:
        def __init__(self, in_use: int) -> None:
            self._in_use = in_use

        def memory_stats(self) -> dict[str, int]:
            return {"bytes_in_use": self._in_use, "peak_bytes_in_use": 2 * self._in_use}

    monkeypatch.setattr(jax, "local_devices", lambda: [Device(5), Device(7), Device(6)])
    scalars = memory_scalars()
    assert scalars["memory/device_bytes_in_use"] == 7
    assert scalars["memory/device_peak_bytes_in_use"] == 14
