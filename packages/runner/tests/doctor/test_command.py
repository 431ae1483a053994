"""`runner doctor` as people meet it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from layerkit_runner import cli
from layerkit_runner.command_line.flags import RunOptions
from layerkit_runner.doctor import command
from layerkit_runner.doctor.finding import Finding, Problem
from layerkit_runner.doctor.worker import GROUPS


def doctor(folder: Path, *flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "layerkit_runner.cli", "doctor", *flags],
        cwd=folder,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_machine_that_works(tmp_path: Path):
    done = doctor(tmp_path, "--json", f"--job_log_dir={tmp_path / 'run'}")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["works"] is True
    assert list(found["checks"]) == [
        *("packages", "host", "launcher", "environment", "folder", "compile cache"),
        *("devices", "arithmetic", "attention", "collectives"),
    ]
    # As many as the environment of the tests asks for.
    assert found["checks"]["collectives"]["num_devices"] == 8
    assert found["checks"]["attention"]["xla"]["runs"] is True
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow  # the parts of the page are tested without a process
def test_the_page_of_a_machine_that_does_not(tmp_path: Path):
    (tmp_path / "file").write_text("")
    done = doctor(tmp_path, "--job_log_dir=file")
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    assert "does not work" in lines
    assert all(len(line) <= 100 for line in lines)
    assert len(lines) < 60


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    takes = "`runner doctor` takes --job_log_dir, --jax_compilation_cache, --json, --help, not "
    for flag in ("--exp=lm.Small", "--fdl.A=1", "--num_batches=2"):
        assert cli.main(["doctor", flag]) == 2
        name = flag if "fdl" in flag else flag.partition("=")[0]
        assert capsys.readouterr().err == f"runner: {takes}{name}.\n"
    # Before anything of it is loaded.
    (tmp_path / "jax.py").write_text("raise SystemExit('jax was imported')")
    done = doctor(tmp_path, "--jsn", PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    text = "runner: there is no flag --jsn; did you mean '--json'?\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", text)


def test_every_check_of_a_worker_has_a_time_limit():
    for group, limits in command.LIMITS.items():
        assert list(GROUPS[group]()) == list(limits)


def test_the_end_of_the_page_and_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    bad = Problem("The disk is full.", "Free some space.")
    remark = Problem("It is slow.", "Look.", fails=False)

    def run(*problems: Problem) -> int:
        found = [("folder", Finding(["full"], {"free": 0}, problems))]
        monkeypatch.setattr(command, "_look", lambda options: iter(found))
        return command.run_doctor(RunOptions())

    assert run(remark) == 0
    assert run(remark, bad) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-10:-1] == [
        "",
        "does not work",
        "  1. The disk is full.",
        "     → Free some space.",
        "",
        "good to know",
        "  1. It is slow.",
        "     → Look.",
        "",
    ]
    assert lines[-1].startswith("1 thing(s) do not work; looked for")
    assert lines[0] == "folder         full"
