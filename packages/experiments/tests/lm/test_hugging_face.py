"""Experiments that begin from a Hugging Face folder: the recipe, and those of `lm.fine_tune`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from layerkit.config import Config, build, target_of
from layerkit.interop.hugging_face import export_model, model_config
from layerkit.layers import LORA_WEIGHTS
from layerkit.models import PreferenceModel
from layerkit_experiments.lm import fine_tune
from layerkit_experiments.lm.fine_tune import HuggingFaceLm
from layerkit_experiments.recipes.local_files import LocalFiles
from layerkit_runner.errors import FieldError, UsageError
from layerkit_runner.init_from import plan_first_state
from layerkit_runner.run.job import build_parts
from layerkit_runner.run.resolve import resolve


class FineTune(LocalFiles, HuggingFaceLm):
    """The model of a folder."""

    TOKENIZER = "bytes"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    content = {"model_type": "gpt2", "vocab_size": 300, "n_embd": 8, "n_layer": 3, "n_head": 2}
    (tmp_path / "config.json").write_text(json.dumps(content))
    return tmp_path


def test_model_and_weights_come_from_the_folder(folder: Path):
    fields: dict[str, Any] = {"FPROP_DTYPE": "bfloat16", "CHECKPOINT_POLICY": "full", "EOS_ID": 2}
    task = resolve(FineTune(HF_FOLDER=str(folder), **fields)).task
    lm = task.model.lm_tpl
    assert (lm.vocab_size, lm.num_layers, lm.stack_tpl.remat) == (300, 3, "full")
    assert (task.model.dtype, task.model.fprop_dtype) == (None, "bfloat16")
    assert (task.model.decoder.eos_id, task.initial_weights.sources[0].folder) == (2, str(folder))


def test_text_ends_with_all_tokens_of_the_folder_and_of_the_tokenizer(folder: Path):
    assert resolve(FineTune(HF_FOLDER=str(folder))).task.model.decoder.eos_id == 2  # of bytes
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    decoder = resolve(FineTune(HF_FOLDER=str(folder))).task.model.decoder
    assert decoder.eos_id == (7, 8, 2)


def test_folder_is_required(raises):
    with raises(FieldError, owner="FineTune", field="HF_FOLDER"):
        FineTune()


def test_vocabulary_larger_than_that_of_the_model_raises(raises, folder: Path):
    with raises(UsageError, field="VOCAB_SIZE", value=400):
        resolve(FineTune(HF_FOLDER=str(folder), VOCAB_SIZE=400))


def test_rows_longer_than_the_positions_of_the_model_raise(raises, folder: Path):
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"n_positions": 64}))
    assert resolve(FineTune(HF_FOLDER=str(folder), MAX_SEQ_LEN=64)).datasets[0].seq_length == 64
    with raises(UsageError, field="MAX_SEQ_LEN", value=65):
        resolve(FineTune(HF_FOLDER=str(folder), MAX_SEQ_LEN=65))


def test_folder_without_a_model_raises(raises, tmp_path: Path):
    with raises(UsageError, owner="FineTune: HF_FOLDER"):
        resolve(FineTune(HF_FOLDER=str(tmp_path)))


def test_encoder_decoder_model_raises(raises, tmp_path: Path):
    content = {"model_type": "t5", "vocab_size": 300, "d_model": 8, "num_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with raises(UsageError, field="HF_FOLDER", value=str(tmp_path)):
        resolve(FineTune(HF_FOLDER=str(tmp_path)))


def test_a_tokenizer_is_that_of_the_folder_or_is_named(raises, folder: Path):
    experiment = fine_tune.FineTune(HF_FOLDER=str(folder))
    assert experiment.tokenizer().path == str(folder)
    assert experiment.VOCAB_SIZE == 300
    named = resolve(fine_tune.FineTune(HF_FOLDER=str(folder), TOKENIZER="bytes"))
    assert target_of(named.datasets[0].tokenizer).__name__ == "ByteTokenizer"
    with raises(UsageError, field="path", value=str(folder / "tokenizer.json")):
        resolve(experiment)


class Preferences(FineTune):
    """DPO of the model of a folder."""

    def model(self) -> Config:
        return PreferenceModel.HParams.config(lm_tpl=super().model().lm_tpl)


def test_policy_and_reference_start_with_the_weights_of_the_folder(tmp_path: Path):
    content = {"model_type": "gpt2", "vocab_size": 300, "n_embd": 8, "n_layer": 2, "n_head": 2}
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = model_config(tmp_path)
    variables = build(config).init(jax.random.key(3))
    export_model(tmp_path, config, variables)
    partitioner, task = build_parts(resolve(Preferences(HF_FOLDER=str(tmp_path))))
    partitioner.start()
    partitioner.bind(task)
    params = plan_first_state(partitioner, task)().state.params
    for name in ("lm", "reference_lm"):
        jax.tree.map(np.testing.assert_array_equal, params[name], variables["params"]["lm"])


def test_lora_trains_adapters_alone(folder: Path):
    fields = {"HF_FOLDER": str(folder), "TOKENIZER": "bytes", "LORA_RANK": 2}
    task = resolve(fine_tune.FineTuneLora(**fields)).task
    attention = task.model.lm_tpl.stack_tpl.layer_tpl.attention_tpl
    assert attention.query_tpl.dot_tpl.rank == 2
    assert task.train.learner.trainable == (LORA_WEIGHTS,)
    assert task.initial_weights.sources[0].folder == str(folder)
