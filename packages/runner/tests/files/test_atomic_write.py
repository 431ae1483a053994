"""Writing files into folders where another user may have placed links, and atomic replacement."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from layerkit_runner.checkpointing.policy import EVALUATIONS_FILE, write_evaluations
from layerkit_runner.errors import UsageError
from layerkit_runner.files.atomic_write import (
    UnsafePathError,
    absolute,
    atomic_write,
    check_links,
    naming_path,
    open_append,
    private_folder,
)
from layerkit_runner.observers.metrics_log import open_lines
from layerkit_runner.run.job_folder import lock, try_lock

NOBODY = 65534
AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")

# Writes a large file over and over; each content is one letter, repeated.
WRITER = """
import itertools, sys
from layerkit_runner.files.atomic_write import atomic_write
for letter in itertools.cycle("ab"):
    atomic_write(sys.argv[1], letter * 2_000_000)
"""


def test_atomic_write_makes_the_folder_and_replaces_the_file(tmp_path: Path):
    path = tmp_path / "new" / "file.txt"
    atomic_write(path, "one")
    atomic_write(path, "two")
    assert path.read_text() == "two"
    assert [entry.name for entry in path.parent.iterdir()] == ["file.txt"]
    (tmp_path / "other").write_text("x")
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode  # of the umask


def test_atomic_write_that_fails_leaves_the_old_content_alone(tmp_path: Path):
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError, match="file"):
        atomic_write(tmp_path / "file", "x")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_killed_atomic_write_leaves_one_content_or_the_other(tmp_path: Path):
    path = tmp_path / "file.txt"
    for attempt in range(3):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
        while not path.exists():
            time.sleep(0.01)
        time.sleep(0.03 * attempt)
        process.kill()
        process.wait()
        content = path.read_text()
        assert content in ("a" * 2_000_000, "b" * 2_000_000)
        path.unlink()


def _hold(path: Path) -> None:
    with lock(path):
        pass


REPLACING: dict[str, Callable[[Path], object]] = {
    "atomic_write": lambda path: atomic_write(path, "written"),
    "evaluations": lambda path: write_evaluations(path.parent, {1: {"a": 1.0}}),
}
APPENDING: dict[str, Callable[[Path], object]] = {
    "open_append": open_append,
    "json_lines": open_lines,
    "lock": _hold,
    "try_lock": try_lock,
}


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file outside of the job folder."""
    path = tmp_path / "victim"
    path.write_text("of another folder")
    return path


@pytest.mark.parametrize("name", REPLACING)
def test_atomic_write_replaces_a_link_at_its_path(tmp_path: Path, victim: Path, name: str):
    path = tmp_path / "job" / EVALUATIONS_FILE
    path.parent.mkdir()
    path.symlink_to(victim)
    # A fixed name of the unfinished file would be known beforehand.
    path.with_name(f"{path.name}.partial").symlink_to(victim)
    REPLACING[name](path)
    assert path.is_file() and not path.is_symlink()
    assert victim.read_text() == "of another folder"


@pytest.mark.parametrize("name", APPENDING)
def test_append_raises_for_a_link_at_its_path(tmp_path: Path, victim: Path, name: str):
    path = tmp_path / "link"
    path.symlink_to(victim)
    with pytest.raises((UnsafePathError, UsageError), match=f"{path} is a symbolic link"):
        APPENDING[name](path)
    assert victim.read_text() == "of another folder"


def test_writer_follows_links_to_the_folder(tmp_path: Path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "runs").symlink_to("scratch")
    atomic_write(tmp_path / "runs" / "file", "one")
    with open_append(tmp_path / "runs" / "log") as file:
        file.write(b"two")
    assert {p.name for p in (tmp_path / "scratch").iterdir()} == {"file", "log"}


def test_open_append_does_not_wait_for_the_reader_of_a_pipe(tmp_path: Path):
    os.mkfifo(tmp_path / "log")
    with pytest.raises(UnsafePathError, match="is a named pipe"):
        open_append(tmp_path / "log")


def test_private_folder_is_for_this_user_alone(tmp_path: Path):
    folder = private_folder(tmp_path / "logs")
    folder.chmod(0o777)
    assert private_folder(folder).stat().st_mode & 0o777 == 0o700


def test_private_folder_raises_for_paths_of_another_user(tmp_path: Path):
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").write_text("")
    for name in ("link", "file"):
        with pytest.raises(UnsafePathError, match=name):
            private_folder(tmp_path / name)


@AS_ROOT
def test_private_folder_raises_for_the_folder_of_another_user(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    os.chown(tmp_path / "logs", NOBODY, NOBODY)
    with pytest.raises(UnsafePathError, match=f"belongs to user {NOBODY}"):
        private_folder(tmp_path / "logs")


def test_check_links_allows_links_of_this_user(tmp_path: Path):
    (tmp_path / "checkpoints").symlink_to("elsewhere")
    check_links(tmp_path)
    check_links(tmp_path / "not there")


@AS_ROOT
def test_check_links_raises_for_a_link_of_another_user(tmp_path: Path):
    (tmp_path / "checkpoints").symlink_to("elsewhere")
    os.chown(tmp_path / "checkpoints", NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(UnsafePathError, match=f"checkpoints is a symbolic link of user {NOBODY}"):
        check_links(tmp_path)


def test_error_of_a_full_disk_names_the_path(tmp_path: Path):
    full = pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/config.json'")
    with full, naming_path(tmp_path / "config.json"), open("/dev/full", "wb", buffering=0) as file:
        file.write(b"{}")


def test_scheme_that_no_store_has_is_an_error_that_names_it():
    with pytest.raises(UsageError, match="memory://jobs/1"):
        absolute("memory://jobs/1")
