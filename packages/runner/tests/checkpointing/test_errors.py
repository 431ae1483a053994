"""Errors that a SaveError already reports are kept out of the log; other errors are logged."""

from __future__ import annotations

import logging

import pytest

from layerkit_runner.checkpointing import errors

IN_ORBAX = "/site-packages/orbax/checkpoint/_src/futures/future.py"


@pytest.fixture
def logged():
    """Yield the messages that pass the absl logger; restore its filters afterwards."""
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


@pytest.mark.parametrize(("file", "is_logged"), [(IN_ORBAX, False), ("/site-packages/a.py", True)])
def test_error_of_a_task_of_orbax_is_left_out_of_the_log(monkeypatch, file, is_logged):
    logger, error = logging.getLogger("asyncio"), OSError("no")
    monkeypatch.setattr(logger, "filters", [])
    errors.silence_tracebacks()
    message = f"Task exception was never retrieved, defined at {file}:126"
    about = (OSError, error, None)
    record = logging.LogRecord("asyncio", logging.ERROR, "base_events.py", 1, message, (), about)
    assert bool(logger.filter(record)) == is_logged
