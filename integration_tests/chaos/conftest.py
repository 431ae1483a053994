"""Fixtures that kill a run repeatedly at observed moments and check its folder.

`Turn` is one start of the command, as one process or several. It pauses all of them while it checks
their progress, so a kill inside a save or an evaluation is certainly inside. `Chaos` is a run of
many turns with checks after each.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from etils import epath

from layerkit_runner.checkpointing import CheckpointPolicy, folders
from layerkit_runner.checkpointing.policy import SavedStep, read_evaluations
from layerkit_runner.observers import read_metrics
from layerkit_runner.tools import checkpoints as checkpoints_tool

WHERE_JOBS_START = Path(__file__).parents[1]  # where experiments of these tests are found
SECONDS_TO_MOVE = 300.0
EVAL_INTERVAL = 5
BEST = "heldout/loss"
POLICY = CheckpointPolicy(
    save_interval_steps=EVAL_INTERVAL,
    max_to_keep=3,
    keep_interval=None,
    keep_interval_steps=25,
    best_metric=BEST,
)
FIELDS = {
    "DROPOUT_RATE": 0.1,  # makes the random numbers part of the result
    "EVAL_INTERVAL_STEPS": EVAL_INTERVAL,
    "CHECKPOINT_EVERY_N_STEPS": POLICY.save_interval_steps,
    "CHECKPOINT_MAX_TO_KEEP": POLICY.max_to_keep,
    "task.train.save_keep_interval_steps": POLICY.keep_interval_steps,
    "task.train.save_best_metric": f"'{BEST}'",
}
# Contents of the folder of a committed checkpoint in any format.
PARTS = ("_CHECKPOINT_METADATA", "state", "input_states", "metadata", "integrity/manifest.json")


@dataclasses.dataclass(frozen=True)
class Kill:
    """A signal to one process of a turn.

    Attributes:
      moment: `start`, `step`, `save`, `deletion`, `evaluation` or `end`.
      signal: Signal to send.
      victim: Index of the process.
      steps: Number of steps of the turn before the moment.
      delay: Additional seconds to wait.
    """

    moment: str
    signal: signal.Signals
    victim: int = 0
    steps: int = 1
    delay: float = 0.0


class Turn:
    """One start of the command.

    Args:
      job: What to run.
      count: As how many processes.
      outputs: Where what they print is kept.

    Attributes:
      resumed_from: Step that it resumed from; None before its report.
      trained: Reported training steps, in order.
      evaluated: Steps with a reported evaluation.
      seconds_to_notice: Seconds from the end of a lost process to the end of all others.
    """

    def __init__(self, job: Any, count: int, outputs: Path):
        self.resumed_from: int | None = None
        self.trained: list[int] = []
        self.evaluated: list[int] = []
        self.seconds_to_notice = 0.0
        self._job = job
        self._log = job.folder / "metrics.jsonl"
        before = self._log.read_bytes() if self._log.exists() else b""
        self._offset = before.rfind(b"\n") + 1
        outputs.mkdir(parents=True)
        self._outputs = [outputs / f"process_{index}.txt" for index in range(count)]
        meeting = [[] for _ in range(count)]
        if count > 1:
            address = f"--coordinator_address=localhost:{free_port()}"
            meeting = [
                [address, f"--num_processes={count}", f"--process_id={index}"]
                for index in range(count)
            ]
        self.processes = []
        for path, flags in zip(self._outputs, meeting, strict=True):
            with path.open("w") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "layerkit_runner.cli", *job.arguments(*flags)],
                    cwd=WHERE_JOBS_START,
                    env=job.environment(),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            self.processes.append(process)

    @property
    def output(self) -> str:
        """Return the output of all processes."""
        return "\n".join(path.read_text(errors="replace") for path in self._outputs)

    def look(self) -> None:
        """Read the records since the last call."""
        if not self._log.exists():
            return
        with self._log.open("rb") as log:
            log.seek(self._offset)
            lines = log.read()
        lines = lines[: lines.rfind(b"\n") + 1]
        self._offset += len(lines)
        for record in map(json.loads, lines.splitlines()):
            if "event" in record:
                self.resumed_from = record.get("step", self.resumed_from)
            elif "dataset" in record:
                self.evaluated.append(record["step"])
            else:
                self.trained.append(record["step"])

    def is_at(self, moment: str) -> bool:
        """Return whether the turn is at the moment now."""
        self.look()
        if moment == "save":
            return any(self._job.checkpoints.glob("*orbax-checkpoint-tmp*"))
        if moment == "deletion":
            return bool(half_deleted(self._job.checkpoints))
        if moment == "evaluation":
            newest = self.trained[-1]
            return newest % EVAL_INTERVAL == 0 and newest not in self.evaluated
        return True

    def wait_for(self, condition: Callable[[], Any]) -> bool:
        """Wait until `condition` holds; return False if a process ended before."""
        deadline = time.monotonic() + SECONDS_TO_MOVE
        while all(process.poll() is None for process in self.processes):
            if condition():
                return True
            if time.monotonic() > deadline:
                raise TimeoutError(self.output)
            time.sleep(0.002)
        return False

    def strike(self, kill: Kill, num_steps: int) -> str | None:
        """Wait for the moment and send the signal.

        Returns:
          The moment, which is `step` if a kill at the start was late; None if a process had ended.
        """
        if kill.moment == "start":
            begun = time.monotonic()
            self.wait_for(lambda: time.monotonic() - begun > kill.delay or self._has_trained(1))
        elif kill.moment == "end":
            if not self.wait_for(lambda: self._has_come_to(num_steps)):
                return None
            time.sleep(kill.delay)
        else:
            if not self.wait_for(lambda: self._has_trained(kill.steps)):
                return None
            time.sleep(kill.delay)
        while self.wait_for(lambda: self.is_at(kill.moment)):
            with self._held():
                if self.is_at(kill.moment):
                    self.processes[kill.victim].send_signal(kill.signal)
                    is_late = kill.moment == "start" and self.trained
                    return "step" if is_late else kill.moment
        return None

    def end(self, lost: int | None = None) -> list[int]:
        """Wait until all processes have ended; return their exit codes.

        Before the cluster is initialized, a process cannot detect that another is lost. In that
        case this method kills the others, as a launcher does.

        Args:
          lost: Index of the killed process, if any.
        """
        try:
            if lost is not None:
                self.processes[lost].wait(SECONDS_TO_MOVE)
                if "; coordinator " not in self.output:
                    self.kill()
            begun = time.monotonic()
            codes = [process.wait(SECONDS_TO_MOVE) for process in self.processes]
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(self.output) from error
        if lost is not None:
            self.seconds_to_notice = time.monotonic() - begun
        self.look()
        return codes

    def kill(self) -> None:
        """Kill all processes."""
        for process in self.processes:
            process.kill()
            process.wait()

    def _has_trained(self, steps: int) -> bool:
        self.look()
        return len(self.trained) >= steps

    def _has_come_to(self, step: int) -> bool:
        self.look()
        return step in (self.resumed_from, *self.trained[-1:])

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Pause all processes within the block; signals are delivered at its end."""
        for process in self.processes:
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        try:
            yield
        finally:
            for process in self.processes:
                process.send_signal(signal.SIGCONT)


class Chaos:
    """A run of many killed turns, with checks after each.

    Args:
      job: Job to run.
      count: Number of processes.
      outputs: Folder of the outputs of the processes.
      reference: Uninterrupted run of the same job.

    Attributes:
      history: One line per turn.
      kills: Number of kills by moment and signal.
    """

    def __init__(self, job: Any, count: int, outputs: Path, reference: Reference):
        self.history: list[str] = []
        self.kills: collections.Counter[tuple[str, str]] = collections.Counter()
        self.slowest_notice = 0.0
        self._job = job
        self._count = count
        self._outputs = outputs
        self._reference = reference
        self._committed: set[int] = set()

    def turn(self, kill: Kill | None) -> bool:
        """Start the command and kill it; without a kill it must end successfully.

        Returns:
          Whether the signal reached a running process.
        """
        left = sorted(self._job.checkpoints.glob("*orbax-checkpoint-tmp*"))
        newest = max(folders.committed_steps(epath.Path(self._job.checkpoints)), default=0)
        turn = Turn(self._job, self._count, self._outputs / f"turn_{len(self.history):03d}")
        moment = None
        try:
            if kill is not None:
                moment = turn.strike(kill, self._reference.num_steps)
            is_lost = moment is not None and kill.signal == signal.SIGKILL
            codes = turn.end(kill.victim if is_lost else None)
        finally:
            turn.kill()
        self._note(turn, kill, moment, codes)
        if turn.resumed_from is not None:
            assert turn.resumed_from == newest, "a committed step was lost"
            for path in left:
                assert f"Deleted the unfinished checkpoint {path} " in turn.output
        self._check_checkpoints()
        check_codes(codes, kill, moment, turn.output)
        return moment is not None

    def _note(self, turn: Turn, kill: Kill | None, moment: str | None, codes: list[int]) -> None:
        self.slowest_notice = max(self.slowest_notice, turn.seconds_to_notice)
        steps = f"{turn.trained[0]} to {turn.trained[-1]}" if turn.trained else "none"
        what = "to the end"
        if kill is not None:
            what = f"{kill.signal.name} to process {kill.victim}, {moment or 'after the end'}"
        if moment is not None:
            self.kills[moment, kill.signal.name] += 1
        saved = folders.committed_steps(epath.Path(self._job.checkpoints))
        line = f"{len(self.history):3d}: {what}; steps {steps}; exit codes {codes}; saved {saved}"
        self.history.append(line)
        print(line, flush=True)

    def _check_checkpoints(self) -> None:
        """Assert that every committed step that the policy keeps exists and is intact."""
        verified = verify(self._job)
        self._committed |= verified.keys()
        began = datetime.datetime.fromtimestamp(0, datetime.UTC)
        losses = self._reference.held_out
        ever = [
            SavedStep(step, began, {BEST: losses[step]} if step in losses else {})
            for step in self._committed
        ]
        expected = POLICY.steps_to_keep(ever)
        assert all(verified.get(step) for step in expected), (sorted(expected), verified)
        known = read_evaluations(epath.Path(self._job.checkpoints))
        for step in expected & losses.keys() - {self._reference.num_steps}:
            assert known[step][BEST] == losses[step]


@dataclasses.dataclass(frozen=True)
class Reference:
    """An uninterrupted run.

    Attributes:
      job: Job of the run.
      num_steps: Number of training steps.
      held_out: Loss of each evaluation by step.
      seconds_to_first_step: Seconds from the start of the command to the first step.
      seconds_at_end: Seconds from the report of the last step to the end of the command.
    """

    job: Any
    num_steps: int
    held_out: Mapping[int, float]
    seconds_to_first_step: float
    seconds_at_end: float


def run_reference(job: Any, count: int, outputs: Path, num_steps: int) -> Reference:
    """Run a job to its end and measure it."""
    begun = time.monotonic()
    turn = Turn(job, count, outputs / "reference")
    try:
        turn.wait_for(lambda: turn.is_at("step") and turn.trained)
        first = time.monotonic()
        turn.wait_for(lambda: turn.is_at("step") and turn.trained[-1] == num_steps)
        last = time.monotonic()
        codes = turn.end()
    finally:
        turn.kill()
    assert codes == [0] * count, turn.output
    records = read_metrics(job.folder).evals["heldout"]
    held_out = {record["step"]: record["loss"] for record in records}
    return Reference(job, num_steps, held_out, first - begun, time.monotonic() - last)


def check_codes(codes: list[int], kill: Kill | None, moment: str | None, output: str) -> None:
    """Assert that the exit codes of the processes fit the kill."""
    if kill is None or moment is None:
        assert codes == [0] * len(codes), output
    elif kill.signal == signal.SIGKILL:
        others = [code for index, code in enumerate(codes) if index != kill.victim]
        assert codes[kill.victim] == -signal.SIGKILL
        # After the last step, another process may have ended before.
        assert moment == "end" or all(code != 0 for code in others), output
    else:
        # Before the handler is installed, the default action ends the process. After the last step,
        # the process completes.
        allowed = {128 + signal.SIGTERM}
        allowed |= {"start": {-signal.SIGTERM}, "end": {0}}.get(moment, set())
        assert codes[kill.victim] in allowed, output


def verify(job: Any) -> dict[int, bool]:
    """Return whether each committed step is intact, as `runner checkpoints verify` reports."""
    if not folders.committed_steps(epath.Path(job.checkpoints)):
        return {}
    with contextlib.redirect_stdout(io.StringIO()) as said:
        checkpoints_tool.main(["verify", str(job.folder)])
    lines = [line for line in said.getvalue().splitlines() if line.startswith("step ")]
    return {int(line.split()[1].rstrip(":")): line.endswith(": intact") for line in lines}


def half_deleted(checkpoints: Path) -> list[Path]:
    """Return the folders of steps whose deletion has begun."""
    steps = folders.committed_steps(epath.Path(checkpoints))
    paths = [Path(folders.step_folder(epath.Path(checkpoints), step)) for step in steps]
    return [
        path
        for path in paths
        if path.exists() and not all((path / part).exists() for part in PARTS)
    ]


def free_port() -> int:
    """Return a free TCP port."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


@dataclasses.dataclass(frozen=True)
class Driver:
    """The classes and functions of this file for the tests of this folder."""

    fields: Mapping[str, Any]
    kill: type[Kill] = Kill
    chaos: type[Chaos] = Chaos
    run_reference: Callable[..., Reference] = run_reference


@pytest.fixture(scope="session")
def driver() -> Driver:
    return Driver(FIELDS)
