"""The reduced form of each kind of experiment trains on this machine: its loss falls.

Run as a user would, `runner --exp=… --reduced --job_log_dir=…`, but within one process and, where
that is what an experiment is for, on a mesh of its axes.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from layerkit_experiments.lm import (
    bert,
    c4,
    c4_multislice,
    hybrid,
    jaxformer,
    llama,
    lm_cloud,
    moe,
    open_models,
    pile,
    quickstart,
)
from layerkit_experiments.speech import digits as spoken_digits
from layerkit_experiments.speech import librispeech
from layerkit_experiments.translation import numbers, wmt
from layerkit_experiments.vision import digits, imagenet
from layerkit_runner import BaseExperiment, cli
from layerkit_runner.config.experiment import experiment_fields, reduced_values
from layerkit_runner.observers import read_metrics

pytestmark = pytest.mark.experiments

STEPS = 20
FIELDS = {
    "MAX_STEPS": STEPS,
    "SUMMARY_INTERVAL_STEPS": 1,
    "EVAL_INTERVAL_STEPS": None,
    "CHECKPOINT_EVERY_N_STEPS": STEPS,
    "PERCORE_BATCH_SIZE": 1.0,  # on eight devices, the rows that one has
}
# The experiments of these modules are alike.
LANGUAGE_MODELS = (c4, c4_multislice, hybrid, lm_cloud, pile, quickstart)
OTHERS = (
    bert,
    jaxformer,
    llama,
    moe,
    open_models,
    numbers,
    wmt,
    digits,
    imagenet,
    spoken_digits,
    librispeech,
)


def classes_of(modules: tuple[ModuleType, ...]) -> list[type[BaseExperiment]]:
    return [
        cls
        for module in modules
        for cls in vars(module).values()
        if isinstance(cls, type) and cls.__module__ == module.__name__
        if issubclass(cls, BaseExperiment) and not cls._is_abstract
    ]


def reduced_form(cls: type[BaseExperiment]) -> str:
    """Return the abstract bases and the values of the fields, which are those of the run."""
    bases = [base for base in cls.__mro__ if getattr(base, "_is_abstract", True)]
    values = {field: getattr(cls, field, None) for field in experiment_fields(cls)}
    return repr((bases, sorted((values | reduced_values(cls) | FIELDS).items())))


def name_of(cls: type) -> str:
    return f"{cls.__module__.removeprefix('layerkit_experiments.')}.{cls.__name__}"


# Classes of two names or with the same reduced form are one; and one only evaluates: see
# test_corpora.
UNLIKE = {reduced_form(cls): cls for cls in reversed(classes_of(LANGUAGE_MODELS))}.values()
# Rows per device by name.
TRAINED = {name_of(cls): 1.0 for cls in UNLIKE if cls is not pile.Lambada126M}
TRAINED |= {name_of(cls): 2.0 for cls in classes_of(OTHERS)}
TRAINED["lm.optimal_scaling.DepthDial"] = 2.0
# One of each mixture of the module; its dense models are alike.
TRAINED |= {f"lm.nvidia.{name}": 2.0 for name in ("GLaM64B64EProxy", "Grok", "Grok_PP")}
MESHES = {
    "lm.llama.Llama70B": [1, 4, 2],
    "lm.moe.Glam126M64E": [1, 2, 4, 1],
    "lm.moe.Glam64B64E": [1, 2, 2, 2],
    "lm.jaxformer.Jaxformer1B": [2, 2, 1, 2],
    "lm.open_models.DeepSeekV3": [1, 2, 4, 1],
    "lm.open_models.GptOss20B": [1, 2, 2, 2],
    "lm.open_models.Qwen3_30B_A3B": [1, 2, 4, 1],
    "lm.open_models.Mixtral8x7B": [1, 2, 4, 1],
    "lm.nvidia.GLaM64B64EProxy": [1, 2, 2, 2],
    "lm.nvidia.Grok": [1, 2, 4, 1],
    "lm.nvidia.Grok_PP": [2, 1, 2, 2, 1],
    # Two stages on two of the eight devices, the rows of each split over four.
    **{name: [2, 4, 1, 1] for name in TRAINED if "Pipeline" in name},
}
# Adapters alone learn less of a model that was never trained.
LEAST = {"lm.llama.Llama7BLora": 0.01, "lm.llama.Llama70BLora": 0.01}


@pytest.mark.parametrize("name", TRAINED)
def test_the_loss_falls_in_twenty_steps(name: str, tmp_path: Path):
    fields = {**FIELDS, "PERCORE_BATCH_SIZE": TRAINED[name]}
    if name in MESHES:
        fields["ICI_MESH_SHAPE"] = MESHES[name]
    words = [f"--fdl.{field}={value}" for field, value in fields.items()]
    flags = [f"--exp={name}", "--reduced", f"--job_log_dir={tmp_path}", "--noenable_summary_writer"]
    assert cli.main([*flags, *words]) == 0
    result = {record["step"]: record["loss"] for record in read_metrics(tmp_path).train}
    assert max(result) == STEPS
    first, last = ([result[step] for step in steps] for steps in ((1, 2, 3), (18, 19, 20)))
    assert sum(last) / 3 < sum(first) / 3 - LEAST.get(name, 0.1)
