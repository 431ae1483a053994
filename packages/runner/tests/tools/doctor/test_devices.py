from __future__ import annotations

from typing import Any

import jax

from layerkit_runner.tools.doctor import devices


def test_working_devices_have_no_problems():
    found = devices.check_devices()
    assert found.values["platform"] == "cpu"
    assert [each["id"] for each in found.values["devices"]] == list(range(8))
    assert not found.problems


def test_unused_gpus_are_reported(tmp_path, monkeypatch):
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(devices, "_NVIDIA_GPUS", f"{tmp_path}/*")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    [problem] = devices.check_devices().problems
    assert not problem.fails and "2 NVIDIA GPU(s), and JAX_PLATFORMS=cpu hides" in problem.what
    monkeypatch.delenv("JAX_PLATFORMS")
    [problem] = devices.check_devices().problems
    assert problem.fails and "layerkit-runner[cuda]" in problem.to_do


def test_device_that_multiplies_wrongly_is_reported(monkeypatch):
    right = devices._product
    bad = jax.devices()[3]

    def flips_a_bit(left: jax.Array, right_: jax.Array) -> jax.Array:
        result = right(left, right_)
        return result.at[5, 5].add(1.0) if left.devices() == {bad} else result

    monkeypatch.setattr(devices, "_product", flips_a_bit)
    [problem] = devices.check_devices().problems
    assert problem.fails and problem.what == "Device 3 multiplies matrices wrongly."


def test_wrong_sum_over_devices_is_found(monkeypatch):
    monkeypatch.setattr(devices, "_BYTES_ON_CPU", 4096)
    found = devices.check_collectives()
    assert found.values["psum"]["is_right"]
    assert found.values["psum"]["bytes_per_second"] > 0
    assert not found.problems
    right = jax.lax.psum

    def sums_too_little(row: jax.Array, axis_name: str) -> Any:
        return right(row - 1, axis_name)

    monkeypatch.setattr(jax.lax, "psum", sums_too_little)
    found = devices.check_collectives()
    assert [problem.what for problem in found.problems] == [
        "psum over the 8 devices gives wrong numbers."
    ]
