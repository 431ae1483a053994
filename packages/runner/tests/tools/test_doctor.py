from __future__ import annotations

import importlib.metadata
import json
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
from layerkit_runner.tools.doctor import Finding, Problem


@pytest.fixture(autouse=True)
def few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_TRIAL_BYTES", 2 << 20)


def run(folder: Path, *flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "layerkit_runner.cli", "doctor", *flags],
        cwd=folder,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_working_machine_passes(tmp_path):
    done = run(tmp_path, "--json", f"--job_log_dir={tmp_path / 'run'}")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["works"] is True
    assert found["checks"]["folder"]["folder"].startswith(str(tmp_path / "run"))
    assert list(found["checks"]) == ["packages", "host", "folder", "devices", "collectives"]
    # The environment of the tests asks for 8 devices.
    assert found["checks"]["collectives"]["num_devices"] == 8
    assert list(tmp_path.iterdir()) == []


def test_unknown_flags_of_the_command(tmp_path, capsys):
    for flag in ("--exp=lm.Small", "--fdl.A=1", "--num_batches=2"):
        assert cli.main(["doctor", flag]) == 2
        assert f"unknown flag: '{flag.partition('=')[0]}'" in capsys.readouterr().err
    # The error comes before JAX is imported.
    (tmp_path / "jax.py").write_text("raise SystemExit('jax was imported')")
    done = run(tmp_path, "--jsn", PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    assert (done.returncode, done.stdout) == (2, "")
    assert "'--jsn'" in done.stderr
    assert "'--json'" in done.stderr


def test_page_has_failures_before_warnings_and_sets_the_exit_code(monkeypatch, capsys):
    failure = Problem("The disk is full of" + " files" * 20, "Delete" + " files" * 20)
    warning = Problem("It is slow.", "Look.", fails=False)

    def run_with(*problems: Problem) -> int:
        found = [("folder", Finding(["full", "of" + " files" * 20], {"free": 0}, problems))]
        monkeypatch.setattr(doctor, "run_checks", lambda folder: iter(found))
        return cli.main(["doctor"])

    assert run_with(warning) == 0
    assert "all checks passed" in capsys.readouterr().out
    assert run_with(warning, failure) == 1
    lines = capsys.readouterr().out.splitlines()
    kinds = [line.partition(":")[0] for line in lines if line.startswith(("FAILS", "warning"))]
    assert kinds == ["FAILS", "warning"] and max(map(len, lines)) <= 100
    assert lines[-1].startswith("some checks failed, in ")


def process(code: str, limit: float) -> Finding:
    command = [sys.executable, "-c", f"import os, sys, time\n{code}"]
    return doctor.run_in_process("devices", ".", limit=limit, command=command)


def test_check_that_hangs_is_killed():
    [problem] = process("time.sleep(600)", 0.3).problems
    assert problem.what == "devices: no answer within 0.3 s."
    assert problem.fails and "driver is stuck" in problem.to_do


def test_process_that_dies_is_reported_with_its_last_lines():
    frames = "    @     0x7f  absl::Log()\\n*** Check failure stack trace: ***"
    code = f"print('F0 Unknown flag\\n{frames}', file=sys.stderr, flush=True); os._exit(3)"
    [problem] = process(code, 60).problems
    assert problem.what == "devices: the process ended with exit code 3: F0 Unknown flag"


@pytest.mark.parametrize(
    ("folder", "error"),
    [(f"{__file__}/below", "NotADirectoryError: "), ("nosuchstore://bucket/run", "")],
    ids=["below a file", "unknown store"],
)
def test_folder_that_cannot_be_written_fails(folder, error):
    [problem] = doctor.run_in_process("folder", folder, limit=60).problems
    assert problem.fails and problem.what.startswith(f"{folder}: {error}")


def test_without_devices_collectives_are_not_checked(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "nosuch")
    found = dict(doctor.run_checks(str(tmp_path)))
    [problem] = found["devices"].problems
    assert problem.fails and "'nosuch'" in problem.what and "JAX_PLATFORMS" in problem.to_do
    assert "collectives" not in found


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
    found = doctor.examine_packages()
    assert (found.values["jax-cuda13-plugin"], found.values["jaxlib"]) == ("0.1.2", jaxlib)
    [problem] = [p for p in found.problems if "plugin" in p.what]
    assert problem.fails
    assert problem.what == (
        f"jax-cuda13-plugin 0.1.2 is for another jaxlib than the installed {jaxlib}."
    )
    assert problem.to_do == f"pip install 'jax[cuda13]=={jaxlib}'"


def test_missing_folder_is_not_created(tmp_path):
    found = doctor.examine_folder(str(tmp_path / "a" / "b"))
    assert f"(does not exist; tried {tmp_path})" in found.lines[0]
    assert list(tmp_path.iterdir()) == []


def test_wrong_bytes_fail(tmp_path, monkeypatch):
    monkeypatch.setattr(type(epath.Path("a")), "read_bytes", lambda self: b"lost")
    with pytest.raises(OSError, match="differ from those written"):
        doctor.examine_folder(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


class Usage(NamedTuple):
    """Result of `shutil.disk_usage`."""

    total: int
    used: int
    free: int


@pytest.mark.parametrize(("free", "fails"), [(5e9, [False]), (5e7, [True]), (1e12, [])])
def test_little_free_space_is_reported(tmp_path, monkeypatch, free, fails):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**13, 0, int(free)))
    problems = doctor.examine_folder(str(tmp_path)).problems
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
    found = doctor.examine_folder("az://bucket/run")
    assert not found.problems
    assert found.values["write_bytes_per_second"] > 0
    assert not MemoryStore.store
    epath.backend.fsspec_backend._get_filesystem.cache_clear()


def test_unused_gpus_are_reported(tmp_path, monkeypatch):
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(doctor, "_NVIDIA_GPUS", f"{tmp_path}/*")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    [problem] = doctor.examine_devices().problems
    assert not problem.fails and "2 NVIDIA GPU(s), and JAX_PLATFORMS=cpu hides" in problem.what
    monkeypatch.delenv("JAX_PLATFORMS")
    [problem] = doctor.examine_devices().problems
    assert problem.fails and "pip install 'jax[cuda13]'" in problem.to_do


def test_device_that_multiplies_wrongly_is_reported(monkeypatch):
    right = doctor._product
    bad = jax.devices()[3]

    def flips_a_bit(left: jax.Array, right_: jax.Array) -> jax.Array:
        result = right(left, right_)
        return result.at[5, 5].add(1.0) if left.devices() == {bad} else result

    monkeypatch.setattr(doctor, "_product", flips_a_bit)
    [problem] = doctor.examine_devices().problems
    assert problem.fails and problem.what == "Device 3 multiplies matrices wrongly."


def test_wrong_sum_over_devices_is_found(monkeypatch):
    monkeypatch.setattr(doctor, "_REDUCED_BYTES_ON_CPU", 4096)
    found = doctor.examine_collectives()
    assert found.values["psum"]["is_right"]
    assert found.values["psum"]["bytes_per_second"] > 0
    assert not found.problems
    right = jax.lax.psum

    def sums_too_little(row: jax.Array, axis_name: str) -> Any:
        return right(row - 1, axis_name)

    monkeypatch.setattr(jax.lax, "psum", sums_too_little)
    found = doctor.examine_collectives()
    assert [problem.what for problem in found.problems] == [
        "psum over the 8 devices gives wrong numbers."
    ]
