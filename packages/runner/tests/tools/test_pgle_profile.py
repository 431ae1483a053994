"""What is refused; timings themselves need a GPU."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from layerkit_runner.tools.pgle_profile import main


def test_a_folder_without_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(tmp_path), str(tmp_path / "steps.pb")]) == 2
    expected = f"pgle_profile: {tmp_path} holds 0 traces (plugins/profile/*/*.xplane.pb); expected"
    assert capsys.readouterr().err == f"{expected} one\n"


def test_a_trace_of_other_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with jax.profiler.trace(tmp_path):
        jax.block_until_ready(jnp.ones(3) + 1)
    assert main([str(tmp_path), str(tmp_path / "steps.pb")]) == 2
    told = capsys.readouterr().err
    assert told == f"pgle_profile: {tmp_path} holds no timings of GPU operations\n"
    assert not (tmp_path / "steps.pb").exists()
