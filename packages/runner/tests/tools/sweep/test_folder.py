"""Whose folder it is: one sweep each, and locks that end with the process that holds them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from layerkit_runner.config.overrides import Override
from layerkit_runner.errors import UsageError
from layerkit_runner.files.locks import lock, try_lock
from layerkit_runner.tools.sweep.folder import SweepFolder, check_same_sweep, description
from layerkit_runner.tools.sweep.study_file import StudyFile


def test_a_lock_ends_with_the_process_that_holds_it(tmp_path: Path):
    path = tmp_path / "new" / "a.lock"
    program = (
        "import pathlib, sys; from layerkit_runner.tools.sweep.folder import lock\n"
        "with lock(pathlib.Path(sys.argv[1])):\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert try_lock(path) is None
        process.kill()
    with lock(path):
        assert try_lock(path) is None
    held = try_lock(path)
    assert held is not None
    held.close()


def test_a_folder_that_cannot_be_one(tmp_path: Path):
    with pytest.raises(UsageError, match=r"^--job_log_dir=gs://a/b: a sweep needs a folder of a"):
        SweepFolder("gs://a/b")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UsageError, match=r"holds a run \(checkpoints\); a sweep needs a folder of"):
        SweepFolder(str(tmp_path))


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000])
def test_damaged_record_of_a_sweep_is_one_sentence(tmp_path: Path, text: str):
    (tmp_path / "study.json").write_text(text)
    with pytest.raises(UsageError, match=r"study\.json is damaged"):
        SweepFolder(str(tmp_path)).recorded()


def test_a_folder_holds_one_sweep(study_file: Callable[..., StudyFile], tmp_path: Path):
    space = {"A": {"low": 1, "high": 2}, "B": {"choices": ["x"]}}
    folder = SweepFolder(str(tmp_path / "sweep"))

    def described(**document: object) -> dict[str, object]:
        return description(
            study_file(**{"space": space, **document}),
            experiment="a.B",
            fixed=[Override("C", "3")],
            storage="postgresql://me:secret@host/db",
        )

    check_same_sweep(folder, described())
    with folder.deciding():
        folder.record(described())
    assert "secret" not in (folder.path / "study.json").read_text()
    # How it is searched may change, and how long.
    check_same_sweep(folder, described(num_trials=3, sampler="random", pruner="median"))
    other = described(space={"A": {"low": 1, "high": 3}}, direction="maximize")
    with pytest.raises(UsageError) as caught:
        check_same_sweep(folder, {**other, "overrides": {}})
    assert str(caught.value) == (
        f"--job_log_dir={folder.given} holds another sweep; give each a folder of its own."
        '\n  direction: "minimize" there, "maximize" here'
        '\n  overrides.C: "3" there, none here'
        '\n  space.A: {"low": 1, "high": 2, "log": false, "step": null} there, '
        '{"low": 1, "high": 3, "log": false, "step": null} here'
        '\n  space.B: {"choices": ["x"]} there, none here'
    )
