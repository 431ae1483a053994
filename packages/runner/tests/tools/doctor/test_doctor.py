from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from layerkit_runner import cli
from layerkit_runner.tools import doctor
from layerkit_runner.tools.doctor import Finding, Problem


def run(folder: Path, *flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "layerkit_runner.cli", "doctor", *flags],
        cwd=folder,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_working_machine_passes(tmp_path: Path):
    done = run(tmp_path, "--json", f"--job_log_dir={tmp_path / 'run'}")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["works"] is True
    assert list(found["checks"]) == ["packages", "host", "folder", "devices", "collectives"]
    # The environment of the tests asks for 8 devices.
    assert found["checks"]["collectives"]["num_devices"] == 8
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_failing_folder_is_on_the_page_and_sets_the_exit_code(tmp_path: Path):
    (tmp_path / "file").write_text("")
    done = run(tmp_path, "--job_log_dir=file")
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    [failure] = [line for line in lines if line.startswith("FAILS: ")]
    assert failure.startswith("FAILS: file: NotADirectoryError: ")
    assert lines[-1].startswith("some checks failed, in ")
    assert all(len(line) <= 100 for line in lines)
    assert len(lines) < 60


def test_unknown_flags_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for flag in ("--exp=lm.Small", "--fdl.A=1", "--num_batches=2"):
        assert cli.main(["doctor", flag]) == 2
        assert f"unknown flag: '{flag.partition('=')[0]}'" in capsys.readouterr().err
    # The error comes before JAX is imported.
    (tmp_path / "jax.py").write_text("raise SystemExit('jax was imported')")
    done = run(tmp_path, "--jsn", PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    assert (done.returncode, done.stdout) == (2, "")
    assert "'--jsn'" in done.stderr
    assert "'--json'" in done.stderr


def test_failures_come_before_warnings_and_set_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    failure = Problem("The disk is full.", "Free some space.")
    warning = Problem("It is slow.", "Look.", fails=False)

    def run_with(*problems: Problem) -> int:
        found = [("folder", Finding(["full", "of files"], {"free": 0}, problems))]
        monkeypatch.setattr(doctor, "run_checks", lambda folder: iter(found))
        return doctor.run_doctor([])

    assert run_with(warning) == 0
    assert "all checks passed" in capsys.readouterr().out
    assert run_with(warning, failure) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:-1] == [
        "folder       full",
        "             of files",
        "",
        "FAILS: The disk is full.",
        "  → Free some space.",
        "",
        "warning: It is slow.",
        "  → Look.",
        "",
    ]
    assert lines[-1].startswith("some checks failed, in ")


def process(code: str, limit: float) -> Finding:
    command = [sys.executable, "-c", f"import os, sys, time\n{code}"]
    return doctor.run_in_process("devices", ".", limit=limit, command=command)


def test_check_that_hangs_is_killed():
    [problem] = process("time.sleep(600)", 0.3).problems
    assert problem.what == "devices: no answer within 0.3 s."
    assert problem.fails and "driver is stuck" in problem.to_do


def test_process_that_dies_is_reported_with_its_last_lines():
    frames = "    @     0x7f  absl::Log()\\n*** Check failure stack trace: ***"
    code = f"print('F0 Unknown flag\\n{frames}', file=sys.stderr, flush=True); os._exit(3)"
    [problem] = process(code, 60).problems
    assert problem.what == "devices: the process ended with exit code 3: F0 Unknown flag"


def test_finding_travels_between_processes():
    found = Finding(["fine"], {"number": 3}, [Problem("a", "b", fails=False)])
    assert process(f"print({json.dumps(found)!r})", 60) == found


def test_path_below_a_file_fails(tmp_path: Path):
    (tmp_path / "file").write_text("")
    below = str(tmp_path / "file" / "below")
    [problem] = doctor.run_in_process("folder", below, limit=60).problems
    assert problem.fails and problem.what.startswith(f"{below}: NotADirectoryError: ")


def test_unknown_store_fails():
    [problem] = doctor.run_in_process("folder", "nosuchstore://bucket/run", limit=60).problems
    assert problem.fails and problem.what.startswith("nosuchstore://bucket/run: ")


def test_without_devices_collectives_are_not_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JAX_PLATFORMS", "nosuch")
    found = dict(doctor.run_checks(str(tmp_path)))
    [problem] = found["devices"].problems
    assert problem.fails and "'nosuch'" in problem.what and "JAX_PLATFORMS" in problem.to_do
    assert "collectives" not in found


@pytest.mark.slow  # the same as a process that dies, by XLA itself
def test_unknown_xla_flag_is_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")
    [problem] = doctor.run_in_process("devices", ".", limit=120.0).problems
    assert "--xla_no_such_flag=1" in problem.what
