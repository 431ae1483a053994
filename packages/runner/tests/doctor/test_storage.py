"""The folder to write to, tried; and what is said of one that does not work."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
from etils import epath
from fsspec.implementations.memory import MemoryFileSystem

from layerkit_runner.doctor import storage


@pytest.fixture(autouse=True)
def few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_BLOCKS", 2)


def test_a_folder_that_works_is_left_as_it_was(tmp_path: Path):
    (tmp_path / "kept").write_text("mine")
    found = storage.check_folder({"job_log_dir": str(tmp_path)})
    assert found.values["does_not_work"] == []
    assert found.values["write_bytes_per_second"] > 0
    assert found.values["read_bytes_per_second"] > 0
    assert not [problem for problem in found.problems if problem.fails]
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_folder_that_is_not_there_yet_is_not_made(tmp_path: Path):
    found = storage.check_folder({"job_log_dir": str(tmp_path / "a" / "b")})
    assert f"(not there yet, tried in {tmp_path})" in found.lines[0]
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_folder(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for given in ("file", "file/below"):
        found = storage.check_folder({"job_log_dir": str(tmp_path / given)})
        [problem] = found.problems
        assert problem.fails
        assert problem.what.endswith(f"cannot be written to: {tmp_path / 'file'} is a file.")


def test_a_file_system_that_takes_no_files():
    if not os.path.isdir("/proc/self"):
        pytest.skip("needs a file system that takes no files, such as /proc")
    found = storage.check_folder({"job_log_dir": "/proc/self"})
    [problem] = found.problems
    assert problem.fails and "/proc/self cannot be written to" in problem.what


def test_bytes_that_come_back_wrong(tmp_path: Path):
    block = bytes(1 << 20)
    (tmp_path / "speed").write_bytes(block[:-1] + b"x")
    with pytest.raises(OSError, match="other bytes than were written"):
        storage._read(tmp_path / "speed", block, len(block))


def test_what_does_not_work_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_append(trial: Path) -> bool:
        raise OSError("Operation not supported")

    monkeypatch.setitem(storage._ABILITIES, "append", no_append)
    found = storage.check_folder({"job_log_dir": str(tmp_path)})
    assert found.values["does_not_work"] == ["append"]
    [problem] = [problem for problem in found.problems if problem.fails]
    assert problem.what == f"{tmp_path}: append does not work there."


def test_little_space_is_told(tmp_path: Path):
    for free, fails in ((5e9, False), (5e7, True)):
        [problem] = storage._folder_problems(int(free), "ext4", [], "runs")
        assert problem.fails is fails
    assert not list(storage._folder_problems(10**12, "ext4", [], "runs"))
    [problem] = storage._folder_problems(10**12, "tmpfs", [], "runs")
    assert not problem.fails and "in memory (tmpfs)" in problem.what


class MemoryStore(MemoryFileSystem):
    """Keeps `az://bucket/…` in memory."""

    protocol = "az"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.removeprefix("az:/"))


def test_a_store(monkeypatch: pytest.MonkeyPatch):
    fsspec.register_implementation("az", MemoryStore, clobber=True)
    monkeypatch.setattr("etils.epath.gpath._is_tf_installed", lambda: False)
    epath.backend.fsspec_backend._get_filesystem.cache_clear()
    found = storage.check_folder({"job_log_dir": "az://bucket/run"})
    assert not found.problems
    assert found.values["write_bytes_per_second"] > 0
    assert not MemoryStore.store
    # As if it lost the end of every file.
    monkeypatch.setattr(type(epath.Path("az://b")), "read_bytes", lambda self: b"lost")
    [problem] = storage.check_folder({"job_log_dir": "az://bucket/run"}).problems
    assert problem.fails and "other bytes than were written" in problem.what
    epath.backend.fsspec_backend._get_filesystem.cache_clear()


def test_a_store_that_does_not_exist():
    [problem] = storage.check_folder({"job_log_dir": "nosuchstore://bucket/run"}).problems
    assert problem.fails and problem.what.startswith("nosuchstore://bucket/run: ")


def test_the_folder_of_compiled_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def look(folder: Path) -> storage.Finding:
        return storage.check_compile_cache({"jax_compilation_cache": str(folder)})

    (tmp_path / "one-cache").write_bytes(bytes(1000))
    (tmp_path / "one-atime").write_bytes(bytes(10))
    assert look(tmp_path).lines == [f"{tmp_path}: 1 programs, 1 kB"]
    assert look(tmp_path / "new").lines == [f"{tmp_path / 'new'}: empty so far"]
    [problem] = look(tmp_path / "one-cache" / "below").problems
    assert not problem.fails
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    assert storage.check_compile_cache({}).values["programs"] == 1
    assert storage.check_compile_cache({"jax_compilation_cache": "off"}).values["folder"] is None
