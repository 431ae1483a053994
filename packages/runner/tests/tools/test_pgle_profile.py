"""Errors of the conversion of traces; a conversion needs timings of a GPU."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from etils import epath

from layerkit_runner.errors import UsageError
from layerkit_runner.tools.pgle_profile import main, read_profile


def test_folder_without_a_trace_is_an_error(raises, tmp_path: Path):
    with raises(UsageError, owner=str(tmp_path), value=0):
        read_profile(epath.Path(tmp_path))


def test_trace_of_other_devices_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with jax.profiler.trace(tmp_path):
        jax.block_until_ready(jnp.ones(3) + 1)
    assert main([str(tmp_path), str(tmp_path / "steps.pb")]) == 2
    assert "no timings of GPU operations" in capsys.readouterr().err
    assert not (tmp_path / "steps.pb").exists()
