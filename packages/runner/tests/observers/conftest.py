from __future__ import annotations

from collections.abc import Callable

import pytest

from layerkit_runner.observers import RunInfo


class Clock:
    """Seconds that a test advances."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def run_info() -> Callable[..., RunInfo]:
    """Return a function that makes the facts of a small training run, with changes."""

    def make(**changes) -> RunInfo:
        facts = {
            "job_log_dir": None,
            "experiment": "lm.Toy",
            "mode": "train",
            "num_params": 10,
            "num_train_steps": 100,
            "start_step": 0,
            "tokens_per_step": 64,
            "examples_per_step": 4,
            "num_devices": 1,
            "device_kind": "cpu",
        }
        return RunInfo(**{**facts, **changes})

    return make
