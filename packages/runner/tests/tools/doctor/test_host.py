from __future__ import annotations

import importlib.metadata
import shutil
from pathlib import Path
from typing import ClassVar, NamedTuple

import fsspec
import pytest
from etils import epath
from fsspec.implementations.memory import MemoryFileSystem

from layerkit_runner.tools import doctor


@pytest.fixture(autouse=True)
def few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_TRIAL_BYTES", 2 << 20)


def install(folder: Path, name: str, version: str) -> None:
    """Write the metadata of an installed package."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    (info / "METADATA").write_text("\n".join(lines) + "\n")


def test_plugin_for_another_jaxlib_fails(tmp_path, monkeypatch):
    install(tmp_path, "jax-cuda13-plugin", "0.1.2")
    monkeypatch.syspath_prepend(tmp_path)
    jaxlib = importlib.metadata.version("jaxlib")
    found = doctor.check_packages()
    assert (found.values["jax-cuda13-plugin"], found.values["jaxlib"]) == ("0.1.2", jaxlib)
    [problem] = [p for p in found.problems if "plugin" in p.what]
    assert problem.fails
    assert problem.what == (
        f"jax-cuda13-plugin 0.1.2 is for another jaxlib than the installed {jaxlib}."
    )
    assert problem.to_do == f"pip install 'jax[cuda13]=={jaxlib}'"


def test_host_report_has_cpus_and_memory():
    values = doctor.check_host().values
    assert values["cpus"] >= 1
    if "memory_bytes" in values:
        assert 0 < values["memory_available_bytes"] <= values["memory_bytes"]


def test_folder_that_works_is_left_as_it_was(tmp_path):
    (tmp_path / "kept").write_text("mine")
    found = doctor.check_folder(str(tmp_path))
    assert found.values["write_bytes_per_second"] > 0
    assert found.values["read_bytes_per_second"] > 0
    assert not [problem for problem in found.problems if problem.fails]
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_missing_folder_is_not_created(tmp_path):
    found = doctor.check_folder(str(tmp_path / "a" / "b"))
    assert f"(does not exist; tried {tmp_path})" in found.lines[0]
    assert list(tmp_path.iterdir()) == []


def test_wrong_bytes_fail(tmp_path, monkeypatch):
    monkeypatch.setattr(type(epath.Path("a")), "read_bytes", lambda self: b"lost")
    with pytest.raises(OSError, match="differ from those written"):
        doctor.check_folder(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


class Usage(NamedTuple):
    """Result of `shutil.disk_usage`."""

    total: int
    used: int
    free: int


@pytest.mark.parametrize(("free", "fails"), [(5e9, [False]), (5e7, [True]), (1e12, [])])
def test_little_free_space_is_reported(tmp_path, monkeypatch, free, fails):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**13, 0, int(free)))
    problems = doctor.check_folder(str(tmp_path)).problems
    assert [problem.fails for problem in problems] == fails


class MemoryStore(MemoryFileSystem):
    """A store that keeps `az://bucket/…` in memory."""

    protocol = "az"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.removeprefix("az:/"))


def test_working_store_is_left_as_it_was(monkeypatch):
    fsspec.register_implementation("az", MemoryStore, clobber=True)
    monkeypatch.setattr("etils.epath.gpath._is_tf_installed", lambda: False)
    epath.backend.fsspec_backend._get_filesystem.cache_clear()
    found = doctor.check_folder("az://bucket/run")
    assert not found.problems
    assert found.values["write_bytes_per_second"] > 0
    assert not MemoryStore.store
    epath.backend.fsspec_backend._get_filesystem.cache_clear()
