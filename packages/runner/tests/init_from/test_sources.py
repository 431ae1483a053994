"""Kinds of folders, recognized by their content."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from layerkit_runner.errors import UsageError
from layerkit_runner.init_from.settings import Source
from layerkit_runner.init_from.sources import (
    CheckpointFolder,
    HuggingFaceFolder,
    open_sources,
    recognize,
)


@pytest.mark.parametrize(
    ("field", "value"), [("rules", [("a", "b")]), ("ignore", ["a"]), ("step", 3), ("use_ema", True)]
)
def test_settings_of_further_adapters_are_an_error(raises, tmp_path: Path, field: str, value: Any):
    names = [str(tmp_path / name) for name in ("one", "two")]
    for name in names:
        Path(name).mkdir()
        Path(name, "adapter_config.json").touch()
    sources = [Source(folder=names[0], scale=0.5), Source(folder=names[1], **{field: value})]
    with raises(UsageError, owner=names[1], field=field, value=value):
        open_sources(sources, None)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    for step in (2, 30):
        (tmp_path / "job" / "checkpoints" / f"checkpoint_{step:08d}" / "state").mkdir(parents=True)
    (tmp_path / "job" / "config.json").write_text("{}")
    return tmp_path / "job"


@pytest.mark.parametrize(
    ("place", "step"), [("", None), ("checkpoints", None), ("checkpoints/checkpoint_00000002", 2)]
)
def test_job_checkpoints_and_step_are_recognized(job: Path, place: str, step: int | None):
    result = recognize(str(job / place))
    assert isinstance(result, CheckpointFolder)
    assert (str(result.directory), result.step) == (str(job / "checkpoints"), step)


def test_hugging_face_folder_is_recognized(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    result = recognize(str(tmp_path))
    assert result == HuggingFaceFolder(result.directory)
    assert str(result.directory) == str(tmp_path)


def test_home_and_relative_paths_are_expanded(job: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(job.parent))
    assert str(recognize("~/job").directory) == str(job / "checkpoints")
    monkeypatch.chdir(job)
    assert str(recognize(".").directory) == str(job / "checkpoints")


@pytest.mark.parametrize(
    "files", [[], ["checkpoints/"], ["config.json", "pytorch_model.bin"], ["config.json", "b"]]
)
def test_folder_without_weights_is_an_error(raises, tmp_path: Path, files: list[str]):
    for name in files:
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).touch()
    with raises(UsageError, field="folder", value=str(tmp_path)):
        recognize(str(tmp_path))


def test_missing_folder_is_an_error_with_the_nearest_name(raises, job: Path):
    with raises(UsageError, value=str(job.parent / "jib"), choices=(str(job),)):
        recognize(str(job.parent / "jib"))
    with raises(UsageError, value=str(job / "config.json")):
        recognize(str(job / "config.json"))
