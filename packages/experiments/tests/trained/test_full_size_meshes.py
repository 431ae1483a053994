"""Every other kind of experiment fits on the devices that it is made for, told by shapes alone.

Those of C4 and The Pile are in lm/test_published_values.py.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import layerkit_experiments
from layerkit_runner.config.catalogue import read_catalogue
from layerkit_runner.tools.plan.hardware import device_kind

pytestmark = pytest.mark.experiments

# experiment: devices, how many
MADE_FOR = {
    "lm.lm_cloud.LmCloudSpmd2B": ("v4", 4),
    "lm.lm_cloud.LmCloudSpmd2BLimitSteps": ("v4", 4),
    "lm.lm_cloud.LmCloudSpmd32B": ("v4", 64),
    "lm.lm_cloud.LmCloudSpmdPipelineMultislice2B": ("v4", 8),
    "lm.optimal_scaling.OptimalScaling2x2x1": ("v5p", 4),
    "lm.llama.Llama7B": ("h100", 128),
    "lm.llama.Llama13B": ("v5p", 128),
    "lm.llama.Llama70B": ("v5p", 256),
    "lm.llama.Llama7BLora": ("h100", 1),
    "lm.llama.Llama70BLora": ("h100", 8),
    "lm.moe.Glam126M64E": ("v5p", 64),
    "lm.moe.Glam8B64E": ("v5p", 256),
    "lm.moe.Glam64B64E": ("v4", 1024),
    "lm.jaxformer.Jaxformer1B": ("v4", 32),
    "lm.bert.BertBase": ("v5p", 16),
    "lm.bert.BertLarge": ("v5p", 64),
    "translation.wmt.TransformerBase": ("h100", 8),
    "translation.wmt.TransformerBig": ("h100", 8),
}
SCRIPT = """
import importlib, json, math, sys
import jax
from layerkit_runner.config.resolve import resolve
from layerkit_runner.trainer.job import build_parts

jax.config.update("jax_num_cpu_devices", 1024)


def bytes_of(tree):
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


found = {}
for name in sys.argv[1:]:
    module, _, cls = name.rpartition(".")
    module = importlib.import_module(f"layerkit_experiments.{module}")
    partitioner, task = build_parts(resolve(getattr(module, cls)()))
    sizes = [*partitioner.ici_mesh_shape, *(partitioner.dcn_mesh_shape or ())]
    partitioner.start(jax.devices()[: math.prod(sizes)])
    partitioner.bind(task)
    whole = jax.tree.leaves(partitioner.abstract_stored_state(task).params)
    state = partitioner.abstract_state(task)
    found[name] = {
        "devices": partitioner.mesh.size,
        "count": sum(math.prod(leaf.shape) for leaf in whole),
        "weights": bytes_of(state.params),
        "optimizer": bytes_of(state.opt_state),
    }
print(json.dumps(found))
"""


# Devices in a summary, as of `runner --mode=plan --target`: v4:4x4x4*2, h100x64.
TARGET = re.compile(r"\((?:v\d\w*:([\dx]+)(?:\*(\d+))?|[abh]\d+x(\d+))\)")


def test_meshes_have_the_devices_of_the_summaries():
    catalogue = read_catalogue(Path(layerkit_experiments.__file__).parent)
    for name, line in catalogue.items():
        target = TARGET.search(line.summary)
        sizes = [int(size) for size in re.findall(r" (\d+)(?= ×|,| across|$)", line.mesh or "")]
        if target is not None and sizes:
            slice_sizes = (target[1] or target[3]).split("x")
            devices = math.prod(map(int, slice_sizes)) * int(target[2] or 1)
            assert math.prod(sizes) == devices, name


def test_weights_and_optimizer_leave_half_of_the_memory(tmp_path: Path):
    script = tmp_path / "sizes.py"
    script.write_text(SCRIPT)
    # In a process of its own, since the number of simulated devices is settled once.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, str(script), *MADE_FOR],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    catalogue = read_catalogue(Path(layerkit_experiments.__file__).parent)
    for name, found in json.loads(done.stdout).items():
        kind, count = MADE_FOR[name]
        assert found["devices"] == count, name
        assert found["count"] == catalogue[name].num_params, name
        memory = device_kind(kind).usable_bytes
        assert memory is not None
        assert found["weights"] + found["optimizer"] < memory / 2, name
