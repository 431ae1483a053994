"""The job folder: its record, its lock and the command that repeats the run."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest
from etils import epath

from layerkit.config import Config
from layerkit_runner import BaseExperiment, Override, UsageError
from layerkit_runner.checkpointing.folders import RECORD_FILE
from layerkit_runner.config.flags import parse_flags
from layerkit_runner.config.requests import ResolvedExperiment
from layerkit_runner.partitioning import SpmdPartitioner
from layerkit_runner.run.job_folder import (
    check_same_experiment,
    check_writable,
    command_line,
    forget_checkpoint,
    only_trainer,
    record_checkpoint,
    start_over,
    write_config,
)
from layerkit_runner.run.resolve import resolve
from layerkit_runner.run_options import RunOptions


class Mesh(BaseExperiment):
    SHAPE: list[int] | None = None

    def task(self) -> Config:
        return SpmdPartitioner.HParams.config()  # any config will do: nothing is built

    def datasets(self) -> list[Config]:
        return []

    def partitioner(self) -> Config:
        return SpmdPartitioner.HParams.config(ici_mesh_shape=self.SHAPE)


class Other(Mesh):
    pass


@pytest.fixture
def folder(tmp_path: Any) -> epath.Path:
    return epath.Path(tmp_path) / "job"


def resolved(**fields: Any) -> ResolvedExperiment:
    return resolve(Mesh(**fields), [Override("partitioner.dcn_mesh_shape", "[1,1,2]")])


def write(
    folder: epath.Path,
    experiment: ResolvedExperiment | None = None,
    options: RunOptions | None = None,
    *,
    report: Any = pytest.fail,
    resumes: bool = False,
) -> None:
    """Write the record of a run, by default of `resolved()` without flags."""
    experiment, options = experiment or resolved(), options or RunOptions()
    write_config(folder, experiment, options, report=report, resumes=resumes)


def test_folder_of_another_experiment_is_an_error(raises: Any, folder: epath.Path):
    write(folder)
    check_same_experiment(folder, resolved(SHAPE=[1, 2, 3]))
    with raises(UsageError, owner=f"{__name__}.Other", value=str(folder)):
        check_same_experiment(folder, resolve(Other()))


def test_experiment_that_only_evaluates_uses_the_folder_of_its_trainer(
    raises: Any, folder: epath.Path
):
    class Scores(Mesh):
        trained_by = Mesh

    write(folder)
    check_same_experiment(folder, resolve(Scores()))
    write(folder, resolve(Other()), report=lambda line: None)
    with raises(UsageError, value=str(folder)):
        check_same_experiment(folder, resolve(Scores()))


def test_check_writable_leaves_the_folder_unchanged(folder: epath.Path):
    check_writable(folder / "a" / "b")
    assert not folder.exists()
    folder.mkdir()
    check_writable(folder)
    assert list(folder.iterdir()) == []


def test_folder_that_cannot_be_written_is_an_error(raises: Any, folder: epath.Path):
    folder.write_text("a file")
    for path in (folder, folder / "job", epath.Path("/proc/not/a/place")):
        with raises(UsageError, field="--job_log_dir", value=str(path)):
            check_writable(path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")
def test_check_writable_raises_for_a_link_of_another_user(raises: Any, folder: epath.Path):
    (folder / "scratch").mkdir(parents=True)
    own = folder / "own"
    own.mkdir()
    os.symlink(folder / "scratch", own / "checkpoints")
    check_writable(own)
    os.chown(own / "checkpoints", 65534, 65534, follow_symlinks=False)
    with raises(UsageError, field="--job_log_dir", value=str(own)):
        check_writable(own)


def arguments_of(folder: epath.Path) -> RunOptions:
    return parse_flags(json.loads((folder / "config.json").read_text())["arguments"]).options


def test_flags_are_recorded_without_folder_and_processes(folder: epath.Path):
    options = RunOptions(
        restore_checkpoint_dir="/old run",
        restore_checkpoint_step=(20,),
        restore_cast_dtypes=True,
        enable_checkpoint_saving=False,
        xla_flags_preset="gpu_latency_hiding",
        pgle_profile="a.pb",
        wandb_project="toy",
        hung_step_timeout_secs=None,
        peak_tflops_per_device=2.5,
    )
    here = dataclasses.replace(options, job_log_dir=str(folder), num_processes=2, process_id=0)
    write(folder, options=here)
    assert arguments_of(folder) == options


def test_resumed_run_keeps_the_flags_of_the_first_start_and_records_no_new_ones(folder: epath.Path):
    begun = RunOptions(init_from="base", init_draw="head/.*", wandb_project="toy")
    write(folder, options=begun)
    later = RunOptions(hung_step_timeout_secs=5)
    write(folder, options=later, resumes=True)
    kept = RunOptions(init_from="base", init_draw="head/.*", hung_step_timeout_secs=5)
    assert arguments_of(folder) == kept
    write(folder, options=later)
    assert arguments_of(folder) == later
    write(folder, options=RunOptions(init_from="base"), resumes=True)
    assert arguments_of(folder) == RunOptions()


def test_second_trainer_in_a_folder_is_an_error(folder: epath.Path):
    with only_trainer(folder / "deep"):
        with pytest.raises(UsageError) as caught, only_trainer(folder / "deep"):
            pytest.fail("the lock was acquired twice")
        assert f"process {os.getpid()} on {socket.gethostname()}" in caught.value.problem
        assert caught.value.value == str(folder / "deep")
    # It was made for the lock alone.
    assert not folder.exists()
    (folder / "checkpoints").mkdir(parents=True)
    with only_trainer(folder):
        (folder / "config.json").write_text("{}")
    (folder / "checkpoints").rmdir()
    assert [path.name for path in folder.iterdir()] == ["config.json"]


def test_killed_trainer_releases_its_folder(folder: epath.Path):
    program = """
import os, sys, time
from etils import epath
from layerkit_runner.run.job_folder import only_trainer
with only_trainer(epath.Path(sys.argv[1])):
    if os.fork() == 0:  # as the workers of an input, which may outlive their parent
        time.sleep(0.5)
        print("worker", os.getpid(), flush=True)
        time.sleep(600)
    time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program, folder], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline().split()[1])
        try:
            running = pytest.raises(UsageError, match=f"process {process.pid} on ")
            with running, only_trainer(folder):
                pass
            process.kill()
            process.wait()
            with only_trainer(folder):
                assert str(os.getpid()) in (folder / ".running").read_text()
        finally:
            os.kill(worker, signal.SIGKILL)


def test_trainer_runs_without_locks_of_the_file_system(
    folder: epath.Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with only_trainer(epath.Path("gs://bucket/run")):
        pass
    monkeypatch.setattr(fcntl, "flock", refuse)
    with only_trainer(folder), only_trainer(folder):
        pass
    assert not folder.exists()


def test_command_line_parses_to_the_same_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RUNNER_COMMAND", raising=False)
    fields = {"pmap_use_tensorstore": True, "enable_checkpoint_saving": False}
    options = RunOptions(job_log_dir="/tmp/a b", **fields)
    command = command_line(options)
    assert command.startswith("runner ")
    flags = parse_flags(shlex.split(command)[1:])
    assert (flags.exp, flags.mode, flags.options) == (None, "train", options)
    changed = command_line(options, mode="plan", changes={"SHAPE": "[4]"})
    flags = parse_flags(shlex.split(changed)[1:])
    # No flag that the mode refuses.
    assert [str(o) for o in flags.overrides] == ["--fdl.SHAPE=[4]"] and flags.mode == "plan"
    # The record has the flags of the first start.
    assert command_line(dataclasses.replace(options, init_from="base")) == command
    monkeypatch.setenv("RUNNER_COMMAND", "python3 start.py train")
    assert command_line(options).startswith("python3 start.py train '--job_log_dir=/tmp/a b'")


@pytest.fixture
def check(folder: epath.Path) -> Any:
    """Checks the restart, and returns what was reported."""
    folder.mkdir()

    def call(*, is_allowed: bool = False) -> list[str]:
        lines: list[str] = []
        start_over(folder, folder / "checkpoints", is_allowed=is_allowed, report=lines.append)
        return lines

    return call


def test_job_that_never_saved_starts(folder: epath.Path, check: Any):
    # What a run leaves that is killed before or inside its first save.
    (folder / "metrics.jsonl").write_text('{"step": 120, "loss": 1.0}\n')
    (folder / "config.json").write_text("{}")
    (folder / "checkpoints/checkpoint_00000010.orbax-checkpoint-tmp").mkdir(parents=True)
    assert check() == []


@pytest.mark.parametrize("content", ['{"step": 120}', "", "[]"])
def test_recorded_checkpoint_that_is_missing_is_an_error(
    raises: Any, folder: epath.Path, check: Any, content: str
):
    (folder / RECORD_FILE).write_text(content)
    with raises(UsageError, field="--job_log_dir", value=str(folder)):
        check()
    assert len(check(is_allowed=True)) == 1
    forget_checkpoint(folder)
    assert check() == []


def test_damaged_steps_are_an_error_also_without_a_record(
    raises: Any, folder: epath.Path, check: Any
):
    step = folder / "checkpoints" / "checkpoint_00000010"
    step.mkdir(parents=True)
    for _ in range(2):  # The check changes nothing.
        with raises(UsageError, field="--job_log_dir", value=str(folder)):
            check()
    check(is_allowed=True)
    assert [path.name for path in step.parent.iterdir()] == ["damaged_checkpoint_00000010"]


def test_record_names_the_newest_step(folder: epath.Path, check: Any):
    for step in (10, 20):
        record_checkpoint(folder, step)
    with pytest.raises(UsageError) as caught:
        check()
    assert "records step 20" in str(caught.value)


def test_record_of_the_same_step_is_not_written_again(folder: epath.Path):
    record_checkpoint(folder, 10)
    before = os.stat(folder / RECORD_FILE)
    record_checkpoint(folder, 10)
    after = os.stat(folder / RECORD_FILE)
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
