"""Fixtures: a request, the flags of a kind, and a check of Bash."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from layerkit_runner.config.flags import RunOptions
from layerkit_runner.tools.launch.command import parse_options
from layerkit_runner.tools.launch.request import Options, Request


@pytest.fixture
def request_of() -> Callable[..., Request]:
    """Return a function that makes a request for a folder or store."""

    def make(folder: str = "/runs/it's here", **more: Any) -> Request:
        words = (
            "--exp=lm.some.MyExperiment",
            "--fdl.NAMES=['a b', 'c']",
            f"--job_log_dir={folder}",
        )
        options = RunOptions(job_log_dir=folder)
        return Request(words, options, "train", "lm.some.MyExperiment", **more)

    return make


@pytest.fixture
def flags_of() -> Callable[..., Options]:
    """Return a function that parses the flags of a kind."""
    return lambda kind, *words: parse_options(kind, words)[0]


@pytest.fixture
def check_bash() -> Callable[[str], None]:
    """Return a function that fails unless a text is valid Bash."""

    def check(text: str) -> None:
        done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
        assert (done.returncode, done.stderr) == (0, "")
        if shutil.which("shellcheck"):
            words = ["shellcheck", "--shell=bash", "--exclude=SC2034", "-"]
            done = subprocess.run(words, input=text, text=True, capture_output=True)
            assert done.returncode == 0, done.stdout

    return check
