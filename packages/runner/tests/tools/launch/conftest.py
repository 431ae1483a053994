"""A command to launch, as values, and what checks generated text."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from layerkit_runner.config.flags import RunOptions
from layerkit_runner.tools.launch.command import parse_options
from layerkit_runner.tools.launch.request import Request
from layerkit_runner.tools.launch.values import Options


@pytest.fixture
def request_of() -> Callable[..., Request]:
    """A request in a folder or store."""

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
    """Flags of a kind, parsed."""
    return lambda kind, *words: parse_options(kind, words)[0]


@pytest.fixture
def check_bash() -> Callable[[str], None]:
    """Asserts that a text is Bash."""

    def check(text: str) -> None:
        done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
        assert (done.returncode, done.stderr) == (0, "")
        if shutil.which("shellcheck"):
            words = ["shellcheck", "--shell=bash", "--exclude=SC2034", "-"]
            done = subprocess.run(words, input=text, text=True, capture_output=True)
            assert done.returncode == 0, done.stdout

    return check
