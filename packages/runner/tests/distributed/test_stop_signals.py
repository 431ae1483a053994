"""Signals to a process in its loop."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from layerkit_runner.distributed.stop_signals import StopSignals

# Says when it is ready and when it has seen a signal; stops at SIGTERM or after "leave".
LOOP = """
import sys, time
from layerkit_runner.distributed.stop_signals import StopSignals
with StopSignals() as signals:
    print("ready", flush=True)
    while not signals.agreed_now():
        if signals.saves:
            signals.saves = False
            print("saves", flush=True)
        time.sleep(0.01)
    print("saw", signals.received.name, flush=True)
    if "stubborn" in sys.argv:
        time.sleep(60)
sys.exit(signals.exit_code)
"""


@pytest.fixture
def start() -> Iterator:
    processes = []

    def run(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", LOOP, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield run
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.slow  # interface/test_training.py has one such end
@pytest.mark.parametrize(
    ("number", "code", "hint"),
    [
        (signal.SIGINT, 130, "; press Ctrl-C again to exit at once"),
        (signal.SIGTERM, 143, ""),
        (signal.SIGHUP, 129, ""),
    ],
)
def test_first_signal_ends_the_loop_after_its_step(start, number: int, code: int, hint: str):
    process = start()
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    name = signal.Signals(number).name
    assert (process.returncode, stdout) == (code, f"saw {name}\n")
    assert stderr.strip() == f"{name}: finishing this step, saving, leaving{hint}"


@pytest.mark.slow
def test_hangup_is_ignored_under_nohup(start):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited
    try:
        process = start()
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (143, "saw SIGTERM\n")
    assert "SIGHUP" not in stderr


@pytest.mark.slow
def test_closed_terminal_stops_the_loop_and_drops_its_output():
    terminal, end = pty.openpty()
    take_terminal = "import fcntl, termios; fcntl.ioctl(2, termios.TIOCSCTTY, 0)\n"
    loop = LOOP.replace('    print("saw', "    print('here', file=sys.stderr)\n    print(\"saw")
    assert loop != LOOP
    process = subprocess.Popen(
        [sys.executable, "-c", take_terminal + loop],
        stdout=subprocess.PIPE,
        stderr=end,
        text=True,
        start_new_session=True,
    )
    os.close(end)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.close(terminal)
    assert process.communicate(timeout=60)[0] == "saw SIGHUP\n"
    assert process.returncode == 129


@pytest.mark.slow  # one save is in the next test
def test_sigusr1_requests_one_save_and_the_loop_continues(start):
    process = start("saves")
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline() == "saves\n"
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline() == "saves\n"
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (143, "saw SIGTERM\n")
    assert stderr.count("SIGUSR1: saving after this step\n") == 2


@pytest.mark.parametrize(
    "first", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM]
)
def test_second_sigterm_is_ignored_and_later_ctrl_c_exits_at_once(start, first: signal.Signals):
    process = start("stubborn")
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline() == "saves\n"
    process.send_signal(first)
    assert process.stdout.readline() == f"saw {first.name}\n"
    if first == signal.SIGTERM:
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130


def test_signal_during_a_print_is_handled(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """Python's streams are not reentrant, so the handler does not use them."""

    class Interrupted(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data: bytes) -> int:
            signal.raise_signal(signal.SIGTERM)
            return len(data)

    stream = io.TextIOWrapper(io.BufferedWriter(Interrupted()), write_through=True)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, stream)
    with StopSignals() as signals:
        print("a line", flush=True)
    assert signals.received is signal.SIGTERM
    assert "SIGTERM: finishing this step" in capfd.readouterr().err


# Sends a signal to a forked child, which outlives the loop unless the signal ends it.
FORK = """
import os, signal, sys, threading, time
from layerkit_runner.distributed.stop_signals import StopSignals
number = signal.Signals[sys.argv[1]]
children = []
reader, writer = os.pipe()
def fork():
    children.append(os.fork())
    if children[-1] == 0:
        os.write(writer, b"1")  # what it inherits is undone
        os.close(1)
        os.close(2)
        time.sleep(60)
        os._exit(7)
with StopSignals() as signals:
    thread = threading.Thread(target=fork)  # as a reader of an input may
    thread.start()
    thread.join()
    (child,) = children
    os.read(reader, 1)
    os.kill(child, number)
    if number == signal.SIGTERM:
        print("child ended with", os.waitpid(child, 0)[1], flush=True)
    time.sleep(0.5)
    received = signals.received
print("received", received, flush=True)
if number != signal.SIGTERM:
    print("child ended", os.waitpid(child, os.WNOHANG)[0] != 0)
    os.kill(child, signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("name", "child"),
    [
        ("SIGTERM", "child ended with 15\nreceived None"),
        pytest.param("SIGINT", "received None\nchild ended False", marks=pytest.mark.slow),
    ],
)
def test_signal_to_a_forked_child_does_not_reach_its_parent(name: str, child: str):
    # Python 3.12 and later warn of `os.fork` in a process with several threads.
    ignore = "ignore:This process (pid=:DeprecationWarning"
    done = subprocess.run(
        [sys.executable, "-W", ignore, "-c", FORK, name],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (done.stdout, done.stderr) == (f"{child}\n", "")


def test_exit_restores_the_handlers():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with StopSignals() as signals:
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert (signals.received, signals.exit_code) == (None, 0)
