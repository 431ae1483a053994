"""absl's logging flags: which messages of libraries go where."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from layerkit_runner import UsageError
from layerkit_runner.config.flags import configure_library_logs, parse_flags

# A process whose library logs two messages by absl and one by the standard library.
CODE = """
import logging, sys
from layerkit_runner.config.flags import configure_library_logs, parse_flags
configure_library_logs(parse_flags(["--exp=x", *sys.argv[1:]]).options)
import absl.logging
absl.logging.info("a fact")
absl.logging.warning("a warning")
logging.getLogger("some.library").info("another fact")
"""


def stderr(*flags: str) -> str:
    command = [sys.executable, "-c", CODE, *flags]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


@pytest.mark.parametrize(
    ("flags", "shown", "hidden"),
    [
        ([], ["a warning"], ["a fact", "another fact"]),
        (["--v=0"], ["a warning", "a fact", "another fact"], []),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (["--alsologtostderr"], ["a warning"], ["a fact", "another fact"]),
                (["--logtostderr", "--verbosity=0"], ["a warning", "a fact", "another fact"], []),
                (["--v=-2"], [], ["a warning", "a fact"]),
            ]
        ),
    ],
)
def test_verbosity_selects_the_messages_on_stderr(
    flags: list[str], shown: list[str], hidden: list[str]
):
    text = stderr(*flags)
    assert all(message in text for message in shown)
    assert not any(message in text for message in hidden)


@pytest.mark.parametrize(
    ("flags", "on_stderr"),
    [
        pytest.param([], [], marks=pytest.mark.slow),
        (["--alsologtostderr"], ["a fact", "a warning"]),
        (["--stderrthreshold=warning"], ["a warning"]),
    ],
)
def test_messages_go_to_the_folder_and_some_to_stderr(
    tmp_path: Path, flags: list[str], on_stderr: list[str]
):
    text = stderr("--v=0", f"--log_dir={tmp_path / 'logs'}", *flags)
    file = (tmp_path / "logs" / "runner.INFO").read_text()
    assert "a fact" in file and "a warning" in file
    assert [message for message in ("a fact", "a warning") if message in text] == on_stderr


def test_folder_that_cannot_be_written_raises(raises, tmp_path: Path):
    (tmp_path / "file").touch()
    folder = f"{tmp_path}/file/logs"
    with raises(UsageError, field="--log_dir", value=folder):
        configure_library_logs(parse_flags(["--exp=x", f"--log_dir={folder}"]).options)
