"""Fixtures: a request, the flags of a kind, and a check of Bash."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable

import pytest

from layerkit_experiments.lm.lm_cloud import LmCloudSpmdTest
from layerkit_runner.run.resolve import resolve
from layerkit_runner.tools.launch.command import parse_options
from layerkit_runner.tools.launch.request import Options, Request


@pytest.fixture(scope="session")
def request_of() -> Callable[..., Request]:
    """Return a function that makes a request for a folder or store, and a mesh of 4 × 8 devices."""
    resolved = resolve(LmCloudSpmdTest(ICI_MESH_SHAPE=[1, 8, 1], DCN_MESH_SHAPE=[4, 1, 1]))
    any_mesh = resolve(LmCloudSpmdTest(ICI_MESH_SHAPE=None, DCN_MESH_SHAPE=None))

    def make(
        folder: str = "/runs/it's here", *, names: str = "['a b', 'c']", has_mesh: bool = False
    ) -> Request:
        words = ("--exp=lm.some.MyExperiment", f"--fdl.NAMES={names}", f"--job_log_dir={folder}")
        return Request(words, folder, resolved if has_mesh else any_mesh)

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
