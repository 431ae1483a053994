"""Fine-tuning from a folder: the model, its vocabulary and its tokenizer are the folder's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from layerkit.config import target_of
from layerkit_experiments.lm.fine_tune import FineTune, FineTuneLora
from layerkit_runner.config.resolve import resolve
from layerkit_runner.errors import UsageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    content = {"model_type": "gpt2", "vocab_size": 300, "n_embd": 8, "n_layer": 3, "n_head": 2}
    (tmp_path / "config.json").write_text(json.dumps(content))
    return tmp_path


def test_a_tokenizer_is_that_of_the_folder_or_is_named(raises, folder: Path):
    experiment = FineTune(HF_FOLDER=str(folder))
    assert experiment.tokenizer().path == str(folder)
    assert experiment.VOCAB_SIZE == 300
    named = resolve(FineTune(HF_FOLDER=str(folder), TOKENIZER="bytes"))
    assert target_of(named.datasets[0].tokenizer).__name__ == "ByteTokenizer"
    with raises(UsageError, field="path", value="tokenizer.json", choices=("config.json",)):
        resolve(experiment)


def test_lora_trains_adapters_alone(folder: Path):
    task = resolve(FineTuneLora(HF_FOLDER=str(folder), TOKENIZER="bytes", LORA_RANK=2)).task
    attention = task.model.lm_tpl.stack_tpl.layer_tpl.attention_tpl
    assert attention.query_tpl.dot_tpl.rank == 2
    assert task.train.learner.trainable == (".*/lora_[ab]",)
    assert task.initial_weights.folder == str(folder)
