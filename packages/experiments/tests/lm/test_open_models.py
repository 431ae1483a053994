"""Recipes of open models have their published weights, steps and rates, and export as them."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest

from layerkit.interop.hugging_face.exporting import describe
from layerkit.interop.hugging_face.families import family_of
from layerkit.ops.rotary_scaling import YarnScaling
from layerkit_experiments.lm.optimal_scaling import DepthDial
from layerkit_runner.config.requests import ResolvedExperiment
from layerkit_runner.run.resolve import resolve

# The module of DeepSeek-V3 that predicts a second token: three norms and a projection beside the
# latent attention, router, experts and two norms of a layer. No gradient moves the biases of the
# routers of the other 58 layers.
LATENT = 7168 * (1536 + 576 + 16_384) + 1536 * 24_576 + 512 * 32_768 + 1536 + 512
EXPERTS = 7168 * (256 + 257 * 3 * 2048)
MODULE = 7168 * (3 + 2 * 7168 + 2) + LATENT + EXPERTS - 58 * 256
# weights; tokens of a step and of the run, in millions and billions; peak and last rate.
PUBLISHED = {
    "llama.Llama31_8B": (8_030_261_248, 16.8, 20_133, 3e-4, 3e-6),
    "llama.Llama31_70B": (70_553_706_496, 16.8, 20_133, 1.5e-4, 1.5e-6),
    "llama.Llama31_405B": (405_853_388_800, 16.8, 20_133, 8e-5, 8e-7),
    "open_models.Qwen3_8B": (8_190_735_360, 4.19, 29_989, 3e-4, 3e-5),
    "open_models.Qwen3_30B_A3B": (30_532_122_624, 4.19, 29_989, 3e-4, 3e-5),
    "open_models.Mixtral8x7B": (46_702_792_704, 4.19, 2097, 3e-4, 3e-5),
    "open_models.DeepSeekV3": (671_026_419_200 + MODULE, 62.9, 14_800, 2.2e-4, 2.2e-5),
    "open_models.GptOss20B": (20_914_757_184, 4.19, 2097, 3e-4, 3e-5),
    "open_models.GptOss120B": (116_829_156_672, 4.19, 2097, 1.5e-4, 1.5e-5),
    "open_models.Olmo3_7B": (7_298_011_136, 4.19, 5000, 3e-4, 3e-5),
    "open_models.Gemma3_4B": (3_880_099_328, 4.19, 4000, 3e-4, 3e-5),
    "open_models.Gpt2_124M": (124_439_808, 0.524, 10.3, 6e-4, 0.0),
}
FAR = "full_attention"
# Options of config.json beyond the sizes.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama.Llama31_405B": ("llama", {"rope_theta": 5e5, "rms_norm_eps": 1e-5}),
    "open_models.Qwen3_8B": ("qwen3", {"head_dim": 128, "rms_norm_eps": 1e-6}),
    "open_models.Qwen3_30B_A3B": (
        "qwen3_moe",
        {"num_experts": 128, "norm_topk_prob": True, "router_aux_loss_coef": 0.001},
    ),
    "open_models.Mixtral8x7B": (
        "mixtral",
        {"num_local_experts": 8, "rope_theta": 1e6, "router_aux_loss_coef": 0.02},
    ),
    "open_models.DeepSeekV3": (
        "deepseek_v3",
        {"first_k_dense_replace": 3, "topk_group": 4, "num_nextn_predict_layers": 1},
    ),
    "open_models.GptOss20B": (
        "gpt_oss",
        {"rope_theta": 15e4, "swiglu_limit": 7.0, "sliding_window": 128},
    ),
    "open_models.Olmo3_7B": ("olmo3", {"rope_theta": 5e5, "sliding_window": 4096}),
    "open_models.Gemma3_4B": (
        "gemma3_text",
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window": 1024},
    ),
    "open_models.Gpt2_124M": ("gpt2", {"n_positions": 1024, "activation_function": "gelu_new"}),
}
FULL_LAYERS = {"GptOss20B": range(1, 24, 2), "Olmo3_7B": range(3, 32, 4)}
FULL_LAYERS["Gemma3_4B"] = range(5, 34, 6)


def resolved(name: str) -> ResolvedExperiment:
    module, _, cls = name.partition(".")
    experiments = importlib.import_module(f"layerkit_experiments.lm.{module}")
    return resolve(getattr(experiments, cls)())


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_batch_and_rates_are_those_published(name: str, num_params: Any):
    weights, millions, billions, peak, last = PUBLISHED[name]
    assert num_params(f"lm.{name}") == weights
    experiment = resolved(name)
    data, train = experiment.datasets[0], experiment.task.train
    mesh = experiment.partitioner
    devices = math.prod(mesh.ici_mesh_shape) * math.prod(mesh.dcn_mesh_shape or ())
    rows = data.percore_batch_size * devices
    tokens = rows * data.task_feature_lengths["targets"]
    assert tokens / 1e6 == pytest.approx(millions, rel=2e-3)
    assert train.num_train_steps * tokens / 1e9 == pytest.approx(billions, rel=5e-3)
    assert rows % train.gradient_accumulation_steps == 0
    schedule = train.learner.learning_rate.Instantiate()
    warmup = train.learner.learning_rate.warmup_steps
    assert float(schedule(warmup)) == pytest.approx(peak)
    assert float(schedule(train.num_train_steps)) == pytest.approx(last, rel=1e-4, abs=1e-12)


@pytest.mark.parametrize("name", CONFIGS)
def test_recipe_is_a_model_of_its_family(name: str):
    family, options = CONFIGS[name]
    model = resolved(name).task.model
    if family == "gpt_oss":  # which has no other positions there
        for layer in model.lm_tpl.stack_tpl.block_tpls:
            scaling = YarnScaling(32.0, 4096, truncate=False)
            layer.attention_tpl.rotary_tpl.scaling = scaling
    _, content = describe(model, [family_of(family)])
    assert {key: content[key] for key in options} == options
    if full := FULL_LAYERS.get(name.partition(".")[2]):
        assert [n for n, kind in enumerate(content["layer_types"]) if kind == FAR] == list(full)


def test_depth_sets_the_values_of_nanochat():
    tuned, deep = DepthDial(DEPTH=12), DepthDial(DEPTH=26)
    assert (tuned.MODEL_DIMS, tuned.NUM_HEADS, tuned.PERCORE_BATCH_SIZE) == (768, 6, 32.0)
    assert (tuned.LEARNING_RATE, tuned.WEIGHT_DECAY) == (1.8e-3, 0.1)
    # 12 tokens for each of 110M weights, 524,288 a step.
    assert tuned.MAX_STEPS == 12 * (12 * 12 * 768**2 + 32_768 * 768) // 2**19
    assert (deep.NUM_LAYERS, deep.MODEL_DIMS, deep.NUM_HEADS) == (26, 1664, 13)
    assert deep.PERCORE_BATCH_SIZE == 2 * tuned.PERCORE_BATCH_SIZE
    assert pytest.approx(1.8e-3 * math.sqrt(2 * 768 / 1664)) == deep.LEARNING_RATE
    transferred = DepthDial(DEPTH=26, WIDTH_TRANSFER=768)
    assert pytest.approx(1.8e-3 * math.sqrt(2)) == transferred.LEARNING_RATE
    assert DepthDial(DEPTH=26, MAX_STEPS=7, MODEL_DIMS=128).MAX_STEPS == 7
