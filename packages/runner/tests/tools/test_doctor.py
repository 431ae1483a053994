from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import fsspec
import jax
import pytest
from etils import epath
from fsspec.implementations.memory import MemoryFileSystem

from layerkit_runner import cli
from layerkit_runner.tools import doctor
from layerkit_runner.tools.doctor import Problem


def run(folder: Path, *flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "layerkit_runner.cli", "doctor", *flags],
        cwd=folder,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=300,
    )


def problems(report: doctor.Report) -> list[Problem]:
    return [line for line in report if isinstance(line, Problem)]


def test_working_machine_passes(tmp_path):
    done = run(tmp_path, f"--job_log_dir={tmp_path / 'run'}")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    headings = [line.split()[0] for line in lines if line and not line.startswith(" ")]
    assert headings == ["packages", "host", "folder", "devices", "all"]
    # The environment of the tests asks for 8 devices.
    assert any(line.startswith("devices      8 × cpu (cpu), JAX ") for line in lines)
    assert list(tmp_path.iterdir()) == []


def test_unknown_flags_of_the_command(tmp_path, capsys):
    for flag in ("--exp=lm.Small", "--fdl.A=1", "--num_batches=2"):
        assert cli.main(["doctor", flag]) == 2
        assert f"unknown flag: '{flag.partition('=')[0]}'" in capsys.readouterr().err
    # The error comes before JAX is imported.
    (tmp_path / "jax.py").write_text("raise SystemExit('jax was imported')")
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    done = run(tmp_path, "--job_log_dr=a", PYTHONPATH=path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Did you mean '--job_log_dir'?" in done.stderr


def test_report_has_a_heading_and_fails_with_a_failure(capsys):
    warning = Problem("It is slow.", "Look" + " there" * 20, fails=False)
    assert not doctor.print_report("folder", ["full", warning])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "folder       full"
    assert lines[1].startswith("             warning: It is slow. → Look there")
    assert max(map(len, lines)) <= 100
    assert doctor.print_report("folder", [warning, Problem("It is full.", "Delete.")])


def process(code: str, limit: float) -> bool:
    command = [sys.executable, "-c", f"import os, sys, time\n{code}"]
    return doctor.run_check("devices", ".", limit=limit, command=command)


def test_check_that_hangs_is_killed(capsys):
    assert process("time.sleep(600)", 0.3)
    assert "FAILS: no answer within 0.3 s. → Check JAX_PLATFORMS" in capsys.readouterr().out


def test_process_that_dies_is_reported_with_its_last_lines(capsys):
    assert process("print('F0 Unknown flag', file=sys.stderr, flush=True); os._exit(3)", 60)
    assert "ended with exit code 3: F0 Unknown flag" in capsys.readouterr().out


def test_folder_below_a_file_fails(capsys):
    assert doctor.main("folder", f"{__file__}/below") != 0
    assert "FAILS: NotADirectoryError: " in capsys.readouterr().out


def test_unknown_platform_fails(capfd, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "nosuch")
    assert doctor.run_check("devices", ".", limit=60)
    assert "FAILS: RuntimeError: Unable to initialize backend 'nosuch'" in capfd.readouterr().out


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
    [problem] = [p for p in problems(doctor.examine_packages()) if "plugin" in p.what]
    assert problem.fails
    assert problem.what == (
        f"jax-cuda13-plugin 0.1.2 is for another jaxlib than the installed {jaxlib}."
    )
    assert problem.to_do == f"pip install 'jax[cuda13]=={jaxlib}'"


def test_missing_folder_is_not_created(tmp_path):
    [line, *_] = doctor.examine_folder(str(tmp_path / "a" / "b"))
    assert f"(does not exist; tried {tmp_path})" in str(line)
    assert list(tmp_path.iterdir()) == []


def test_wrong_bytes_fail(tmp_path, monkeypatch):
    monkeypatch.setattr(type(epath.Path("a")), "read_bytes", lambda self: b"lost")
    with pytest.raises(OSError, match="differ from those written"):
        list(doctor.examine_folder(str(tmp_path)))
    assert list(tmp_path.iterdir()) == []


class Usage(NamedTuple):
    """Result of `shutil.disk_usage`."""

    total: int
    used: int
    free: int


@pytest.mark.parametrize(("free", "fails"), [(5e9, [False]), (5e7, [True]), (1e12, [])])
def test_little_free_space_is_reported(tmp_path, monkeypatch, free, fails):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**13, 0, int(free)))
    report = doctor.examine_folder(str(tmp_path))
    assert [problem.fails for problem in problems(report)] == fails


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
    assert list(doctor.examine_folder("az://bucket/run")) == ["az://bucket/run"]
    assert not MemoryStore.store
    epath.backend.fsspec_backend._get_filesystem.cache_clear()


def test_unused_gpus_are_reported(tmp_path, monkeypatch):
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(doctor, "_NVIDIA_GPUS", f"{tmp_path}/*")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    [problem] = problems(doctor.examine_devices())
    assert not problem.fails and "Unset JAX_PLATFORMS=cpu" in problem.to_do
    monkeypatch.delenv("JAX_PLATFORMS")
    [problem] = problems(doctor.examine_devices())
    assert problem.fails and "pip install 'jax[cuda13]'" in problem.to_do


def test_wrong_sum_over_devices_is_reported(monkeypatch):
    right = jax.lax.psum

    def sums_too_little(product: jax.Array, axis_name: str) -> Any:
        return right(product - 1, axis_name)

    monkeypatch.setattr(jax.lax, "psum", sums_too_little)
    [problem] = problems(doctor.examine_devices())
    assert problem.what == "A sum over the 8 devices gives wrong numbers."


def test_device_that_multiplies_wrongly_is_reported(monkeypatch):
    matmul = jax.numpy.matmul

    def flips_a_bit(*factors: Any, **options: Any) -> jax.Array:
        index = jax.lax.axis_index("all")
        return matmul(*factors, **options) + jax.numpy.where(index == 3, 1.0, 0.0)

    monkeypatch.setattr(jax.numpy, "matmul", flips_a_bit)
    [problem] = problems(doctor.examine_devices())
    assert problem.what == f"Device {jax.devices()[3].id} multiplies matrices wrongly."
