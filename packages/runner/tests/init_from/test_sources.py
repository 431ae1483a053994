"""Which kind of folder a path names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from layerkit_runner.errors import UsageError
from layerkit_runner.init_from.sources import CheckpointFolder, HuggingFaceFolder, recognise


@pytest.fixture
def job(tmp_path: Path) -> Path:
    for step in (2, 30):
        (tmp_path / "job" / "checkpoints" / f"checkpoint_{step:08d}" / "state").mkdir(parents=True)
    (tmp_path / "job" / "config.json").write_text("{}")
    return tmp_path / "job"


@pytest.mark.parametrize(
    ("place", "step"),
    [("", None), ("checkpoints", None), ("checkpoints/checkpoint_00000002", 2)],
)
def test_ours(job: Path, place: str, step: int | None):
    found = recognise(str(job / place))
    assert isinstance(found, CheckpointFolder)
    assert (str(found.directory), found.step) == (str(job / "checkpoints"), step)


def test_of_hugging_face(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    found = recognise(str(tmp_path))
    assert found == HuggingFaceFolder(found.directory)
    assert str(found.directory) == str(tmp_path)


def test_as_a_shell_leaves_it(job: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(job.parent))
    assert str(recognise("~/job").directory) == str(job / "checkpoints")
    monkeypatch.chdir(job)
    assert str(recognise(".").directory) == str(job / "checkpoints")


EXPECTED = (
    "expected the folder of a job, of its checkpoints or one of them, or of Hugging Face"
    " (config.json and *.safetensors); {folder} "
)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], EXPECTED + "is empty"),
        (["checkpoints/"], EXPECTED + "is that of a job without a checkpoint"),
        (["config.json", "pytorch_model.bin"], EXPECTED + "has *.bin, which is not read: save the"),
        (["config.json", "b", "a"], EXPECTED + "holds a, b, config.json"),
    ],
)
def test_nothing_to_begin_from(tmp_path: Path, files: list[str], message: str):
    for name in files:
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).touch()
    with pytest.raises(UsageError, match=f"^{re.escape(message.format(folder=tmp_path))}"):
        recognise(str(tmp_path))


def test_no_folder(job: Path, monkeypatch: pytest.MonkeyPatch):
    wrong: Any = job.parent / "jib"
    with pytest.raises(UsageError, match=f"^there is no folder {wrong}; did you mean 'job'\\?$"):
        recognise(str(wrong))
    with pytest.raises(UsageError, match=r"config.json is a file"):
        recognise(str(job / "config.json"))
