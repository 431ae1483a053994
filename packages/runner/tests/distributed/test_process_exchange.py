"""Exchange of values between processes."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from layerkit_runner.distributed.process_exchange import from_process_0, gather_values

PROCESS = """
import sys
import jax

index, address = int(sys.argv[1]), sys.argv[2]
jax.distributed.initialize(address, 3, index)
from layerkit_runner.distributed.process_exchange import from_process_0, gather_values

values = [None, {"a": [1, "ä"]}, "x" * 1000]
assert gather_values(values[index]) == values
assert gather_values(index) == [0, 1, 2]
made = []
assert from_process_0(lambda: made.append(index) or {"bleu": 0.5}) == {"bleu": 0.5}
assert made == ([0] if index == 0 else [])
try:
    from_process_0(lambda: {}["nowhere"])
except Exception as error:
    print(type(error).__name__, error)
jax.distributed.shutdown()
"""


def test_three_processes_exchange_values_and_errors():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(index), address],
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
    assert from_process_0(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        from_process_0(lambda: 1 / 0)
