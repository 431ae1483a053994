"""`--mode=export` before it writes; the integration tests check the written folder."""

from __future__ import annotations

from typing import Any

from layerkit_runner.errors import UsageError
from layerkit_runner.run.export import run_export
from layerkit_runner.run_options import RunOptions


def test_export_without_a_folder_is_an_error(raises: Any):
    with raises(UsageError):
        run_export(None, RunOptions(job_log_dir="job"))  # type: ignore[arg-type]
