"""Checks in a process of their own: that they answer, hang, die."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from layerkit_runner.doctor.finding import Finding, Problem, to_json
from layerkit_runner.doctor.timed import run_group

FOUND = Finding(["fine"], {"number": 3}, [Problem("a", "b", fails=False)])


def run(code: str, limits: dict[str, float]) -> dict[str, Finding]:
    """Findings of a worker that says `FOUND` and then runs `code`."""
    line = json.dumps(to_json(FOUND))
    program = f"import os, sys, time\nprint({line!r}, flush=True)\n{code}"
    found = run_group("group", limits, {}, command=[sys.executable, "-c", program])
    return dict(found)


def test_a_check_that_hangs_is_left():
    found = run("time.sleep(600)", {"devices": 60, "attention": 0.3, "collectives": 60})
    assert found["devices"] == FOUND
    [problem] = found["attention"].problems
    assert problem.what == "attention: no answer within 0.3 s; it hangs."
    assert problem.fails and problem.to_do
    assert found["collectives"].lines == ["not looked at, because of the check of attention"]
    assert not found["collectives"].problems


def test_a_check_that_ends_the_process_is_told_with_its_last_words():
    frames = "    @     0x7f  absl::Log()\\n*** Check failure stack trace: ***"
    code = f"print('F0 Unknown flag\\n{frames}', file=sys.stderr, flush=True); os._exit(3)"
    found = run(code, {"devices": 60, "attention": 60, "collectives": 60})
    [problem] = found["attention"].problems
    assert problem.what == (
        "attention: the process ended with exit code 3; it said: F0 Unknown flag"
    )
    assert list(found) == ["devices", "attention", "collectives"]


def test_the_worker_tells_its_findings_and_nothing_else(tmp_path: Path):
    options = {"job_log_dir": str(tmp_path), "jax_compilation_cache": "off"}
    found = dict(run_group("storage", {"folder": 60, "compile cache": 60}, options))
    assert found["folder"].values["works"] == ["rename", "append", "fsync of folders"]
    assert found["compile cache"].values == {"folder": None}
    assert list(tmp_path.iterdir()) == []


def test_without_devices_nothing_else_is_tried(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAX_PLATFORMS", "nosuch")
    limits = dict.fromkeys(("devices", "arithmetic", "attention", "collectives"), 120.0)
    found = dict(run_group("devices", limits, {}))
    [problem] = found["devices"].problems
    assert problem.fails and "'nosuch'" in problem.what and "JAX_PLATFORMS" in problem.to_do
    assert not any(finding.problems for name, finding in found.items() if name != "devices")


@pytest.mark.slow  # the same as above, by XLA itself
def test_a_flag_that_xla_does_not_know(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")
    limits = dict.fromkeys(("devices", "arithmetic", "attention", "collectives"), 120.0)
    found = dict(run_group("devices", limits, {}))
    [problem] = found["devices"].problems
    assert "--xla_no_such_flag=1" in problem.what
