"""Weights that a distillation trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import pytest
from flax.traverse_util import flatten_dict

from layerkit.config import build
from layerkit.interop.hugging_face import export_model, model_config
from layerkit_experiments.lm.distill import Distill
from layerkit_runner.run.resolve import resolve

pytest.importorskip("safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    content = {"model_type": "gpt2", "vocab_size": 300, "n_embd": 8, "n_layer": 2, "n_head": 2}
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = model_config(tmp_path)
    export_model(tmp_path, config, build(config).init(jax.random.key(0)))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("fields", "trained"),
    [
        ({"FEATURES": {0: 1}}, {"lm", "feature_0"}),
        ({"LORA_RANK": 2}, {"lora"}),
        ({"LORA_RANK": 2, "FEATURES": {0: 1}}, {"lora", "feature_0"}),
    ],
)
def test_maps_of_features_are_trained_and_teacher_is_not(
    folder: str, fields: dict[str, Any], trained: set[str]
):
    fields |= {"HF_FOLDER": folder, "TEACHER": folder, "TOKENIZER": "bytes", "MAX_SEQ_LEN": 16}
    task = build(resolve(Distill(**fields)).task)
    params = jax.eval_shape(task.init_state, jax.random.key(0)).params
    names = flatten_dict(task.train.learner.trained_weights.select(params), sep="/")
    kinds = {"lora" if "/lora_" in name else name.partition("/")[0] for name in names}
    assert kinds == trained
