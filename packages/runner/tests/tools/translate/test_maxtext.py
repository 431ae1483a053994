"""Translation of MaxText's keys. The files of this test contain facts about MaxText only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from layerkit.errors import UserError
from layerkit_runner.config.registry import find_experiment, load_experiment
from layerkit_runner.tools.translate.maxtext import read_values, translate_maxtext
from layerkit_runner.tools.translate.tables import Translation, read_tables

TABLES = read_tables()

# The base.yml of 2023 and the words of the 2xv4-128 script, from the table of Pax.
BASE_2023 = """
base_num_decoder_layers: 16
base_emb_dim: 2048
base_mlp_dim: 8192
base_num_heads: 8
head_dim: 256
vocab_size: 32_768
max_target_length: 1024
dtype: bfloat16
scan_layers: True
ici_data_parallelism: 1
ici_fsdp_parallelism: 1
ici_tensor_parallelism: 1
dcn_data_parallelism: 1
dcn_fsdp_parallelism: 1
dcn_tensor_parallelism: 1
"""
WORDS_2XV4_128 = [
    *("run_name=2xv4-128", "dcn_data_parallelism=2", "ici_fsdp_parallelism=64"),
    *("per_device_batch_size=16", "enable_profiler=true", "remat_policy=full", "scale=3"),
]


def translate(*words: str, text: str = "{}", **more: Any) -> Translation:
    return translate_maxtext(read_values({"file.yml": text}, words), TABLES, **more)


def fields(*words: str, text: str = "{}", **more: Any) -> Mapping[str, Any]:
    translation = translate(*words, text=text, **more)
    assert translation.leftovers == []
    return translation.fields


def leftovers(*words: str, text: str = "{}", **more: Any) -> list[str]:
    return [str(left) for left in translate(*words, text=text, **more).leftovers]


def test_the_22b_model_of_paxs_table_is_our_class():
    translated = fields(*WORDS_2XV4_128, text=BASE_2023)
    ours = load_experiment(find_experiment("lm.c4_multislice.C4Spmd22BAdam2xv4_128"))()
    assert translated == {name: getattr(ours, name) for name in translated}
    # The values of the table itself.
    assert translated == {
        "NUM_LAYERS": 48,
        "MODEL_DIMS": 6144,
        "HIDDEN_DIMS": 24576,
        "NUM_HEADS": 24,
        "DIMS_PER_HEAD": 256,
        "VOCAB_SIZE": 32768,
        "MAX_SEQ_LEN": 1024,
        "PERCORE_BATCH_SIZE": 16.0,
        "FPROP_DTYPE": "bfloat16",
        "USE_REPEATED_LAYER": True,
        "CHECKPOINT_POLICY": "full",
        "ICI_MESH_SHAPE": [1, 64, 1],
        "DCN_MESH_SHAPE": [2, 1, 1],
    }


def test_steps_and_warmup_fraction_set_the_schedule():
    words = ["learning_rate=3e-5", "cosine_learning_rate_final_fraction=0.1", "adam_b2=0.95"]
    assert fields("steps=1000", "warmup_steps_fraction=0.1", *words) == {
        "MAX_STEPS": 1000,
        "WARMUP_STEPS": 100,
        "LEARNING_RATE": 3e-5,
        "MIN_LEARNING_RATE_RATIO": 0.1,
        "ADAM_BETA2": 0.95,
    }
    longer = ["learning_rate_schedule_steps=2000", "warmup_steps_fraction=0.1"]
    assert fields("steps=1000", *longer) == {
        "MAX_STEPS": 1000,
        "WARMUP_STEPS": 200,
        "DECAY_END": 2000,
    }
    assert fields("steps=-1", *longer) == {"MAX_STEPS": 2000, "WARMUP_STEPS": 200}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["mlp_activations=[silu,linear]"], {"ACTIVATION": "silu", "USE_GATED_ACTIVATION": True}),
        (["mlp_activations=[gelu]"], {"ACTIVATION": "gelu", "USE_GATED_ACTIVATION": False}),
        (["dropout_rate=0.1"], {"DROPOUT_RATE": 0.1}),
        (["dropout_rate=0.1", "enable_dropout=False"], {"DROPOUT_RATE": 0.0}),
        (["gradient_clipping_threshold=0"], {"CLIP_GRADIENT_NORM": None}),
        (["final_logits_soft_cap=30"], {"SOFTMAX_LOGIT_CAP": 30.0}),
        (["eval_interval=-1"], {"EVAL_INTERVAL_STEPS": None}),
        (["trainable_position_size=-1"], {}),
        (["remat_policy=minimal"], {"CHECKPOINT_POLICY": "dots_no_batch"}),
        (["attention=cudnn_flash_te"], {"ATTENTION_BACKEND": "cudnn"}),
        (["ici_fsdp_parallelism=4", "ici_expert_parallelism=1"], {"ICI_MESH_SHAPE": [1, 4, 1]}),
        (["quantization=int8"], {"QUANTIZATION": "int8"}),
        (["quantization=fp8"], {"QUANTIZATION": "fp8_delayed"}),
    ],
)
def test_key_sets_its_field(words, expected):
    assert fields(*words) == expected


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("remat_policy=save_dot_except_mlp", "none that keeps just that; projections, dots_no_b"),
        ("decoder_block=gemma3", "recipes know default, llama2, mistral and gpt3; a model"),
        ("opt_type=muon", "recipes have Adam; any optimizer of Optax can be a recipe"),
        ("quantization=intmp", "QUANTIZATION is int8 or fp8_delayed"),
        ("num_experts=8", "see lm.moe and docs/mixture_of_experts.md"),
        ("gradient_accumulation_steps=4", "add --fdl.task.train.gradient_accumulation_steps=N"),
        ("ici_sequence_parallelism=2", "the recipe's mesh is data × fsdp × tensor"),
        ("global_parameter_scale=2", "multiply the base sizes"),
        ("some_new_key=1", "unknown key."),
        ("vocab_siz=1", "unknown key; did you mean 'vocab_size'?"),
        ("model_name=llama2-7b", "give its file, configs/models/NAME.yml, besides the others"),
        ("dataset_name=our/data", "recipes have C4, The Pile and synthetic tokens"),
        ("logits_via_embedding=True", "normalize_embedding_logits divides logits by √emb_dim"),
    ],
)
def test_key_without_a_field_is_listed_with_the_reason(word, reason):
    (told,) = leftovers(word)
    key, _, value = word.partition("=")
    assert told.startswith(f"{key} = ") and value in told and reason in told


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("steps=abc", "expected an integer"),
        ("scale=abc", "expected an integer"),
        ("base_emb_dim=2.5", "expected an integer"),
        ("warmup_steps_fraction=abc", "expected a number"),
        ("ici_fsdp_parallelism=abc", "expected an integer"),
        ("ici_fsdp_parallelism=-1", "expected a number of devices; write it in place of -1"),
        ("per_device_batch_size=abc", "expected a number"),
        ("learning_rate=.nan", "expected a number"),
        ("gradient_clipping_threshold=x", "expected a number"),
        ("scan_layers=abc", "expected True or False"),
        ("eval_interval=x", "expected an integer"),
        ("dtype=[1]", "expected one of float32, bfloat16, float16"),
        ("dtype={}", "expected one of float32, bfloat16, float16"),
        ("dtype=float", "expected one of float32, bfloat16, float16"),
        ("mlp_activations=3", "ACTIVATION is relu, gelu or silu, with or without a linear gate"),
        ("mlp_activations=[]", "ACTIVATION is relu, gelu or silu, with or without a linear gate"),
        ("rope_max_timescale=abc", "no decoder_block with rotary positions is given"),
    ],
)
def test_value_of_the_wrong_type_is_listed_with_the_reason(word, reason):
    key, _, _ = word.partition("=")
    value = read_values({}, [word])[key]
    # The size beside it is not lost in silence if the scale cannot be read.
    assert leftovers(word, "head_dim=8") == [f"{key} = {value!r}: {reason}"]


def test_wrong_size_does_not_affect_the_others():
    words = ["base_emb_dim=x", "ici_data_parallelism=2", "ici_fsdp_parallelism=-1"]
    translation = translate(*words, "base_mlp_dim=8", "steps=5")
    assert translation.fields == {"HIDDEN_DIMS": 8, "MAX_STEPS": 5}


def test_timescales_of_rotary_positions_are_settings():
    words = ["rope_max_timescale=500_000", "rope_min_timescale=1"]
    path = "task.model.lm_tpl.stack_tpl.layer_tpl.attention_tpl.rotary_tpl.max_timescale"
    for more in (["decoder_block=llama2"], ["decoder_block=default", "logits_via_embedding=False"]):
        translation = translate(*words, *more)
        assert (translation.settings, translation.leftovers) == ({path: 500_000.0}, [])
    assert translate("rope_max_timescale=10_000").settings == {}
    for more in ([], ["decoder_block=gpt3"]):
        assert translate(*words, *more).settings == {}
        (told,) = leftovers(*words, *more)
        assert told.endswith(": no decoder_block with rotary positions is given")


def test_key_with_the_value_of_base_yml_needs_no_field():
    defaults = read_values(
        {"base.yml": "{quantization: intmp, some_new_key: 1, vocab_size: 32000}"}, []
    )
    assert fields("some_new_key=1", defaults=defaults) == {"VOCAB_SIZE": 32000}
    assert len(leftovers("some_new_key=2", defaults=defaults)) == 1


def test_scaled_logits_of_a_shared_embedding_are_left_over():
    words = ["decoder_block=gpt3", "logits_via_embedding=True"]
    assert len(leftovers(*words)) == 1
    assert list(translate(*words, "normalize_embedding_logits=False").recipes)[-1] == "LmExperiment"
    assert leftovers(*words, "normalize_embedding_logits=False") == []
    assert leftovers("logits_via_embedding=False") == []


@pytest.mark.parametrize(
    ("words", "data", "model"),
    [
        (["decoder_block=llama2"], "C4", "LlamaDecoder"),
        (["decoder_block=gpt3", "dataset_type=synthetic"], "SyntheticTokens", "LmExperiment"),
        (["dataset_name=c4/en:3.0.1"], "C4", "LmExperiment"),
        (["dataset_name=the_pile"], "ThePile", "LmExperiment"),
        (["dataset_name=mine", "dataset_type=synthetic"], "SyntheticTokens", "LmExperiment"),
    ],
)
def test_model_and_data_select_the_recipes(words, data, model):
    translation = translate(*words)
    assert list(translation.recipes) == ["AdamWCosine", "Spmd", data, model]
    assert translation.leftovers == []


def test_unknown_data_set_is_left_over():
    assert len(leftovers("dataset_name=mine")) == 1


@pytest.mark.parametrize(
    "text",
    ["[1, 2]", "a: [", "a: \0", "a: 2020-99-99", "1: 2"],
    ids=["list", "truncated", "nul", "date", "integer-key"],
)
def test_file_that_is_no_configuration_is_an_error(raises, text):
    with raises(UserError, owner="file.yml"):
        read_values({"file.yml": text}, [])
