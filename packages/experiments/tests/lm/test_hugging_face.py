"""Experiments that begin from a Hugging Face folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from layerkit_experiments.lm.recipes.data import LocalFiles
from layerkit_experiments.lm.recipes.hugging_face import HuggingFaceLm
from layerkit_experiments.lm.recipes.optimization import AdamWCosine
from layerkit_experiments.lm.recipes.parallelism import Spmd
from layerkit_runner.config.resolve import resolve
from layerkit_runner.errors import FieldError, UsageError


class FineTune(AdamWCosine, Spmd, LocalFiles, HuggingFaceLm):
    """The model of a folder."""


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
    assert (task.model.decoder.eos_id, task.initial_weights.folder) == (2, str(folder))


def test_text_ends_with_the_tokens_of_the_folder(folder: Path):
    assert resolve(FineTune(HF_FOLDER=str(folder))).task.model.decoder.eos_id is None
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    decoder = resolve(FineTune(HF_FOLDER=str(folder))).task.model.decoder
    assert decoder.eos_id == (7, 8)


def test_a_folder_must_be_named():
    with pytest.raises(FieldError, match="FineTune: missing value: HF_FOLDER"):
        FineTune()


def test_data_with_more_ids_than_the_model_are_refused(folder: Path):
    expected = f"the data have VOCAB_SIZE=400 ids, but the model in {folder} knows 300"
    with pytest.raises(UsageError, match=re.escape(expected)):
        resolve(FineTune(HF_FOLDER=str(folder), VOCAB_SIZE=400))


def test_a_folder_that_is_none_is_refused(tmp_path: Path):
    expected = f"HF_FOLDER: {tmp_path} is no Hugging Face folder: it has no config.json"
    with pytest.raises(UsageError, match=re.escape(expected)):
        resolve(FineTune(HF_FOLDER=str(tmp_path)))


def test_a_model_of_encoder_and_decoder_is_refused(tmp_path: Path):
    content = {"model_type": "t5", "vocab_size": 300, "d_model": 8, "num_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(content))
    expected = f"HF_FOLDER: {tmp_path} holds a SequenceModel, which reads one text and writes"
    with pytest.raises(UsageError, match=re.escape(expected)):
        resolve(FineTune(HF_FOLDER=str(tmp_path)))
