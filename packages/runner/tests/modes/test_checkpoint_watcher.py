"""--mode=eval and decode as real processes: beside a training job, stopped, killed, too slow."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from layerkit_runner.observers import metrics_path, read_metrics

TIMEOUT = 240.0


@dataclasses.dataclass
class Processes:
    """Commands for one folder; they end with the test."""

    folder: Path
    cache: Path
    started: list[subprocess.Popen[str]] = dataclasses.field(default_factory=list)

    def start(self, *flags: str, **fields: Any) -> subprocess.Popen[str]:
        """Starts the command on one device."""
        devices = "--xla_force_host_platform_device_count=1"
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "layerkit_runner.cli",
                "--exp=gated_experiment.Gated",
                f"--job_log_dir={self.folder}",
                f"--jax_compilation_cache={self.cache}",
                *(f"--fdl.{name}={value}" for name, value in fields.items()),
                *flags,
            ],
            cwd=Path(__file__).parent,  # where the experiment is found
            env={**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {devices}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(process)
        return process

    def start_two(self, *flags: str) -> list[subprocess.Popen[str]]:
        """The command as two processes of one job."""
        with socket.socket() as free:
            free.bind(("localhost", 0))
            meeting = f"--coordinator_address=localhost:{free.getsockname()[1]}"
        meet = [meeting, "--num_processes=2"]
        return [self.start(*meet, f"--process_id={index}", *flags) for index in range(2)]

    def run(self, *flags: str, **fields: Any) -> str:
        """Runs the command to its end, which must be a good one; returns what it printed."""
        return ended(self.start(*flags, **fields))

    def record(self, step: int, name: str = "heldout") -> Path:
        return self.folder / "eval" / name / f"step_{step:08d}.json"

    def found(self, step: int, name: str = "heldout") -> dict[str, float]:
        return json.loads(self.record(step, name).read_text())["metrics"]

    def evaluated(self, name: str = "heldout") -> list[int]:
        """The steps that have a record."""
        return sorted(
            int(path.stem.removeprefix("step_"))
            for path in (self.folder / "eval" / name).glob("*.json")
        )

    def by_training(self, step: int) -> dict[str, float]:
        """What the training job found after this step."""
        (line,) = (e for e in read_metrics(self.folder).evals["heldout"] if e["step"] == step)
        return {name: line[name] for name in ("loss", "total_weight")}


def ended(process: subprocess.Popen[str], code: int = 0) -> str:
    output = process.communicate(timeout=TIMEOUT)[0]
    assert process.returncode == code, output
    return output


def said(process: subprocess.Popen[str], text: str) -> None:
    """Waits until the process has printed a line with this text."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return
    raise AssertionError("".join(lines))


def wait_for(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def processes(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    cache = tmp_path_factory.getbasetemp() / "compiled"
    made = Processes(tmp_path / "job", cache)
    yield made
    for process in made.started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.slow
def test_evaluation_beside_a_training_job(processes: Processes):
    follower = processes.start("--mode=eval")
    gate = processes.folder / "eval" / "heldout" / "step_{:08d}.json"
    trainer = processes.start(WAITS_FOR=gate)
    ended(trainer)
    output = ended(follower)
    assert f"waiting for the first checkpoint in {processes.folder}/checkpoints" in output
    assert "waiting for a checkpoint after step 2" in output
    assert "waiting for a checkpoint after step 6" not in output
    assert processes.evaluated() == [2, 4, 6]
    for step in (2, 4, 6):
        assert processes.found(step) == processes.by_training(step)
    beside = read_metrics(metrics_path(processes.folder, mode="eval")).evals["heldout"]
    assert [line["step"] for line in beside] == [2, 4, 6]


@pytest.mark.slow
def test_decoding_beside_a_training_job(processes: Processes):
    follower = processes.start("--mode=decode", "--eval_during_decode")
    gate = processes.folder / "decode" / "prompts" / "step_{:08d}.made_from.json"
    ended(processes.start(WAITS_FOR=gate))
    output = ended(follower)
    outputs = sorted((processes.folder / "decode" / "prompts").glob("*.jsonl"))
    assert [path.name for path in outputs] == [f"step_0000000{step}.jsonl" for step in (2, 4, 6)]
    assert len({path.read_text() for path in outputs}) == 3  # each of other weights
    assert output.count("decoded step") == 3
    assert processes.evaluated() == [2, 4, 6]
    for step in (2, 4, 6):
        assert processes.found(step) == processes.by_training(step)


@pytest.mark.slow
def test_killed_job_repeats_only_the_interrupted_evaluation(processes: Processes):
    processes.run()
    gate = processes.folder.parent / "gate"
    follower = processes.start("--mode=eval", SECOND_WAITS_FOR=gate)
    wait_for(follower, processes.record(6).exists)
    follower.kill()
    follower.communicate()
    written = processes.record(6).stat().st_mtime_ns
    assert not processes.record(6, "second").exists()
    gate.touch()
    output = processes.run("--mode=eval", SECOND_WAITS_FOR=gate)
    assert f"reusing {processes.record(6)}" in output
    assert f"reusing {processes.record(6, 'second')}" not in output
    assert processes.record(6).stat().st_mtime_ns == written
    assert processes.found(6, "second") == processes.found(6) == processes.by_training(6)
    beside = read_metrics(metrics_path(processes.folder, mode="eval")).evals
    assert {name: len(lines) for name, lines in beside.items()} == {"heldout": 1, "second": 1}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_wait(processes: Processes, number: signal.Signals):
    follower = processes.start("--mode=eval")
    said(follower, "waiting for the first checkpoint")
    follower.send_signal(number)
    output = ended(follower, 128 + number)
    assert f"{number.name}: leaving after the current program" in output


@pytest.mark.slow
def test_signal_ends_the_job_after_the_current_evaluation(processes: Processes):
    processes.run(MAX_STEPS=4)
    gate = processes.folder.parent / "gate"
    # The second data set is decoded after, and evaluation of it is what waits.
    flags = ["--mode=decode", "--eval_during_decode"]
    (processes.folder / "decode" / "prompts" / "step_00000004.jsonl").unlink()
    follower = processes.start(*flags, SECOND_WAITS_FOR=gate)
    wait_for(follower, processes.record(4).exists)
    follower.send_signal(signal.SIGTERM)
    said(follower, "SIGTERM: leaving")
    gate.touch()
    output = ended(follower, 143)
    assert processes.evaluated("second") == [4]
    assert "decoded step" not in output
    assert "decoded step 4" in processes.run(*flags, SECOND_WAITS_FOR=gate)


@pytest.mark.slow
def test_a_training_job_that_deletes_checkpoints_at_once(processes: Processes):
    follower = processes.start("--mode=eval")
    ended(processes.start(MAX_STEPS=60, MAX_TO_KEEP=1))
    output = ended(follower)
    assert "DAMAGED" not in output
    steps = processes.evaluated()
    assert steps[-1] == 60
    for step in steps:
        assert processes.found(step) == processes.by_training(step)


@pytest.mark.slow
def test_two_processes_follow_together(processes: Processes):
    processes.run()
    outputs = [ended(process) for process in processes.start_two("--mode=eval")]
    assert processes.found(6) == pytest.approx(processes.by_training(6), rel=1e-6)
    assert "heldout: " in outputs[0]
    assert "heldout: " not in outputs[1]
    # One of them is asked to stop, and both leave.
    both = processes.start_two("--mode=eval", "--restore_checkpoint_dir=/nowhere/at/all")
    said(both[0], "waiting for the first checkpoint")
    both[1].send_signal(signal.SIGTERM)
    for process in both:
        ended(process, 143)
