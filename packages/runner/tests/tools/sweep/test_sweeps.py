"""Complete sweeps by the command line, with runs of known losses."""

from __future__ import annotations

import glob
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from layerkit_runner import cli
from layerkit_runner.files.locks import lock, try_lock
from layerkit_runner.observers import read_metrics

pytest.importorskip("optuna")

HERE = Path(__file__).parent
TIMEOUT = 300.0
EXP = "slope_experiment.Slope"


# Runs that take some seconds after they have saved at step 4.
SLOW = ("--fdl.MAX_STEPS=12", "--fdl.SECONDS_PER_ROW=0.5", "--fdl.FIRST_SLOW_ROW=8")


def rates(*values: float) -> dict[str, Any]:
    """Return the search space of these rates."""
    return {"RATE": {"choices": [*values]}}


def final_loss(rate: float, steps: int = 6) -> float:
    """Return ½·(w − 3)² after `steps` steps of gradient descent from w = 0."""
    return 4.5 * (1 - rate) ** (2 * steps)


class Command:
    """A command `runner --study=…` in one folder.

    Args:
      folder: Folder of all files.
      cache: Folder of compiled programs.
    """

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        self.sweep = folder / "sweep"
        self._cache = cache
        self._processes: list[subprocess.Popen[str]] = []

    def words(self, *more: str, **document: Any) -> list[str]:
        """Return the words of the command for a study file with the given keys."""
        path = self.folder / "study.json"
        path.write_text(json.dumps({"metric": "heldout/loss", "sampler": "grid", **document}))
        folders = [f"--job_log_dir={self.sweep}", f"--jax_compilation_cache={self._cache}"]
        return [f"--exp={EXP}", f"--study={path}", *folders, *more]

    def start(self, words: list[str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "layerkit_runner.cli", *words],
            cwd=HERE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._processes.append(process)
        return process

    def run(self, words: list[str], *, code: int = 0) -> str:
        process = self.start(words)
        output, _ = process.communicate(timeout=TIMEOUT)
        assert process.returncode == code, output
        return output

    def end(self) -> None:
        """Kill the processes that are still running."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.communicate()

    def trial(self, number: int) -> Path:
        return self.sweep / "trials" / f"{number:04d}"

    def record(self) -> dict[str, Any]:
        return json.loads((self.sweep / "sweep.json").read_text())

    def check_values(self, steps: int = 6) -> list[dict[str, Any]]:
        """Return the trials from best to worst; their values must be those of gradient descent."""
        trials = self.record()["trials"]
        for trial in trials:
            loss = final_loss(trial["parameters"]["RATE"], steps)
            assert trial["value"] == pytest.approx(loss, rel=1e-4)
        return trials


@pytest.fixture
def command(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Command]:
    one_device = "--xla_force_host_platform_device_count=1"  # the last of equal flags counts
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ['XLA_FLAGS']} {one_device}")
    cache = tmp_path_factory.getbasetemp() / "compiled"
    command = Command(tmp_path, cache)
    yield command
    command.end()


def wait_for(process: subprocess.Popen[str], condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_sweep_runs_trials_and_writes_the_results(command, monkeypatch, capfd):
    monkeypatch.chdir(HERE)
    monkeypatch.setenv("RUNNER_COMMAND", "start runner")
    fixed = ("--fdl.CRASH_FROM=0.9", "--noenable_checkpoint_saving")
    words = command.words("--fdl.MAX_STEPS=4", *fixed, space=rates(0.5, 0.9))
    assert cli.main(words) == 0
    printed = capfd.readouterr().out
    still_open = [os.path.realpath(link) for link in glob.glob("/proc/self/fd/*")]
    assert not [path for path in still_open if path.startswith(str(command.sweep))]
    good, bad = command.record()["trials"]
    # The failure is reported and did not stop the other trial.
    assert (bad["state"], bad["reason"]) == ("failed", "RuntimeError: the data are gone")
    assert f"failed: trial {bad['number']:04d}: {bad['reason']}" in printed
    assert (good["state"], good["step"], good["parameters"]) == ("complete", 4, {"RATE": 0.5})
    assert good["value"] == pytest.approx(final_loss(0.5, 4))
    record = read_metrics(command.trial(good["number"]))
    assert record.evals["heldout"][-1]["loss"] == good["value"]
    fields = "--fdl.MAX_STEPS=8 --fdl.CRASH_FROM=0.9 --fdl.RATE=0.5"
    assert not (command.trial(good["number"]) / "checkpoints").exists()
    longer = f"  start runner --exp={EXP} {fields} --job_log_dir={command.sweep}/best"
    # The suggested command has the flags of the sweep.
    longer += " --noenable_checkpoint_saving --jax_compilation_cache="
    assert printed.splitlines()[-1].startswith(longer)

    # The same command prints the results again; other overrides in the same folder are an error.
    before = os.stat(command.sweep / "study.db").st_mtime_ns
    assert cli.main(words) == 0
    assert capfd.readouterr().out in printed
    assert os.stat(command.sweep / "study.db").st_mtime_ns == before
    assert cli.main(command.words("--fdl.MAX_STEPS=5", *fixed, space=rates(0.5, 0.9))) == 2
    assert 'overrides.MAX_STEPS: recorded "4", now "5"' in capfd.readouterr().err


@pytest.mark.slow
def test_pruned_trial_saves_and_exits(command):
    fields = ("--fdl.MAX_STEPS=40", "--fdl.SECONDS_PER_ROW=0.3", "--fdl.FIRST_SLOW_ROW=8")
    pruner = {"name": "median", "n_startup_trials": 1}
    # With this seed the grid begins with the better trial.
    sampler = {"name": "grid", "seed": 1}
    words = command.words(*fields, space=rates(0.5, 0.01), pruner=pruner, sampler=sampler)
    printed = command.run(words)
    good, bad = command.record()["trials"]
    assert (good["state"], good["parameters"]) == ("complete", {"RATE": 0.5})
    assert (bad["state"], bad["parameters"]) == ("pruned", {"RATE": 0.01})
    assert 2 <= bad["step"] < 40
    output = (command.trial(bad["number"]) / "output.txt").read_text()
    assert "SIGTERM" in output and "saved at step" in output
    assert f"trial {bad['number']:04d}: pruned" in printed


@pytest.mark.slow
def test_killed_sweep_resumes(command):
    words = command.words(*SLOW, space=rates(0.25, 0.125))
    process = command.start(words)
    saved = command.trial(0) / "checkpoints" / "checkpoint_00000004"
    wait_for(process, saved.exists)
    process.kill()
    process.communicate()
    # The trial's process detects it, saves and exits.
    with lock(command.trial(0) / "process.lock"):
        assert "SIGTERM" in (command.trial(0) / "output.txt").read_text()
    printed = command.run(words)
    assert "trial 0000: resumed: RATE=" in printed
    output = (command.trial(0) / "output.txt").read_text()
    assert "resuming from step" in output
    assert sorted(trial["number"] for trial in command.check_values(steps=12)) == [0, 1]


@pytest.mark.slow
def test_killed_trial_is_started_again_and_completes(command):
    process = command.start(command.words(*SLOW, space=rates(0.25)))
    wait_for(process, (command.trial(0) / "checkpoints" / "checkpoint_00000004").exists)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    pid = next(
        int(n) for n in children if b"process.lock" in Path(f"/proc/{n}/cmdline").read_bytes()
    )
    os.kill(pid, signal.SIGKILL)
    printed, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, printed
    assert "killed by SIGKILL, possibly for lack of memory after step" in printed
    assert "resuming from step 4" in (command.trial(0) / "output.txt").read_text()
    assert [trial["state"] for trial in command.check_values(steps=12)] == ["complete"]


@pytest.mark.slow
def test_sweep_stopped_by_ctrl_c_resumes(command):
    words = command.words(*SLOW, space=rates(0.25))
    process = command.start(words)
    evaluated = command.trial(0) / "metrics.jsonl"
    wait_for(process, lambda: evaluated.exists() and "heldout" in evaluated.read_text())
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130
    assert "trial 0000: stopped at step" in printed
    assert printed.splitlines()[-1] == "the same command resumes this sweep"
    assert "saved at step" in (command.trial(0) / "output.txt").read_text()
    assert "trial 0000: resumed: RATE=0.25" in command.run(words)
    assert len(command.check_values(steps=12)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["database", "journal"])
def test_two_commands_share_the_trials_of_a_sweep(command, storage):
    more = ["--fdl.SECONDS_PER_ROW=0.5"]
    if storage == "journal":
        more.append(f"--study_storage={command.folder / 'study.log'}")
    words = command.words(*more, space=rates(0.1, 0.2, 0.3, 0.4))
    processes = [command.start(words) for _ in range(2)]
    printed = [process.communicate(timeout=TIMEOUT)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed
    trials = command.check_values()
    assert [trial["parameters"]["RATE"] for trial in trials] == [0.4, 0.3, 0.2, 0.1]
    assert sorted(trial["number"] for trial in trials) == [0, 1, 2, 3]
    for trial in trials:
        label = f"trial {trial['number']:04d}: complete"
        assert sum(text.count(label) for text in printed) == 1
    assert all("trial 000" in text.partition("heldout/loss")[0] for text in printed)
    free = try_lock(command.trial(0) / "trial.lock")
    assert free is not None
    free.close()


@pytest.mark.slow
def test_diverging_trial_fails(command):
    command.run(command.words(space=rates(0.5, 1e30)))
    _, bad = command.record()["trials"]
    assert (bad["state"], bad["reason"]) == ("failed", "heldout/loss is inf at step 2")


@pytest.mark.slow
@pytest.mark.slow
def test_trial_that_is_killed_three_times_at_one_step_fails(command):
    words = command.words("--fdl.KILL_AT_START=True", space=rates(0.25))
    printed = command.run(words, code=1)
    assert printed.count("; it is started again") == 2
    assert "trial 0000: failed at step 0" in printed


def test_sweep_stops_after_three_failures_in_a_row(command):
    words = command.words("--fdl.CRASH_FROM=0", space=rates(0.1, 0.2, 0.3, 0.4))
    printed = command.run(words, code=1)
    assert "stopping the sweep: 3 trials in a row failed" in printed
    trials = command.record()["trials"]
    assert [trial["reason"] for trial in trials] == ["RuntimeError: the data are gone"] * 3


@pytest.mark.slow
def test_unknown_metric_ends_the_sweep_and_its_trial_can_be_resumed(command):
    printed = command.run(command.words(metric="heldout/los", space=rates(0.1)), code=2)
    assert "metric='heldout/los'" in printed and "'heldout/loss'" in printed
    assert "trial 0000: resumed: RATE=0.1" in command.run(command.words(space=rates(0.1)))
    assert len(command.check_values()) == 1
