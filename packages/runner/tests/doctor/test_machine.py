"""What is read off the machine, and versions that do not fit together."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from layerkit_runner.doctor import machine


def install(folder: Path, name: str, version: str, *requires: str) -> None:
    """A package as far as its metadata goes."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {text}" for text in requires]
    (info / "METADATA").write_text("\n".join(lines) + "\n")


def test_versions_are_those_of_the_packages():
    found = machine.check_packages()
    for name in ("jax", "jaxlib", "numpy"):
        assert found.values[name] == importlib.metadata.version(name)
    assert not [problem for problem in found.problems if "not installed" in problem.what]


def test_a_plugin_for_another_jaxlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(tmp_path, "jax-cuda13-plugin", "0.1.2")
    monkeypatch.syspath_prepend(tmp_path)
    jaxlib = importlib.metadata.version("jaxlib")
    [problem] = [p for p in machine.check_packages().problems if "plugin" in p.what]
    assert problem.fails
    assert problem.what.startswith(f"jax-cuda13-plugin 0.1.2 is for another jaxlib than {jaxlib},")
    assert problem.to_do == f"pip install 'jax[cuda13]=={jaxlib}'"


def test_a_package_of_a_version_that_ours_do_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    wants = ("jax<0.1", "numpy>=1", "optax<0.1; extra == 'old'")
    install(tmp_path, "layerkit-runner", "9.9.9", *wants)
    monkeypatch.syspath_prepend(tmp_path)
    problems = [p.what for p in machine.check_packages().problems if "runner 9.9.9 " in p.what]
    jax = importlib.metadata.version("jax")
    assert problems == [f"layerkit-runner 9.9.9 needs jax<0.1, and {jax} is installed."]


def test_the_host():
    values = machine.check_host().values
    assert values["cpus"] >= 1
    if values["memory_bytes"] is not None:
        assert 0 < values["memory_available_bytes"] <= values["memory_bytes"]


def test_who_started_the_process():
    names = ("JOB_ID", "STEP_NODELIST", "NTASKS", "PROCID")
    slurm = {f"SLURM_{name}": str(number) for number, name in enumerate(names, start=5)}
    found = machine.check_launcher(slurm)
    assert found.lines[0] == "Slurm (job 5): process 8 of 7"
    assert machine.check_launcher({}).values == {"name": None}
    tpu = machine.check_launcher({"TPU_WORKER_HOSTNAMES": "a,b"})
    assert tpu.values["num_processes"] == 2
    [problem] = machine.check_launcher({**slurm, "SLURM_NTASKS": "many"}).problems
    assert "SLURM_NTASKS='many'" in problem.what


def test_variables_that_matter_and_no_secret():
    environ = {
        "XLA_FLAGS": "--a",
        "NCCL_DEBUG": "INFO",
        "HOME": "/root",
        "JAX_API_KEY": "x",
        "TPU_ACCESS_TOKEN": "x",
    }
    assert machine.check_environment(environ).lines == ["NCCL_DEBUG=INFO", "XLA_FLAGS=--a"]
    assert len(machine.check_environment({}).lines) == 1
