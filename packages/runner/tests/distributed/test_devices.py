"""Presets of compiler flags, errors of platforms, and freed memory that the process keeps."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import jax
import pytest
from jaxlib.xla_client import generate_pjrt_gpu_plugin_options

from layerkit_runner import UsageError
from layerkit_runner.config.flags import parse_flags
from layerkit_runner.distributed.devices import (
    PRESETS,
    check_devices,
    flag_lines,
    set_compiler_flags,
    set_gpu_memory_share,
)
from layerkit_runner.run_options import FLAGS, RunOptions
from layerkit_runner.tools.plan.hardware import device_kind

H100, V5P, V6E = "NVIDIA H100 80GB HBM3", "TPU v5", "TPU v6 lite"


def test_command_line_offers_every_preset():
    (row,) = [flag for flag in FLAGS if flag.name == "xla_flags_preset"]
    assert row.choices == tuple(PRESETS)
    options = parse_flags(["--exp=x", "--xla_flags_preset=tpu_v6e_moe"]).options
    assert options.xla_flags_preset == "tpu_v6e_moe"


def test_users_flags_follow_those_of_the_preset():
    own = "--xla_gpu_enable_pipelined_all_gather=false"
    environment = {"XLA_FLAGS": own}
    options = RunOptions(xla_flags_preset="gpu_latency_hiding")
    set_compiler_flags(options, environment)
    *preset, last = environment["XLA_FLAGS"].split()
    assert (tuple(preset), last) == (PRESETS["gpu_latency_hiding"].flags, own)
    (line,) = flag_lines(options)
    assert line.startswith("XLA_FLAGS --xla_gpu_enable_latency_hiding_scheduler=true ")


@pytest.mark.parametrize("own", [{}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}])
def test_gpu_memory_share_equals_that_of_plans(
    monkeypatch: pytest.MonkeyPatch, own: dict[str, str]
):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    environment = dict(os.environ)
    set_gpu_memory_share(environment)
    with monkeypatch.context() as patch:
        for name in environment:
            patch.setenv(name, environment[name])
        share = generate_pjrt_gpu_plugin_options()["memory_fraction"]
    h100 = device_kind("h100")
    assert h100.usable_bytes is not None
    assert h100.memory_bytes is not None
    planned = h100.usable_bytes / h100.memory_bytes
    assert share == (0.5 if own else pytest.approx(planned, rel=1e-6))


def test_tpu_preset_sets_libtpu_init_args():
    environment: dict[str, str] = {}
    set_compiler_flags(RunOptions(xla_flags_preset="tpu_v6e_dense"), environment)
    assert list(environment) == ["LIBTPU_INIT_ARGS"]
    assert environment["LIBTPU_INIT_ARGS"] == "--xla_tpu_scoped_vmem_limit_kib=98304"


@pytest.mark.parametrize(
    ("preset", "device_kind", "others"),
    [
        ("gpu_latency_hiding", H100, None),
        ("gpu_latency_hiding", "cpu", "none"),
        ("gpu_latency_hiding", V5P, "tpu_multislice"),
        ("tpu_v5e_collective_fusion", "TPU v5 lite", None),
    ],
)
def test_preset_for_other_devices_raises_and_names_the_fitting_ones(
    raises, preset: str, device_kind: str, others: str | None
):
    options = RunOptions(xla_flags_preset=preset)
    if others is None:
        check_devices(options, device_kind)
    else:
        expected = f"a preset for {device_kind} devices: {others}"
        with raises(UsageError, field="--xla_flags_preset", value=preset, expected=expected):
            check_devices(options, device_kind)


def test_profile_sets_its_scheduler_and_requires_a_file_and_a_gpu(raises, tmp_path: Path):
    path = tmp_path / "steps.pb"
    options = RunOptions(pgle_profile=str(path), xla_flags_preset="gpu_latency_hiding")
    with raises(UsageError, field="--pgle_profile", value=str(path)):
        set_compiler_flags(options, {})
    path.touch()
    environment: dict[str, str] = {}
    set_compiler_flags(options, environment)
    flags = environment["XLA_FLAGS"].split()
    assert flags[-1] == f"--xla_gpu_pgle_profile_file_or_directory_path={path}"
    assert flags.count("--xla_gpu_enable_latency_hiding_scheduler=true") == 1
    check_devices(options, H100)
    with raises(UsageError, field="--pgle_profile", value=str(path)):
        check_devices(RunOptions(pgle_profile=str(path)), V5P)


def test_profiling_by_jax_itself_is_an_error(raises, monkeypatch: pytest.MonkeyPatch):
    config = types.SimpleNamespace(jax_enable_pgle=True)
    monkeypatch.setattr(jax, "config", config)
    with raises(UsageError, field="JAX_ENABLE_PGLE", value="true"):
        check_devices(RunOptions(), H100)


@pytest.mark.parametrize(
    "preset", [pytest.param("gpu_pipelined_collectives", marks=pytest.mark.slow), "gpu_nvidia_pax"]
)
def test_installed_xla_accepts_every_gpu_flag(tmp_path: Path, preset: str):
    """XLA of any platform knows the flags of GPUs, and ends the process for one it does not."""
    (tmp_path / "steps.pb").touch()
    options = RunOptions(xla_flags_preset=preset, pgle_profile=str(tmp_path / "steps.pb"))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    set_compiler_flags(options, environment)
    start_xla = "from jaxlib import xla_client; xla_client.make_cpu_client()"
    command = [sys.executable, "-c", start_xla]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    environment["XLA_FLAGS"] += " --xla_gpu_no_such_flag=true"
    failed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "--xla_gpu_no_such_flag" in failed.stderr


# For each preset a slice of every kind of TPU that it is for.
TPU_SLICES = [
    ("tpu_v5e_collective_fusion", "v5e:2x2"),
    ("tpu_fsdp", "v4:2x2x1"),
    ("tpu_multislice", "v4:2x2x1"),
    ("tpu_multislice", "v5e:2x2"),
    ("tpu_multislice", "v5p:2x2x1"),
    ("tpu_multislice", "v6e:2x2"),
    ("tpu_v6e_dense", "v6e:2x2"),
    ("tpu_v6e_moe", "v6e:2x2"),
]
COMPILE_A_SHARDED_PRODUCT = """
import sys
import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

devices = topologies.get_topology_desc(sys.argv[1], platform="tpu").devices
rows = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec("x"))
x = jax.ShapeDtypeStruct((256, 256), np.float32, sharding=rows)
jax.jit(lambda x: (x @ x.T).sum()).lower(x).compile()
"""


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="the compiler of TPUs is not installed"
)
@pytest.mark.parametrize(("preset", "target"), TPU_SLICES)
def test_libtpu_accepts_every_tpu_preset(preset: str, target: str):
    """libtpu ends the process for a flag that it does not know, or not for these TPUs."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    set_compiler_flags(RunOptions(xla_flags_preset=preset), environment)
    command = [sys.executable, "-c", COMPILE_A_SHARDED_PRODUCT, target]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_tpu_preset_is_compiled_for_a_tpu():
    of_tpus = {name for name, preset in PRESETS.items() if preset.variable == "LIBTPU_INIT_ARGS"}
    assert of_tpus == {preset for preset, _ in TPU_SLICES}


START_DEVICES = """
import sys
from layerkit_runner.errors import UsageError
from layerkit_runner.distributed.devices import start_devices
try:
    start_devices()
except UsageError as error:
    sys.exit(f"failed: {error}")
"""


def start(platforms: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", START_DEVICES],
        env={**os.environ, "JAX_PLATFORMS": platforms},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("platforms", "reason"), [("tpu", "tpu"), pytest.param("cpuu", "cpuu", marks=pytest.mark.slow)]
)
def test_platform_that_jax_cannot_start_is_an_error_of_one_line(platforms: str, reason: str):
    if importlib.util.find_spec("libtpu"):
        pytest.skip("libtpu is installed here")
    error = start(platforms).stderr
    message = error[error.index("failed: ") :]
    assert f"JAX_PLATFORMS={platforms}: JAX " in message
    assert reason in message.partition("cannot start")[2]
    assert len(message.splitlines()) == 1


PLUGIN = """
import jax

def initialize():  # as JAX's CUDA plugins do, unless other platforms are chosen
    if not jax.config.jax_platforms:
        raise RuntimeError("Unable to load cuFFT. Is it installed?")
"""


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="this machine has a GPU")
@pytest.mark.slow
@pytest.mark.parametrize(("name", "is_unused"), [("xla_cuda12", True), ("xla_other", False)])
def test_plugin_without_a_device_is_not_started(tmp_path: Path, name: str, is_unused: bool):
    (tmp_path / "jax_plugins" / name).mkdir(parents=True)
    (tmp_path / "jax_plugins" / name / "__init__.py").write_text(PLUGIN)
    code = (
        "from layerkit_runner.distributed.devices import start_devices, unused_plugins\n"
        "print(unused_plugins())\nstart_devices()\nimport jax\nprint(jax.devices()[0].platform)"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    kept = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    plugins, platform_name = done.stdout.splitlines()
    assert (name in plugins, platform_name) == (is_unused, "cpu")
    assert ("cuFFT" in done.stderr) is not is_unused


needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")

# Two arrays of a step in each of 50 turns, as XLA allocates them.
COUNT_PAGE_FAULTS = """
import json, resource, sys
from layerkit_runner.distributed.devices import keep_freed_memory
assert "numpy" not in sys.modules and "jax" not in sys.modules
was_set = keep_freed_memory()
import numpy as np
def turn():
    one = np.ones(2**23, np.uint8)
    other = np.ones(2**22, np.uint8)
turn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    turn()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(json.dumps({"was_set": was_set, "faults": faults}))
"""


def run_turns(**variables: str) -> dict[str, Any]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_", "JAX_"))}
    output = subprocess.run(
        [sys.executable, "-c", COUNT_PAGE_FAULTS],
        env={**kept, **variables},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    result: dict[str, Any] = json.loads(output)
    return result


@needs_glibc
def test_memory_of_a_step_is_not_mapped_again():
    kept, default = run_turns(JAX_PLATFORMS="cpu"), run_turns(JAX_PLATFORMS="cuda")
    assert (kept["was_set"], default["was_set"]) == (True, False)
    # 50 turns of 12 MB are 150,000 pages of 4 KB, or 300 of 2 MB.
    assert kept["faults"] < 50 < default["faults"]


@needs_glibc
@pytest.mark.parametrize(
    "variable", ["MALLOC_TRIM_THRESHOLD_=1000000", "GLIBC_TUNABLES=glibc.malloc.arena_max=2"]
)
def test_settings_of_the_environment_win(variable: str):
    name, _, value = variable.partition("=")
    assert not run_turns(JAX_PLATFORMS="cpu", **{name: value})["was_set"]
