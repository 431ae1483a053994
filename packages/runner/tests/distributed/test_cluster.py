"""Processes that join a job, lose each other, and exchange values."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from layerkit_runner.distributed.cluster import (
    bind_address,
    gather_values,
    run_on_process_0,
)
from layerkit_runner.distributed.peers import LOST_PROCESS_EXIT_CODE

PROCESS = """
import os, sys, threading, time
from pathlib import Path
from layerkit_runner.checkpointing import SaveTimeoutError
from layerkit_runner.errors import StorageError, UsageError
from layerkit_runner.run_options import RunOptions
from layerkit_runner.distributed import watchdog
from layerkit_runner.distributed.cluster import joined

folder, what = sys.argv[1:3]

def listening_addresses():
    links = [os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in links:
                yield words[1].partition(":")[0][-8:]

with joined(RunOptions(job_log_dir=folder)) as process:
    index = process.identity.process
    print("printed by", index)
    os.system(f"echo from a child of {index} >&2")
    print(f"I am {index} of {process.identity.num_processes}", file=sys.stderr, flush=True)
    if index == 0:
        print("listens", *listening_addresses())
        if what == "forced":
            watchdog.forced_exit(70, "it hung")
        if what == "interrupted":
            raise KeyboardInterrupt
        if what in ("error", "timeout"):
            with watchdog.forced_exit_on(SaveTimeoutError, exit_code=1):
                try:
                    while not Path(folder, "killed").exists():
                        time.sleep(0.01)
                    raise RuntimeError("the connection was closed by its peer")
                except RuntimeError as error:
                    kind = SaveTimeoutError if what == "timeout" else StorageError
                    raise kind("step 4 could not be written") from error
    elif what == "fails":
        raise UsageError("the data are gone")
    elif what == "raises":
        raise ZeroDivisionError("a mistake")
    elif what == "aborts":
        os.abort()
    if what == "uneven":
        time.sleep(2 * index)
    elif what != "ends":
        threading.Event().wait()
print("after the job")
"""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


def slurm(port: int, index: int, count: int) -> dict[str, str]:
    return {
        "JAX_COORDINATOR_PORT": str(port),
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": str(count),
        "SLURM_NTASKS": str(count),
        "SLURM_PROCID": str(index),
        "SLURM_LOCALID": str(index),
    }


def torchrun(port: int, index: int, count: int) -> dict[str, str]:
    return {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "RANK": str(index),
        "WORLD_SIZE": str(count),
    }


def start(environs: list[dict[str, str]], *words: object) -> list[subprocess.Popen[str]]:
    return [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, *map(str, words)],
            env={**os.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environ in environs
    ]


def ends(processes: list[subprocess.Popen[str]]) -> list[subprocess.CompletedProcess[str]]:
    """Return how all processes end; those that do not end are killed."""
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *output)
        for process, output in zip(processes, outputs, strict=True)
    ]


def run(count: int, folder: Path, what: str) -> list[subprocess.CompletedProcess[str]]:
    port = free_port()
    return ends(start([torchrun(port, index, count) for index in range(count)], folder, what))


@pytest.fixture
def waiting(tmp_path: Path) -> Callable[..., list[subprocess.Popen[str]]]:
    """Return a function that starts processes and waits until all have joined."""

    def make(what: str, count: int = 3) -> list[subprocess.Popen[str]]:
        port = free_port()
        processes = start([torchrun(port, index, count) for index in range(count)], tmp_path, what)
        logs = [tmp_path / f"logs/process_{index:04d}.log" for index in range(count)]
        deadline = time.monotonic() + 60
        while not all(log.exists() and "I am" in log.read_text() for log in logs):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return processes

    return make


def assert_named(
    processes: list[subprocess.Popen[str]],
    done: list[subprocess.CompletedProcess[str]],
    victim: int,
    text: str,
    code: int = LOST_PROCESS_EXIT_CODE,
) -> None:
    """Check that all processes but one end, and what they report about this one."""
    name = f"process {victim} of {len(done)} (host {socket.gethostname()}"
    for index in {*range(len(done))} - {victim}:
        assert done[index].returncode == code, done
        sentence = rf"runner: {re.escape(name)}, pid {processes[victim].pid}\) {text}"
        assert re.search(sentence, done[index].stderr), done
        assert f"so process {index} ends as well" in done[index].stderr


@pytest.mark.slow
def test_processes_of_slurm_join_one_job(tmp_path: Path):
    port = free_port()
    done = ends(start([slurm(port, index, 2) for index in (0, 1)], tmp_path, "ends"))
    assert [process.returncode for process in done] == [0, 0], done
    assert done[0].stdout.startswith("processes    2, found by Slurm; coordinator ")
    assert f":{port}\n" in done[0].stdout


@pytest.mark.slow
def test_log_has_all_output_and_the_terminal_that_of_process_0_and_errors(tmp_path: Path):
    done = run(2, tmp_path, "ends")
    assert "found by torchrun" in done[0].stdout
    (line,) = [line for line in done[0].stdout.splitlines() if line.startswith("listens")]
    # The loopback interface alone: 127.0.0.1 as the kernel writes it, in IPv4 or mapped to IPv6.
    assert set(line.split()[1:]) == {"0100007F"}
    assert "printed by 0\n" in done[0].stdout
    assert done[0].stdout.endswith("after the job\n")
    assert done[1].stdout == "after the job\n"
    for index in (0, 1):
        log = (tmp_path / f"logs/process_{index:04d}.log").read_text()
        assert log.startswith(f"process {index} of 2 (host {socket.gethostname()}, pid ")
        assert f"printed by {index}\n" in log
        for text in (f"from a child of {index}\n", f"I am {index} of 2\n"):
            assert text in log
            assert text in done[index].stderr


@pytest.mark.slow
def test_processes_that_complete_at_different_times_are_not_lost(tmp_path: Path):
    done = run(3, tmp_path, "uneven")
    assert [process.returncode for process in done] == [0, 0, 0], done
    assert not any("runner:" in process.stderr for process in done)


@pytest.mark.parametrize(
    ("count", "victim", "number"),
    [
        (2, 0, signal.SIGKILL),
        pytest.param(3, 0, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(3, 1, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(3, 0, signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param(3, 2, signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_killed_or_suspended_process_is_named_by_all_others(
    waiting, count: int, victim: int, number: int
):
    processes = waiting("waits", count)
    processes[victim].send_signal(number)
    began = time.monotonic()
    for process in {*processes} - {processes[victim]}:
        process.wait(60)
    assert time.monotonic() - began < 35
    processes[victim].kill()
    assert_named(processes, ends(processes), victim, "is lost: ")


@pytest.mark.parametrize(
    ("what", "victim", "code", "text"),
    [
        pytest.param(
            *("raises", 1, 1, "failed: ZeroDivisionError: a mistake. Every step"),
            marks=pytest.mark.slow,
        ),
        # Process 0 has JAX's coordinator, without which JAX aborts the others.
        pytest.param("forced", 0, 70, "failed: it hung. Every step", marks=pytest.mark.slow),
        pytest.param(
            "interrupted", 0, 130, "failed: interrupted by Ctrl-C", marks=pytest.mark.slow
        ),
        pytest.param("aborts", 1, -signal.SIGABRT, "is lost: ", marks=pytest.mark.slow),
    ],
)
def test_end_of_one_process_is_reported_by_the_other(
    tmp_path: Path, what: str, victim: int, code: int, text: str
):
    port = free_port()
    processes = start([torchrun(port, index, 2) for index in range(2)], tmp_path, what)
    done = ends(processes)
    assert done[victim].returncode == code, done
    # A process that could give a reason gives its exit code, too.
    other_code = code if code > 0 else LOST_PROCESS_EXIT_CODE
    assert_named(processes, done, victim, text, other_code)


def test_failed_process_ends_the_others_with_logs_in_a_local_folder(tmp_path: Path):
    port, folder = free_port(), "gs://bucket/run"
    environs = [{**slurm(port, index, 2), "TMPDIR": str(tmp_path)} for index in (0, 1)]
    done = ends(start(environs, folder, "fails"))
    assert [process.returncode for process in done] == [2, 2], done
    assert "runner: the data are gone\n" in done[1].stderr
    assert "failed: the data are gone. Every step needs all processes" in done[0].stderr
    (local,) = tmp_path.glob("layerkit_logs_*")
    assert f"logs         in {local} of each process's machine, not in {folder}" in done[0].stdout
    assert "runner: the data are gone" in (local / "process_0001.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["error", "timeout"])
def test_failed_save_is_blamed_on_the_process_that_was_lost_in_it(waiting, tmp_path, kind: str):
    processes = waiting(kind)
    processes[1].kill()
    (tmp_path / "killed").touch()
    done = ends(processes)
    assert_named(processes, done, 1, "is lost: ")
    assert "could not be written" not in done[0].stderr


@pytest.mark.slow  # test_launchers.py reads the environments
def test_single_task_keeps_no_log(tmp_path: Path):
    (done,) = ends(start([slurm(free_port(), 0, 1)], tmp_path, "ends"))
    assert (done.returncode, done.stderr) == (0, "from a child of 0\nI am 0 of 1\n")
    assert not list(tmp_path.iterdir())


def test_coordinator_listens_at_the_address_of_its_host_alone(monkeypatch: pytest.MonkeyPatch):
    assert bind_address("localhost:1") == "127.0.0.1:1"
    assert bind_address("127.0.0.1:1") == "127.0.0.1:1"
    for host in ("192.0.2.1", "no-such-host.invalid"):  # an address may be that of a router
        assert bind_address(f"{host}:1") is None
    # Debian has `127.0.1.1 NAME` in /etc/hosts, where other machines know the real address.
    for known, ips, bound in (
        (True, ["127.0.1.1"], None),
        (True, ["127.0.0.2", "192.0.2.1"], None),
        (False, ["127.0.0.2"], "127.0.0.2:1"),
    ):
        entries = [(2, 1, 6, "", (ip, 0)) for ip in ips]
        monkeypatch.setattr("socket.getaddrinfo", lambda *_, entries=entries: entries)
        monkeypatch.setattr("ipaddress.IPv4Address.is_loopback", known)
        assert bind_address("node1:1") == bound


EXCHANGE = """
import sys
import jax

index, address = int(sys.argv[1]), sys.argv[2]
jax.distributed.initialize(address, 2, index)
from layerkit_runner.distributed.cluster import run_on_process_0, gather_values

values = [None, {"a": [1, "ä", "x" * 1000]}]
assert gather_values(values[index]) == values
assert gather_values(index) == [0, 1]
made = []
assert run_on_process_0(lambda: made.append(index) or {"bleu": 0.5}) == {"bleu": 0.5}
assert made == ([0] if index == 0 else [])
try:
    run_on_process_0(lambda: {}["nowhere"])
except Exception as error:
    print(type(error).__name__, error)
jax.distributed.shutdown()
"""


def test_processes_exchange_values_and_errors():
    address = f"localhost:{free_port()}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", EXCHANGE, str(index), address],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    assert "KeyError 'nowhere'" in outputs[0]
    assert "ValueError process 0: KeyError: 'nowhere'" in outputs[1]


def test_single_process_exchanges_nothing():
    assert gather_values({1, 2}) == [{1, 2}]
    assert run_on_process_0(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        run_on_process_0(lambda: 1 / 0)
