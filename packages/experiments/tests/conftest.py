"""Fixtures that hide the data folders of this machine, and that count weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

import layerkit_experiments
from layerkit_runner.config.registry import read_catalogue

MEASURE = """
import importlib, json, math, sys
import jax
from layerkit_runner.run.resolve import resolve
from layerkit_runner.run.job import build_parts

parts = {}
for name in sys.argv[1:]:
    module, _, cls = name.rpartition(".")
    module = importlib.import_module(f"layerkit_experiments.{module}")
    parts[name] = build_parts(resolve(getattr(module, cls)()))


def num_devices(partitioner):
    return math.prod([*partitioner.ici_mesh_shape, *(partitioner.dcn_mesh_shape or ())])


def on_one_device(leaf):
    return math.prod(leaf.sharding.shard_shape(leaf.shape))


jax.config.update("jax_num_cpu_devices", max(num_devices(parts[name][0]) for name in parts))
parts_here = {}
for name, (partitioner, task) in parts.items():
    partitioner.start(jax.devices()[: num_devices(partitioner)])
    partitioner.bind(task)
    whole = jax.tree.leaves(partitioner.abstract_stored_state(task).params)
    state = partitioner.abstract_state(task)
    params = jax.tree.leaves(state.params)
    leaves = [*params, *jax.tree.leaves(state.opt_state)]
    parts_here[name] = {
        "num_devices": partitioner.mesh.size,
        "num_params": sum(math.prod(leaf.shape) for leaf in whole),
        "num_params_here": sum(map(on_one_device, params)),
        "num_bytes_here": sum(on_one_device(leaf) * leaf.dtype.itemsize for leaf in leaves),
        "dtypes": sorted({leaf.dtype.name for leaf in whole}),
    }
readers = {"tensorflow", "seqio", "grain", "sentencepiece"} & set(sys.modules)
assert not readers, f"imported: {readers}"
print(json.dumps(parts_here))
"""


@pytest.fixture(autouse=True)
def _no_data_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VOCAB_PATH", "TFDS_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def num_params() -> Callable[[str], int]:
    """Return a function from an experiment to its number of weights in the catalogue."""
    catalogue = read_catalogue(Path(layerkit_experiments.__file__).parent)
    assert catalogue is not None
    return lambda name: catalogue[name].num_params


@pytest.fixture
def measure_states() -> Callable[[Iterable[str]], dict[str, Any]]:
    """Return a function from names of experiments to the sizes of their states on their meshes.

    It runs in a process of its own, since the number of simulated devices is fixed at the start of
    JAX. Nothing is allocated, and no library that reads data is imported.
    """

    def measure(names: Iterable[str]) -> dict[str, Any]:
        environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        command = [sys.executable, "-c", MEASURE, *names]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    return measure
