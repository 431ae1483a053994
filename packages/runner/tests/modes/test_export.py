"""`--mode=export` before it writes; the integration tests check the written folder."""

from __future__ import annotations

from typing import Any

import pytest

from layerkit_runner.config.flags import RunOptions, parse_flags
from layerkit_runner.errors import UsageError
from layerkit_runner.modes.export import run_export


def test_export_without_a_folder_is_an_error(raises: Any):
    with raises(UsageError):
        run_export(None, RunOptions(job_log_dir="job"))  # type: ignore[arg-type]


def test_export_dir_is_a_flag_of_the_mode():
    flags = parse_flags(["--exp=x", "--mode=export", "--export_dir=out", "--job_log_dir=job"])
    assert flags.options.export_dir == "out"
    with pytest.raises(UsageError):
        parse_flags(["--exp=x", "--export_dir=out", "--job_log_dir=job"])
