"""Errors that a SaveError tells are in no log, and all others are."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from layerkit_runner.checkpointing import errors

IN_ORBAX = "/site-packages/orbax/checkpoint/_src/futures/future.py"


@pytest.fixture
def logged():
    """Messages that pass the logger of Orbax, as it was before and will be again."""
    logger = logging.getLogger("absl")
    before, messages = list(logger.filters), []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    errors.silence_tracebacks()
    errors.silence_tracebacks()
    assert len(logger.filters) <= len(before) + 1
    yield messages
    logger.removeHandler(handler)
    logger.filters[:] = before


@pytest.mark.parametrize(
    ("path", "error", "is_logged"),
    [
        (IN_ORBAX, PermissionError("no"), False),
        (IN_ORBAX, RuntimeError("no"), True),
        (IN_ORBAX, RuntimeError("cannot schedule new futures after shutdown"), False),
        (IN_ORBAX, None, True),
        ("/site-packages/another/checkpoint.py", PermissionError("no"), True),
    ],
)
def test_known_absl_errors_are_left_out_of_the_log(logged, path, error, is_logged):
    about = None if error is None else (type(error), error, None)
    record = logging.LogRecord("absl", logging.ERROR, path, 1, "a thread failed", (), about)
    logging.getLogger("absl").handle(record)
    assert logged == ["a thread failed"] * is_logged


PROCESS = """
import asyncio, weakref
from layerkit_runner.checkpointing.errors import silence_tracebacks

silence_tracebacks()
silence_tracebacks()
loop = asyncio.new_event_loop()
loop.close()

def own(reference):
    raise RuntimeError("of a callback of our own")

class Result: pass

for callback in (loop.call_soon_threadsafe, own):
    # Called by the interpreter, with no Python code around, as TensorStore calls it.
    result = Result()
    reference = weakref.ref(result, callback)
    del result
"""


def test_result_for_a_closed_event_loop_is_not_printed_and_other_errors_are():
    done = subprocess.run(
        [sys.executable, "-c", PROCESS], capture_output=True, text=True, timeout=60, check=True
    )
    assert "Event loop is closed" not in done.stderr
    assert "of a callback of our own" in done.stderr
