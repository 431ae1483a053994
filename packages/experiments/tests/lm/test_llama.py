"""LLaMA 2 has its published sizes and schedule; LoRA trains adapters on weights from a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from layerkit.layers import LORA_WEIGHTS
from layerkit_experiments.lm import llama
from layerkit_runner.config.requests import ResolvedExperiment
from layerkit_runner.errors import UsageError
from layerkit_runner.run.resolve import resolve

# layers, model, hidden, heads, key heads, rate, rows per device, devices, weights
PUBLISHED = {
    "Llama7B": (32, 4096, 11008, 32, None, 3e-4, 8, 128, 6_738_415_616),
    "Llama13B": (40, 5120, 13824, 40, None, 3e-4, 8, 128, 13_015_864_320),
    "Llama70B": (80, 8192, 28672, 64, 8, 1.5e-4, 4, 256, 68_976_648_192),
}


def resolved(name: str) -> ResolvedExperiment:
    return resolve(getattr(llama, name)())


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_and_schedule_are_those_of_the_paper(name: str, num_params: Any):
    layers, model, hidden, heads, kv_heads, rate, rows, devices, weights = PUBLISHED[name]
    experiment = resolved(name)
    lm = experiment.task.model.lm_tpl
    assert (lm.num_layers, lm.model_dims, lm.hidden_dims) == (layers, model, hidden)
    assert (lm.num_heads, lm.num_kv_heads, lm.dim_per_head) == (heads, kv_heads, 128)
    assert num_params(f"lm.llama.{name}") == weights
    # 4M tokens a step, 2T in all.
    data = experiment.datasets[0]
    assert data.task_feature_lengths == {"targets": 4096}
    assert data.percore_batch_size * devices == rows * devices == 1024
    train = experiment.task.train
    assert 2.0e12 < train.num_train_steps * 1024 * 4096 < 2.1e12
    schedule = train.learner.learning_rate.Instantiate()
    for step, value in {0: 0.0, 1000: rate / 2, 2000: rate, 500_000: rate / 10}.items():
        assert float(schedule(step)) == pytest.approx(value, rel=1e-5)
    adam = train.learner.optimizer
    assert (adam.b1, adam.b2, adam.eps, adam.weight_decay) == (0.9, 0.95, 1e-5, 0.1)
    assert train.learner.clip_global_norm == 1.0


def test_lora_trains_adapters_on_the_weights_of_a_folder_that_is_not_there_yet(num_params: Any):
    task = resolved("Llama7BLora").task
    (source,) = task.initial_weights.sources
    assert source.folder == "Llama-2-7b-hf"
    assert task.train.learner.trainable == (LORA_WEIGHTS,)
    attention = task.model.lm_tpl.stack_tpl.layer_tpl.attention_tpl
    assert attention.query_tpl.dot_tpl.rank == attention.value_tpl.dot_tpl.rank == 8
    assert attention.key_tpl.dot_tpl is None
    # 32 layers, in which queries and values have 4096 · 8 + 8 · 4096 more.
    adapters = 32 * 2 * 2 * 4096 * 8
    assert num_params("lm.llama.Llama7BLora") == 6_738_415_616 + adapters


def test_tokenizer_is_required_without_initial_weights(raises):
    with raises(UsageError, field="TOKENIZER", value=None):
        resolve(llama.Llama7BLora(INIT_FROM=None))


def test_folder_without_tokenizer_file_raises(raises, tmp_path: Path):
    with raises(UsageError, field="path", value=str(tmp_path / "tokenizer.json")):
        resolve(llama.Llama7BLora(INIT_FROM=str(tmp_path)))
