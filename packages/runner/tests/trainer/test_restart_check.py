"""A job that has lost its checkpoints starts from scratch only where that is allowed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from etils import epath

from layerkit_runner.errors import UsageError
from layerkit_runner.trainer.job_folder import (
    FILE_NAME,
    check_restart,
    forget_checkpoint,
    record_checkpoint,
)


@pytest.fixture
def check(tmp_path: Path) -> Callable[..., list[str]]:
    def call(*, is_allowed: bool = False) -> list[str]:
        lines: list[str] = []
        folder = epath.Path(tmp_path)
        check_restart(folder, folder / "checkpoints", is_allowed=is_allowed, report=lines.append)
        return lines

    return call


def test_job_that_never_saved_starts(tmp_path: Path, check: Callable[..., list[str]]):
    # What a run leaves that is killed before or inside its first save.
    (tmp_path / "metrics.jsonl").write_text('{"step": 120, "loss": 1.0}\n')
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "checkpoints/checkpoint_00000010.orbax-checkpoint-tmp").mkdir(parents=True)
    assert check() == []


@pytest.mark.parametrize("content", ['{"step": 120}', "", "[]"])
def test_recorded_checkpoint_that_is_missing_is_an_error(
    raises: Any, tmp_path: Path, check: Callable[..., list[str]], content: str
):
    (tmp_path / FILE_NAME).write_text(content)
    with raises(UsageError, field="step", value=120 if "120" in content else "unknown"):
        check()
    assert len(check(is_allowed=True)) == 1
    forget_checkpoint(epath.Path(tmp_path))
    assert check() == []


def test_damaged_steps_are_an_error_also_without_a_record(
    raises: Any, tmp_path: Path, check: Callable[..., list[str]]
):
    step = tmp_path / "checkpoints" / "checkpoint_00000010"
    step.mkdir(parents=True)
    for _ in range(2):  # The check changes nothing.
        with raises(UsageError, field="step", value=[10]):
            check()
    check(is_allowed=True)
    assert [path.name for path in step.parent.iterdir()] == ["damaged_checkpoint_00000010"]


def test_record_names_the_newest_step(tmp_path: Path, check: Callable[..., list[str]]):
    for step in (10, 20):
        record_checkpoint(epath.Path(tmp_path), step)
    with pytest.raises(UsageError) as caught:
        check()
    assert caught.value.value == 20


def test_record_of_the_same_step_is_not_written_again(tmp_path: Path):
    record_checkpoint(epath.Path(tmp_path), 10)
    before = (tmp_path / FILE_NAME).stat()
    record_checkpoint(epath.Path(tmp_path), 10)
    after = (tmp_path / FILE_NAME).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
