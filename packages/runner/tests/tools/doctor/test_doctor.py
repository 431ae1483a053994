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


def test_working_machine_passes(tmp_path):
    done = run(tmp_path, "--json", f"--job_log_dir={tmp_path / 'run'}")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["works"] is True
    assert found["checks"]["folder"]["folder"].startswith(str(tmp_path / "run"))
    assert list(found["checks"]) == ["packages", "host", "folder", "devices", "collectives"]
    # The environment of the tests asks for 8 devices.
    assert found["checks"]["collectives"]["num_devices"] == 8
    assert list(tmp_path.iterdir()) == []


def test_unknown_flags_of_the_command(tmp_path, capsys):
    for flag in ("--exp=lm.Small", "--fdl.A=1", "--num_batches=2"):
        assert cli.main(["doctor", flag]) == 2
        assert f"unknown flag: '{flag.partition('=')[0]}'" in capsys.readouterr().err
    # The error comes before JAX is imported.
    (tmp_path / "jax.py").write_text("raise SystemExit('jax was imported')")
    done = run(tmp_path, "--jsn", PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    assert (done.returncode, done.stdout) == (2, "")
    assert "'--jsn'" in done.stderr
    assert "'--json'" in done.stderr


def test_page_has_failures_before_warnings_and_sets_the_exit_code(monkeypatch, capsys):
    failure = Problem("The disk is full of" + " files" * 20, "Delete" + " files" * 20)
    warning = Problem("It is slow.", "Look.", fails=False)

    def run_with(*problems: Problem) -> int:
        found = [("folder", Finding(["full", "of" + " files" * 20], {"free": 0}, problems))]
        monkeypatch.setattr(doctor, "run_checks", lambda folder: iter(found))
        return cli.main(["doctor"])

    assert run_with(warning) == 0
    assert "all checks passed" in capsys.readouterr().out
    assert run_with(warning, failure) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:-1] == [
        "folder       full",
        "             of" + " files" * 14,  # at most 100 columns
        "              " + " files" * 6,
        "",
        "FAILS: The disk is full of" + " files" * 12,
        " " + " files" * 8,
        "  → Delete" + " files" * 15,
        "   " + " files" * 5,
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


@pytest.mark.parametrize(
    ("folder", "error"),
    [(f"{__file__}/below", "NotADirectoryError: "), ("nosuchstore://bucket/run", "")],
    ids=["below a file", "unknown store"],
)
def test_folder_that_cannot_be_written_fails(folder, error):
    [problem] = doctor.run_in_process("folder", folder, limit=60).problems
    assert problem.fails and problem.what.startswith(f"{folder}: {error}")


def test_without_devices_collectives_are_not_checked(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "nosuch")
    found = dict(doctor.run_checks(str(tmp_path)))
    [problem] = found["devices"].problems
    assert problem.fails and "'nosuch'" in problem.what and "JAX_PLATFORMS" in problem.to_do
    assert "collectives" not in found


@pytest.mark.slow  # the same as a process that dies, by XLA itself
def test_unknown_xla_flag_is_reported(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")
    [problem] = doctor.run_in_process("devices", ".", limit=120.0).problems
    assert "--xla_no_such_flag=1" in problem.what
