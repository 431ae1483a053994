"""Processes that join a job, the interfaces they listen at, and their exchange of values."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from layerkit_runner.distributed.cluster import (
    bind_address,
    gather_values,
    listen,
    run_on_process_0,
)

PROCESS = """
import os, signal, sys, time
from pathlib import Path
from layerkit_runner.checkpointing import SaveTimeoutError
from layerkit_runner.errors import StorageError, UsageError
from layerkit_runner.run_options import RunOptions
from layerkit_runner.distributed import watchdog
from layerkit_runner.distributed.cluster import joined

def print_surroundings():
    own = os.getpid()
    children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
    for pid in [own, *children]:
        links = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and f"socket:[{words[9]}]" in links:
                    print("listens", words[1].partition(":")[0], file=sys.stderr)
    for pid in children:
        print("arguments", Path(f"/proc/{pid}/cmdline").read_bytes(), file=sys.stderr)

with joined(RunOptions(job_log_dir=sys.argv[1])) as process:
    if process.identity.process == 0 and "--listeners" in sys.argv:
        print_surroundings()
    print(f"I am {process.identity.process} of {process.identity.num_processes}", file=sys.stderr)
    if "forced" in sys.argv and process.identity.process == 0:
        watchdog.print_error("hung")
        watchdog.notify_others("it hung")
        watchdog.exit_now(70)
    if "fails" in sys.argv and process.identity.process == 1:
        raise UsageError("the data are gone")
    broken = Path(sys.argv[1]) / "broken"
    if "saves" in sys.argv and process.identity.process == 0:
        broken.touch()
        with watchdog.forced_exit_on(SaveTimeoutError, exit_code=1):
            try:
                raise RuntimeError("the connection was closed by its peer")
            except RuntimeError as error:
                kind = SaveTimeoutError if "timeout" in sys.argv else StorageError
                raise kind("step 4 could not be written") from error
    if "saves" in sys.argv:
        while not broken.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    if "fails" in sys.argv or "forced" in sys.argv:
        import threading
        threading.Event().wait()
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
        "SLURM_NTASKS": str(count),
        "SLURM_PROCID": str(index),
        "SLURM_LOCALID": str(index),
        "SLURM_NODEID": "0",
    }


def open_mpi(port: int, index: int, count: int) -> dict[str, str]:
    return {
        "JAX_COORDINATOR_PORT": str(port),
        "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911",
        "OMPI_COMM_WORLD_SIZE": str(count),
        "OMPI_COMM_WORLD_RANK": str(index),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(index),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(count),
    }


def torchrun(port: int, index: int, count: int) -> dict[str, str]:
    return {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "RANK": str(index),
        "WORLD_SIZE": str(count),
    }


def run(environs: list[dict[str, str]], *words: str) -> list[subprocess.CompletedProcess[str]]:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, *words],
            env={**os.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environ in environs
    ]
    try:
        ends = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *end)
        for process, end in zip(processes, ends, strict=True)
    ]


@pytest.mark.parametrize(
    ("launcher", "name"),
    [
        (slurm, "Slurm (job 4711)"),
        pytest.param(open_mpi, "Open MPI", marks=pytest.mark.slow),
        pytest.param(torchrun, "the launcher", marks=pytest.mark.slow),
    ],
)
def test_processes_of_each_launcher_join_one_job(tmp_path: Path, launcher, name: str):
    port = free_port()
    done = run([launcher(port, index, 2) for index in (0, 1)], str(tmp_path))
    assert [process.returncode for process in done] == [0, 0], done
    start = f"processes    2, found by {name}; coordinator "
    assert done[0].stdout.startswith(start)
    assert f":{port}\n" in done[0].stdout
    for index in (0, 1):
        assert f"I am {index} of 2\n" in done[index].stderr
        assert f"I am {index} of 2\n" in (tmp_path / f"logs/process_{index:04d}.log").read_text()


@pytest.mark.slow
def test_job_on_one_machine_listens_at_loopback_only_and_hides_its_key(tmp_path: Path):
    port = free_port()
    environs = [torchrun(port, index, 2) for index in (0, 1)]
    done = run(environs, str(tmp_path), "--listeners")
    assert [process.returncode for process in done] == [0, 0], done
    lines = done[0].stderr.splitlines()
    # JAX's coordinator and the hub, as the kernel writes 127.0.0.1, in IPv4 or mapped to IPv6.
    listening = {line.split()[1][-8:] for line in lines if line.startswith("listens")}
    assert listening == {"0100007F"}
    (arguments,) = [line for line in lines if line.startswith("arguments")]
    assert "key" not in arguments


def test_single_slurm_task_starts_no_peer_monitor(tmp_path: Path):
    (done,) = run([slurm(free_port(), 0, 1)], str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "I am 0 of 1\n")
    assert not list(tmp_path.iterdir())


def test_failed_process_ends_the_others_with_logs_in_a_local_folder(tmp_path: Path):
    port, folder = free_port(), "gs://bucket/run"
    environs = [{**slurm(port, index, 2), "TMPDIR": str(tmp_path)} for index in (0, 1)]
    done = run(environs, folder, "fails")
    assert [process.returncode for process in done] == [75, 2], done
    assert "runner: the data are gone\n" in done[1].stderr
    assert "failed: the data are gone. Every step needs all processes" in done[0].stderr
    (local,) = tmp_path.glob("layerkit_logs_*")
    assert f"logs         in {local} of each process's machine, not in {folder}" in done[0].stdout
    assert "runner: the data are gone" in (local / "process_0001.log").read_text()


def test_forced_exit_of_process_0_is_reported_by_the_others(tmp_path: Path):
    port = free_port()
    done = run([torchrun(port, index, 2) for index in (0, 1)], str(tmp_path), "forced")
    # Process 0 has JAX's coordinator, without which JAX aborts the others.
    assert [process.returncode for process in done] == [70, 75], done
    assert "failed: it hung. Every step needs all processes" in done[1].stderr


@pytest.mark.parametrize("kind", ["error", "timeout"])
def test_failed_save_is_blamed_on_the_process_that_was_lost_in_it(tmp_path: Path, kind: str):
    port = free_port()
    environs = [torchrun(port, index, 2) for index in (0, 1)]
    done = run(environs, str(tmp_path), "saves", kind)
    assert [process.returncode for process in done] == [75, -9], done
    assert "process 1 of 2" in done[0].stderr and "ended without a report" in done[0].stderr
    assert "could not be written" not in done[0].stderr


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_loopback_host_is_bound_alone(host: str):
    assert bind_address(host) == "127.0.0.1"
    with listen(host, backlog=1) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_host_that_is_not_an_address_of_this_machine_listens_everywhere(host: str):
    assert bind_address(host) == "::"


def test_name_that_means_loopback_only_here_listens_everywhere(monkeypatch: pytest.MonkeyPatch):
    """Debian has `127.0.1.1 NAME` in /etc/hosts, where other machines know the real address."""
    entry = (2, 1, 6, "", ("127.0.1.1", 0))
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: [entry])
    assert bind_address("node1") == "::"


EXCHANGE = """
import sys
import jax

index, address = int(sys.argv[1]), sys.argv[2]
jax.distributed.initialize(address, 3, index)
from layerkit_runner.distributed.cluster import run_on_process_0, gather_values

values = [None, {"a": [1, "ä"]}, "x" * 1000]
assert gather_values(values[index]) == values
assert gather_values(index) == [0, 1, 2]
made = []
assert run_on_process_0(lambda: made.append(index) or {"bleu": 0.5}) == {"bleu": 0.5}
assert made == ([0] if index == 0 else [])
try:
    run_on_process_0(lambda: {}["nowhere"])
except Exception as error:
    print(type(error).__name__, error)
jax.distributed.shutdown()
"""


def test_three_processes_exchange_values_and_errors():
    address = f"localhost:{free_port()}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", EXCHANGE, str(index), address],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(3)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], "\n".join(outputs)
    assert "KeyError 'nowhere'" in outputs[0]
    for output in outputs[1:]:
        assert "ValueError process 0: KeyError: 'nowhere'" in output


def test_single_process_exchanges_nothing():
    assert gather_values({1, 2}) == [{1, 2}]
    assert run_on_process_0(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        run_on_process_0(lambda: 1 / 0)
