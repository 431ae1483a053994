"""The reduced form of each other kind of experiment trains on this machine: its loss falls.

Run as a user would, `runner --exp=… --reduced --job_log_dir=…`, but within one process and, where
that is what an experiment is for, on a mesh of its axes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from layerkit_experiments.lm import bert, jaxformer, llama, moe
from layerkit_experiments.translation import numbers, wmt
from layerkit_experiments.vision import digits, imagenet
from layerkit_runner import BaseExperiment, cli
from layerkit_runner.observers import read_metrics

pytestmark = pytest.mark.experiments

STEPS = 20
MODULES = (bert, jaxformer, llama, moe, numbers, wmt, digits, imagenet)
TRAINED = [
    f"{module.__name__.removeprefix('layerkit_experiments.')}.{name}"
    for module in MODULES
    for name, cls in vars(module).items()
    if isinstance(cls, type) and cls.__module__ == module.__name__
    if issubclass(cls, BaseExperiment) and not cls._is_abstract
]
# One of each mixture of the module; its dense models are alike.
TRAINED += ["lm.nvidia.GLaM64B64EProxy", "lm.nvidia.Grok", "lm.nvidia.Grok_PP"]
MESHES = {
    "lm.llama.Llama70B": [1, 4, 2],
    "lm.moe.Glam126M64E": [1, 2, 4, 1],
    "lm.moe.Glam64B64E": [1, 2, 2, 2],
    "lm.jaxformer.Jaxformer1B": [2, 2, 1, 2],
    "lm.nvidia.GLaM64B64EProxy": [1, 2, 2, 2],
    "lm.nvidia.Grok": [1, 2, 4, 1],
    "lm.nvidia.Grok_PP": [2, 1, 2, 2, 1],
}
# Adapters alone learn less of a model that was never trained.
LEAST = {"lm.llama.Llama7BLora": 0.01, "lm.llama.Llama70BLora": 0.01}


@pytest.mark.parametrize("name", TRAINED)
def test_the_loss_falls_in_twenty_steps(name: str, tmp_path: Path):
    fields = {
        "MAX_STEPS": STEPS,
        "SUMMARY_INTERVAL_STEPS": 1,
        "EVAL_INTERVAL_STEPS": None,
        "CHECKPOINT_EVERY_N_STEPS": STEPS,
        "PERCORE_BATCH_SIZE": 2.0,
    }
    if name in MESHES:
        fields["ICI_MESH_SHAPE"] = MESHES[name]
    words = [f"--fdl.{field}={value}" for field, value in fields.items()]
    flags = [f"--exp={name}", "--reduced", f"--job_log_dir={tmp_path}", "--noenable_summary_writer"]
    assert cli.main([*flags, *words]) == 0
    found = {record["step"]: record["loss"] for record in read_metrics(tmp_path).train}
    assert max(found) == STEPS
    first, last = ([found[step] for step in steps] for steps in ((1, 2, 3), (18, 19, 20)))
    assert sum(last) / 3 < sum(first) / 3 - LEAST.get(name, 0.1)
