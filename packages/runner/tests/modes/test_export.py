"""What `--mode=export` does before it writes; the integration tests look at what it writes."""

from __future__ import annotations

import pytest

from layerkit_runner.config.flags import RunOptions, parse_flags
from layerkit_runner.errors import UsageError
from layerkit_runner.modes.export import run_export


def test_export_needs_a_folder():
    with pytest.raises(UsageError, match="--mode=export needs a folder to write: --export_dir=DIR"):
        run_export(None, RunOptions(job_log_dir="job"))  # type: ignore[arg-type]


def test_the_folder_belongs_to_the_mode():
    flags = parse_flags(["--exp=x", "--mode=export", "--export_dir=out", "--job_log_dir=job"])
    assert flags.options.export_dir == "out"
    with pytest.raises(
        UsageError, match="--export_dir belongs to --mode=export, and the mode is t"
    ):
        parse_flags(["--exp=x", "--export_dir=out", "--job_log_dir=job"])
