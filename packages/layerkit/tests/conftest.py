"""Configuration of layerkit's tests, with what layers of Praxis compute, and absent devices.

Samples for type checkers, one of which is wrong on purpose, are not collected for doctests.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import json
import os
import pkgutil
from pathlib import Path

import numpy as np
import pytest
from jax.experimental import topologies

collect_ignore = ["typing_samples"]

# What JAX would read from the card and its driver.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 9 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
B200 = (
    H100.replace("H100 80GB HBM3", "B200")
    .replace("core_count: 132", "core_count: 148")
    .replace("{ major: 9 }", "{ major: 10 }")
)
# Slices of TPU v5p by number of chips.
SLICES = {1: "v5p:2x2x1", 4: "v5p:2x2x1", 8: "v5p:2x2x2"}

# Largest differences from Praxis by test: of values, and of gradients, which may be larger.
_DIFFERENCES = pytest.StashKey[dict[str, list[float]]]()


@functools.cache
def _recorded():
    return json.loads((Path(__file__).parent / "praxis" / "reference.json").read_text())


@pytest.fixture(scope="session")
def praxis():
    """Return a function from the name of a case to its arrays; see scripts/praxis_reference.py."""

    def as_arrays(entry):
        if isinstance(entry, dict):
            return {name: as_arrays(value) for name, value in entry.items()}
        array = np.asarray(entry)
        kinds = {"f": np.float32, "i": np.int32}
        return array.astype(kinds.get(array.dtype.kind, array.dtype))

    return lambda name: as_arrays(_recorded()[name])


@pytest.fixture(autouse=True)
def _praxis_differences(request, monkeypatch):
    """Keep the largest differences of a test that compares with Praxis, relative to above 1."""
    if "praxis" not in request.fixturenames:
        return
    compare = np.testing.assert_allclose
    table = request.config.stash.setdefault(_DIFFERENCES, {})

    def compare_and_keep(actual, desired, rtol=1e-7, atol=0, **options):
        compare(actual, desired, rtol=rtol, atol=atol, **options)
        actual, desired = np.asarray(actual, np.float64), np.asarray(desired, np.float64)
        scale = max(1.0, np.abs(desired).max(initial=0.0))
        error = np.abs(actual - desired).max(initial=0.0) / scale
        row = table.setdefault(request.node.nodeid.rpartition("tests/")[2], [0.0, 0.0])
        kind = int(atol > 5e-5)  # Gradients may differ by 1e-4, values by 1e-5.
        row[kind] = max(row[kind], error)

    monkeypatch.setattr(np.testing, "assert_allclose", compare_and_keep)


def pytest_terminal_summary(terminalreporter):
    """Print the differences from Praxis, if `-k praxis` selects these tests."""
    config = terminalreporter.config
    if config.option.keyword == "praxis" and (table := config.stash.get(_DIFFERENCES, {})):
        terminalreporter.section("largest difference from Praxis: of values, of gradients")
        for name, (value, gradient) in sorted(table.items()):
            terminalreporter.write_line(f"{value:.1e}  {gradient:.1e}  {name}")


@pytest.fixture
def layers_in():
    """Return a function from a package to the layer classes that its modules define."""

    def find(package):
        from layerkit.base.base_layer import BaseLayer

        result = set()
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            for _, thing in inspect.getmembers(importlib.import_module(info.name), inspect.isclass):
                if issubclass(thing, BaseLayer) and thing.__module__ == info.name:
                    result.add(thing)
        return result

    return find


@pytest.fixture
def absent_devices():
    """Return a function of (`cuda`, `b200` or `tpu`; number) that returns devices without hardware.

    It skips the test if the compiler of the platform is not installed, or if the process compiled
    for another kind of GPU before: JAX's Mosaic then compiles kernels for that kind.
    """

    def devices(platform, count=4):
        if platform == "tpu":
            if importlib.util.find_spec("libtpu") is None:
                pytest.skip("libtpu is not installed: pip install libtpu")
            os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
            result = topologies.get_topology_desc(SLICES[count], platform="tpu").devices
        else:
            if not any(map(importlib.util.find_spec, ["jax_cuda12_plugin", "jax_cuda13_plugin"])):
                pytest.skip("JAX's CUDA plugin is not installed: pip install jax-cuda12-plugin")
            if os.environ.setdefault("LAYERKIT_TESTS_GPU", platform) != platform:
                pytest.skip(f"needs a process of its own: pytest -k {platform}")
            result = topologies.get_topology_desc(
                platform="cuda",
                topology_name=platform,
                topology=f"1x1x{count}",
                target_config=B200 if platform == "b200" else H100,
            ).devices
        return result[:count]

    return devices


@pytest.fixture
def attention_calls(monkeypatch):
    """Return a list that receives the `AttentionCall` of every attention, which is not computed."""
    from layerkit.layers.attention.base_attention import AttentionLayer
    from layerkit.ops.attention.dot_product import describe_call

    calls = []

    def attend(layer, query, key, value, options):
        calls.append(describe_call(query, key, value, options))
        return query

    monkeypatch.setattr(AttentionLayer, "attend", attend)
    return calls
