"""Peer monitors beside processes that are killed, stopped or fail.

The processes only wait, so that no compiled library reports first.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

EXIT_CODE = 75
PROCESS = """
import os, socket, sys, warnings
from pathlib import Path
from layerkit_runner.distributed.watchdog import Identity
from layerkit_runner.distributed.peer_monitor.start import PeerMonitor

index, count, port, fd, hub_pid = map(int, sys.argv[1:6])
folder = sys.argv[6]
monitor = PeerMonitor(
    Identity(index, count, f"host{index}", os.getpid()),
    hub_address=("127.0.0.1", port),
    hub=Identity(0, count, "host0", hub_pid),
    listener=socket.socket(fileno=fd) if index == 0 else None,
    key=b"secret of the job",
    log=Path(folder) / f"process_{index:04d}.log",
    exit_code=75,
)
print("printed by", index)
print("WARNING:a notice of", index, file=sys.stderr)
warnings.warn(f"a warning of {index}")
os.system("echo from a child of " + str(index) + " >&2")
for word in sys.stdin:
    word = word.strip()
    if word == "fail":
        print("my own words", file=sys.stderr)
        monitor.failed("its data is gone")
        os._exit(2)
    if word == "print":
        print("printed late")
        Path(folder, "printed").touch()
    if word == "abort":
        os.abort()
    if word == "leave":
        monitor.close()
        print("after the monitor")
        sys.exit(0)
"""


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def thread_states(pid: int) -> set[str]:
    """Return the states of the threads of a process, such as `S` (sleeps) and `T` (stopped)."""
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return {stat.rpartition(")")[2].split()[0] for stat in stats}


def spawn(*words: object, listener: int = 0) -> subprocess.Popen[str]:
    """Start a process with (number, number of processes, port, listener, hub's pid, folder)."""
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS, *map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=[listener] if listener else [],
    )


class Group:
    """Processes with peer monitors."""

    def __init__(self, count: int, folder: Path, *, started: int) -> None:
        self.folder = folder
        self.count = count
        self.processes: list[subprocess.Popen[str]] = []
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._port = listener.getsockname()[1]
            self.start(listener.fileno())
        for _ in range(1, started):
            self.start()
        for index in range(started):
            self.wait_for_log(index, f"from a child of {index}")

    def start(self, listener: int = 0) -> None:
        """Start the next process; process 0 with the socket of the hub."""
        index = len(self.processes)
        hub_pid = self.processes[0].pid if index else 0
        words = (index, self.count, self._port, listener, hub_pid, self.folder)
        self.processes.append(spawn(*words, listener=listener))

    def wait_for_log(self, index: int, text: str) -> None:
        wait_until(lambda: self.log(index).exists() and text in self.log(index).read_text())

    def monitor(self, index: int) -> int:
        """Return the process number of a peer monitor."""
        pid = self.processes[index].pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        (monitor,) = (
            int(child)
            for child in children
            if b"peer_monitor" in Path(f"/proc/{child}/cmdline").read_bytes()
        )
        return monitor

    def kill_monitor(self, index: int) -> None:
        os.kill(self.monitor(index), signal.SIGKILL)

    def log(self, index: int) -> Path:
        return self.folder / f"process_{index:04d}.log"

    def tell(self, index: int, word: str) -> None:
        stdin = self.processes[index].stdin
        assert stdin is not None
        stdin.write(word + "\n")
        stdin.flush()

    def end(self, index: int) -> tuple[int, str, str]:
        """Return the exit code, standard output and standard error."""
        process = self.processes[index]
        process.wait(timeout=60)
        assert process.stdout is not None
        assert process.stderr is not None
        return process.returncode, process.stdout.read(), process.stderr.read()

    def assert_others_end(self, victim: int, text: str) -> None:
        """Check that all processes but one end, and what they report about this one."""
        for index in {*range(self.count)} - {victim}:
            code, _, error = self.end(index)
            assert code == EXIT_CODE
            assert f"runner: {self.name(victim)} {text}" in error
            assert self.name(victim) in self.log(index).read_text()

    def name(self, index: int) -> str:
        pid = self.processes[index].pid
        return f"process {index} of {self.count} (host host{index}, pid {pid})"


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Callable[..., Group]]:
    groups: list[Group] = []

    def make(count: int, started: int | None = None) -> Group:
        groups.append(Group(count, tmp_path, started=count if started is None else started))
        return groups[-1]

    yield make
    for made in groups:
        for process in made.processes:
            process.kill()
            for stream in (process.stdin, process.stdout, process.stderr):
                assert stream is not None
                stream.close()
            process.wait()


def kill(processes: Group, victim: int) -> None:
    processes.processes[victim].kill()


def kill_with_monitor(processes: Group, victim: int) -> None:
    processes.kill_monitor(victim)
    processes.processes[victim].kill()


def abort(processes: Group, victim: int) -> None:
    processes.tell(victim, "abort")


@pytest.mark.parametrize(
    ("count", "victim", "end", "number"),
    [
        (4, 0, kill, signal.SIGKILL),
        pytest.param(4, 2, kill, signal.SIGKILL, marks=pytest.mark.slow),
        (3, 0, kill_with_monitor, signal.SIGKILL),
        pytest.param(2, 0, abort, signal.SIGABRT, marks=pytest.mark.slow),
    ],
)
def test_lost_process_is_named_by_all_others(
    group: Callable[[int], Group],
    count: int,
    victim: int,
    end: Callable[[Group, int], None],
    number: int,
):
    processes = group(count)
    end(processes, victim)
    assert processes.end(victim)[0] == -number
    processes.assert_others_end(victim, "ended without a report")


def test_reason_of_a_failed_process_is_reported_by_the_others(group: Callable[[int], Group]):
    processes = group(3)
    processes.tell(1, "fail")
    code, _, error = processes.end(1)
    assert code == 2
    assert "my own words" in error
    assert "runner:" not in error
    processes.assert_others_end(1, "failed: its data is gone. Every step")


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_killed_monitor_ends_its_process_and_all_others(group: Callable[[int], Group], victim: int):
    processes = group(3)
    processes.kill_monitor(victim)
    code, _, error = processes.end(victim)
    assert code == EXIT_CODE
    lost = f"runner: {processes.name(victim)} lost its peer monitor, which ended with signal 9"
    assert lost in error
    assert "lost its peer monitor" in processes.log(victim).read_text()
    processes.assert_others_end(victim, "ended without a report")


def test_output_of_a_process_is_complete_when_its_monitor_is_killed(group: Callable[[int], Group]):
    processes = group(1)
    monitor = processes.monitor(0)
    os.kill(monitor, signal.SIGSTOP)
    # A thread that has not stopped yet could still read the line, which would end with it.
    wait_until(lambda: thread_states(monitor) == {"T"})
    processes.tell(0, "print")
    wait_until((processes.folder / "printed").exists)
    os.kill(monitor, signal.SIGKILL)
    code, output, error = processes.end(0)
    assert code == EXIT_CODE
    assert "printed late" in output
    assert "Traceback" not in error


@pytest.mark.slow
def test_processes_with_equal_failures_report_their_own(group: Callable[[int], Group]):
    processes = group(2)
    for index in (0, 1):
        processes.tell(index, "fail")
    for index in (0, 1):
        code, _, error = processes.end(index)
        assert code == 2
        assert "runner:" not in error


def test_stopped_process_is_named_and_killed(group: Callable[[int], Group]):
    processes = group(3)
    processes.processes[1].send_signal(signal.SIGSTOP)
    processes.assert_others_end(1, "is stalled: it has been stopped for 15 s")
    assert processes.end(1)[0] == -signal.SIGKILL


def test_completed_processes_are_not_lost(group: Callable[[int], Group]):
    processes = group(3)
    for index in (2, 0, 1):
        processes.tell(index, "leave")
        code, output, error = processes.end(index)
        assert code == 0
        assert "runner:" not in error
        assert output.endswith("after the monitor\n")


@pytest.mark.slow
def test_process_that_connects_after_process_0_is_done_completes(group: Callable[..., Group]):
    processes = group(2, started=1)
    processes.tell(0, "leave")
    assert processes.processes[0].wait(timeout=60) == 0
    processes.start()
    processes.tell(1, "leave")
    for index in (1, 0):
        code, _, error = processes.end(index)
        assert (code, "runner:" in error) == (0, False), error


def test_terminal_shows_process_0_and_errors_of_the_others(group: Callable[[int], Group]):
    processes = group(2)
    for index in (1, 0):
        processes.tell(index, "leave")
    seen = [processes.end(index) for index in (0, 1)]
    assert seen[0][1].startswith("printed by 0\n")
    assert seen[1][1] == "after the monitor\n"
    assert "a notice of 0" in seen[0][2]
    assert "a warning of 0" in seen[0][2]
    assert seen[1][2] == "from a child of 1\n"
    for index in (0, 1):
        lines = processes.log(index).read_text().splitlines()
        pid = processes.processes[index].pid
        assert f"process {index} of 2 on host{index}, pid {pid}: " in lines[0]
        texts = {line[len("2026-01-01 00:00:00.000 ") :] for line in lines[1:]}
        words = (f"printed by {index}", f"WARNING:a notice of {index}", f"from a child of {index}")
        assert f"UserWarning: a warning of {index}" in processes.log(index).read_text()
        assert texts >= set(words)


def test_blocked_log_does_not_delay_the_terminal(tmp_path: Path):
    os.mkfifo(tmp_path / "process_0000.log")
    os.mkfifo(tmp_path / "process_0001.log")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number = listener.fileno()
        words = (2, listener.getsockname()[1], number, os.getpid(), tmp_path)
        processes = [spawn(index, *words, listener=number) for index in (0, 1)]
    assert processes[0].stdout is not None
    assert processes[0].stdout.readline() == "printed by 0\n"
    output, error = processes[1].communicate("fail\n", timeout=60)
    assert (processes[1].returncode, output) == (2, "")
    assert "my own words" in error
    assert processes[0].wait(timeout=60) == EXIT_CODE
    assert "failed: its data is gone" in processes[0].communicate()[1]


def test_process_that_cannot_reach_the_hub_prints_a_warning(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    process = spawn(1, 2, port, 0, os.getpid(), tmp_path)
    _, error = process.communicate("leave\n", timeout=60)
    assert process.returncode == 0
    assert f"runner: process 1 cannot reach process 0 at 127.0.0.1:{port}" in error
