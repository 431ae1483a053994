"""Logits and decoded tokens against Transformers: small random models, made on the spot.

Every family, with the options of its config.json that published models set. The session `parity`
runs this; its last lines are a table of families and errors.
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.config import build
from layerkit.config.nested_map import NestedMap
from layerkit.decoding import SampleDecoder
from layerkit.interop.hugging_face import (
    FAMILIES,
    UnsupportedModelError,
    export_model,
    import_model,
)
from layerkit.interop.hugging_face.families import family_of
from layerkit.interop.hugging_face.families.mixtral import MIXTRAL
from layerkit.interop.hugging_face.parts import ACTIVATIONS
from layerkit.layers import AttentionMask

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
pytest.importorskip("safetensors")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-4
VOCAB_SIZE, NEW_TOKENS = 64, 6
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GPT2 = {"vocab_size": VOCAB_SIZE, "n_embd": 16, "n_layer": 3, "n_head": 4, "n_positions": 32}
GPT2 |= {"bos_token_id": None, "eos_token_id": None}
T5 = {"vocab_size": VOCAB_SIZE, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2}
T5 |= {"num_decoder_layers": 3, "num_heads": 2, "decoder_start_token_id": 0, "eos_token_id": None}
BART = {"vocab_size": VOCAB_SIZE, "d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 20}
BART |= {"encoder_layers": 2, "decoder_layers": 3, "max_position_embeddings": 32}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 2, "decoder_start_token_id": 0}
BART |= {"bos_token_id": None, "eos_token_id": None, "forced_eos_token_id": None}
EQUAL = {"decoder_ffn_dim": 24, "decoder_attention_heads": 4}
ENCODER = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
WIDE_HEADS = {**SIZES, "head_dim": 8}
MIXTURE = {**SIZES, "moe_intermediate_size": 12, "num_experts": 5, "num_experts_per_tok": 2}
SHARED = {**MIXTURE, "shared_expert_intermediate_size": 20}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "head_dim": 8}
DELTA |= {"linear_key_head_dim": 6, "linear_value_head_dim": 5}
# Two layers and one of the next two.
DELTA |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
ATTENDS_FIRST = ["full_attention", *["linear_attention"] * 2]
LATENT = {**MIXTURE, "num_key_value_heads": 4, "q_lora_rank": 10, "kv_lora_rank": 8}
LATENT |= {"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 3, "n_routed_experts": 6}
LATENT |= {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 2}
del LATENT["num_experts"]
GLM = {**WIDE_HEADS, "moe_intermediate_size": 12, "n_routed_experts": 6, "n_group": 3}
GLM |= {"num_experts_per_tok": 2, "topk_group": 1, "n_shared_experts": 2}
LLAMA4 = {**WIDE_HEADS, "num_local_experts": 4, "intermediate_size_mlp": 20, "floor_scale": 3}
LLAMA4 |= {"attention_chunk_size": 5, "attn_scale": 0.7}
OSS = {**WIDE_HEADS, "num_experts": 5, "num_experts_per_tok": 3, "sliding_window": 4}
GEMMA4 = {**WIDE_HEADS, "global_head_dim": 16, "sliding_window": 4}
GEMMA4 |= {"hidden_size_per_layer_input": 0}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2}
GEMMA4_EXPERTS |= {"moe_intermediate_size": 12}
NEAR_AND_FAR = ["sliding_attention", "full_attention"] * 2
GEMMA4_SMALL = {**GEMMA4, "num_hidden_layers": 6, "num_kv_shared_layers": 3}
GEMMA4_SMALL |= {"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": VOCAB_SIZE}
WIDE = {**SIZES, "hidden_size": 32}
NEOX = {key: value for key, value in WIDE.items() if key != "num_key_value_heads"}
DENSE = {"num_local_experts": 0, "layer_types": ["attention"] * 3, "shared_intermediate_size": 20}
DENSE |= {"mamba_n_heads": 4}
MAMBA = {**SIZES, "mamba_n_heads": 4, "mamba_d_state": 6, "shared_intermediate_size": 20}
MAMBA2 = {"num_heads": 4, "head_dim": 8, "state_size": 6, "n_groups": 2, "hidden_size": 16}
MAMBA2 |= {key: SIZES[key] for key in ("vocab_size", "num_hidden_layers", "bos_token_id")}
MAMBA2 |= {key: SIZES[key] for key in ("eos_token_id", "pad_token_id")}
TYPES = ["linear_attention", "moe", "full_attention", "mlp"]
NEMOTRON = {**WIDE_HEADS, "ssm_state_size": 6, "mamba_num_heads": 4, "mamba_head_dim": 8}
NEMOTRON |= {"n_groups": 2, "n_routed_experts": 6, "moe_intermediate_size": 12}
NEMOTRON |= {"moe_shared_expert_intermediate_size": 20}
FALCON_H1 = {**SIZES, "mamba_d_ssm": 24, "mamba_n_heads": 4, "mamba_d_state": 6}
FACTORS = {"embedding_multiplier": 5.6, "lm_head_multiplier": 0.02, "key_multiplier": 0.39}
FACTORS |= {"attention_in_multiplier": 1.2, "attention_out_multiplier": 0.94}
FACTORS |= {"ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.24, "mlp_multipliers": [0.88, 0.59]}
FACTORS |= {"ssm_multipliers": [0.35, 0.25, 0.18, 0.5, 0.36]}
LFM2 = {**SIZES, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8}
OLMO_HYBRID = {**SIZES, "num_hidden_layers": 5, "linear_num_key_heads": 2}
# Transformers 5.23 saves convolutions of queries, keys and values of equal sizes correctly.
OLMO_HYBRID |= {"linear_num_value_heads": 2, "linear_key_head_dim": 6, "linear_value_head_dim": 6}
LINEAR = {"rope_type": "linear", "factor": 2.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 2.0, "beta_slow": 0.1}
YARN |= {"original_max_position_embeddings": 16}
MSCALED = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [4.0, 8.0]}


SEQUENCES = ("T5", "Bart")
OF_IMAGES_TOO = ("Gemma3", "Gemma4", "Llama4", "Qwen3_5", "Qwen3_5Moe")
HEADS = {"GPT2": "LMHeadModel"} | dict.fromkeys(SEQUENCES, "ForConditionalGeneration")


@dataclasses.dataclass(frozen=True)
class Case:
    """A model to compare.

    Attributes:
      family: Stem of the class names in Transformers.
      options: Of its config, besides sizes.
      sizes: Of its config.
      note: What is special, for the table.
      untied: Gives it a head of its own, where the config cannot say so.
      is_slow: Left out of the ordinary run, where others show nearly the same.
    """

    family: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    sizes: dict[str, Any] = dataclasses.field(default_factory=lambda: SIZES)
    note: str = ""
    untied: bool = False
    is_slow: bool = False


CASES = [
    Case("GPT2", sizes=GPT2),
    Case("GPT2", {"tie_word_embeddings": False, "n_inner": 20}, GPT2, "untied, n_inner"),
    Case("Llama"),
    Case("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}, note="tied, no groups"),
    Case("Llama", {"attention_bias": True, "mlp_bias": True}, note="biases"),
    Case("Llama", {"rope_scaling": LLAMA3}, note="Llama 3 rope"),
    Case("Llama", {"rope_scaling": LINEAR}, note="linear rope", is_slow=True),
    Case("Mistral", {"sliding_window": 4}, note="window"),
    Case("Mistral", {"sliding_window": None, "head_dim": 8}, note="wide heads", is_slow=True),
    Case("Mixtral", {"num_local_experts": 4}),
    Case(
        "Mixtral",
        {"num_experts_per_tok": 1, "num_local_experts": 3},
        SIZES,
        "one of three",
        is_slow=True,
    ),
    Case("Qwen2", {"tie_word_embeddings": True}, note="tied"),
    Case(
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
        note="near layers last",
    ),
    Case("Qwen2", {"rope_scaling": YARN}, note="YaRN"),
    Case("Qwen3", sizes=WIDE_HEADS),
    Case("Qwen3", {"attention_bias": True}, WIDE_HEADS, "biases", is_slow=True),
    Case("Qwen2Moe", sizes=SHARED),
    Case(
        "Qwen2Moe",
        {
            "norm_topk_prob": True,
            "qkv_bias": False,
            "decoder_sparse_step": 2,
            "num_hidden_layers": 5,
            "shared_expert_intermediate_size": 36,
            "use_sliding_window": True,
            "sliding_window": 3,
            "max_window_layers": 4,
        },
        SHARED,
        "dense and near layers",
    ),
    Case("Qwen3Moe", {"norm_topk_prob": True}, {**MIXTURE, "head_dim": 8}),
    Case("Qwen3Moe", {"mlp_only_layers": [0]}, MIXTURE, "dense first layer"),
    Case(
        "Qwen3Moe",
        {"use_sliding_window": True, "sliding_window": 3, "attention_bias": True},
        MIXTURE,
        "window, biases",
        is_slow=True,
    ),
    Case("Qwen3Next", sizes={**SHARED, **DELTA}),
    Case(
        "Qwen3Next",
        {
            "layer_types": ATTENDS_FIRST,
            "attention_bias": True,
            "hidden_act": "gelu",
            "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 2,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "partial_rotary_factor": 0.5,
            "tie_word_embeddings": True,
        },
        {**SHARED, **DELTA},
        "dense layer, biases, tied",
    ),
    Case("Qwen3_5", sizes={**SIZES, **DELTA}),
    Case(
        "Qwen3_5",
        {
            "layer_types": ATTENDS_FIRST,
            "attention_bias": True,
            "hidden_act": "gelu",
            "tie_word_embeddings": True,
        },
        {**SIZES, **DELTA},
        "biases, tied",
        is_slow=True,
    ),
    Case("Qwen3_5Moe", sizes={**SHARED, **DELTA}),
    Case("DeepseekV3", sizes=LATENT),
    Case(
        "DeepseekV3",
        {
            "q_lora_rank": None,
            "rope_interleave": False,
            "rope_scaling": MSCALED,
            "attention_bias": True,
            "norm_topk_prob": False,
            "topk_group": 2,
            "hidden_size": 12,
            "num_hidden_layers": 4,
        },
        LATENT,
        "no query latent, YaRN, halves",
    ),
    Case("DeepseekV2", sizes=LATENT, note="greedy"),
    Case(
        "DeepseekV2",
        {
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 3.0,
            "rope_scaling": MSCALED,
            "first_k_dense_replace": 0,
        },
        LATENT,
        "groups, no query latent, YaRN",
    ),
    Case("Glm4Moe", {"num_hidden_layers": 4}, GLM),
    Case(
        "Glm4Moe",
        {
            "attention_bias": True,
            "use_qk_norm": True,
            "norm_topk_prob": False,
            "topk_group": 2,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 2.5,
        },
        GLM,
        "norms of queries, biases",
    ),
    Case("Llama4", {"num_hidden_layers": 8, "interleave_moe_layer_step": 2}, LLAMA4),
    Case(
        "Llama4",
        {
            "attention_bias": True,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "num_experts_per_tok": 2,
            "moe_layers": [0, 2],
            "no_rope_layers": [0, 1, 1],
            "layer_types": ["chunked_attention", "chunked_attention", "full_attention"],
            "rope_parameters": {**LLAMA3, "high_freq_factor": 1.0, "rope_theta": 1e4},
        },
        LLAMA4,
        "Llama 3 rope, two experts",
    ),
    Case("GptOss", sizes=OSS, note="YaRN"),
    Case(
        "GptOss",
        {
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "swiglu_limit": 0.1,
            "swiglu_alpha": 1.1,
            "num_experts_per_tok": 1,
        },
        OSS,
        "no scaling, near layers last",
    ),
    Case("Gemma", sizes=WIDE_HEADS),
    Case("Gemma2", {"sliding_window": 4, "query_pre_attn_scalar": 24}, WIDE_HEADS),
    Case("Gemma2", {"layer_types": ["full_attention"] * 3}, WIDE_HEADS, "no window", is_slow=True),
    Case("Gemma3", {"sliding_window": 4, "num_hidden_layers": 8}, WIDE_HEADS, "8 layers of 6"),
    Case(
        "Gemma3",
        {
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        WIDE_HEADS,
        "linear rope, far layers",
    ),
    Case(
        "Gemma4",
        {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "final_logit_softcapping": 3.0,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        },
        GEMMA4,
        "6 layers of 3",
    ),
    Case(
        "Gemma4",
        {
            "attention_bias": True,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "tie_word_embeddings": False,
            "use_bidirectional_attention": "vision",
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.5,
                    "factor": 2.0,
                    "rope_theta": 1e5,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
        GEMMA4,
        "other rope, biases, untied",
    ),
    Case("Gemma4", {**GEMMA4_EXPERTS, "num_hidden_layers": 6}, GEMMA4, "experts"),
    Case(
        "Gemma4",
        {"num_kv_shared_layers": 2, "num_hidden_layers": 4},
        {**GEMMA4_SMALL, "layer_types": [*NEAR_AND_FAR[:2], *["full_attention"] * 2]},
        "shared keys",
    ),
    Case(
        "Gemma4",
        {"use_double_wide_mlp": True, "num_key_value_heads": 1},
        {**GEMMA4_SMALL, "layer_types": [*NEAR_AND_FAR[:3], NEAR_AND_FAR[0], *NEAR_AND_FAR[:2]]},
        "shared keys, wide",
    ),
    Case("Phi3"),
    # Rows of 1 and of 13 tokens; decoding crosses the trained length.
    Case(
        "Phi3", {"rope_scaling": LONGROPE, "original_max_position_embeddings": 8}, note="LongRoPE"
    ),
    Case("Olmo2"),
    Case(
        "Olmo2",
        {"num_key_value_heads": 4, "attention_bias": True},
        SIZES,
        "biases, no groups",
        is_slow=True,
    ),
    Case("Olmoe", {"num_experts": 5, "num_experts_per_tok": 2}),
    Case(
        "Olmoe",
        {"num_experts": 3, "num_experts_per_tok": 1, "norm_topk_prob": True, "head_dim": 4},
        {**SIZES, "num_key_value_heads": 4, "attention_bias": True},
        "one of three, biases",
        is_slow=True,
    ),
    Case("Olmo3", {"sliding_window": 4, "num_hidden_layers": 5}, note="5 layers of 4"),
    Case(
        "Olmo3",
        {
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 5e5, "attention_factor": 1.2},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        note="YaRN, far layers",
    ),
    Case("SmolLM3", {"num_hidden_layers": 5}),
    Case(
        "SmolLM3",
        {
            "no_rope_layers": [0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
            "rope_parameters": {**YARN, "rope_theta": 1e4},
        },
        note="windows, YaRN, biases, untied",
    ),
    Case("Granite", note="multipliers of 1", is_slow=True),
    Case(
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.22,
            "logits_scaling": 7.0,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
        note="biases, tied",
    ),
    Case(
        "GraniteMoeHybrid",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.22,
            "logits_scaling": 7.0,
            "attention_bias": True,
            "position_embedding_type": "rope",
            **DENSE,
        },
        note="biases",
    ),
    Case("GraniteMoeHybrid", {"tie_word_embeddings": True, **DENSE}, note="tied, no positions"),
    Case(
        "GraniteMoeHybrid",
        {
            "num_local_experts": 5,
            "num_hidden_layers": 6,
            "layer_types": ["mamba", "mamba", "attention", "mamba", "mamba", "attention"],
            "residual_multiplier": 0.22,
            "mamba_n_groups": 2,
            "mamba_proj_bias": True,
        },
        MAMBA,
        "Mamba layers, experts",
    ),
    Case("Mamba2", {"tie_word_embeddings": True}, MAMBA2, "tied"),
    Case(
        "Mamba2",
        {
            "n_groups": 1,
            "use_bias": True,
            "use_conv_bias": False,
            "conv_kernel": 3,
            "time_step_limit": (0.01, 0.05),
            "hidden_act": "gelu",
        },
        MAMBA2,
        "biases, limits",
        is_slow=True,
    ),
    Case("FalconH1", sizes=FALCON_H1),
    Case(
        "FalconH1",
        {
            **FACTORS,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_n_groups": 2,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
        FALCON_H1,
        "factors, biases, norms",
    ),
    Case("Lfm2", sizes=LFM2),
    Case(
        "Lfm2",
        {
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
        LFM2,
        "biases, untied",
    ),
    Case(
        "OlmoHybrid",
        {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
        OLMO_HYBRID,
        "no positions",
    ),
    Case(
        "OlmoHybrid",
        {"attention_bias": True, "linear_allow_neg_eigval": False},
        OLMO_HYBRID,
        "biases",
        is_slow=True,
    ),
    Case("NemotronH", {"layers_block_type": [*TYPES, "linear_attention"]}, NEMOTRON, "all kinds"),
    Case(
        "NemotronH",
        {
            "layers_block_type": [*["linear_attention", "mlp"] * 2, "full_attention", "mlp"],
            "use_bias": True,
            "mlp_bias": True,
            "use_conv_bias": False,
            "time_step_min": 0.02,
        },
        NEMOTRON,
        "no experts, biases",
        is_slow=True,
    ),
    Case("GPTNeoX", sizes=NEOX, note="a quarter rotary"),
    Case(
        "GPTNeoX",
        {
            "use_parallel_residual": False,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0},
        },
        NEOX,
        "sequential, tied",
    ),
    Case("StableLm", {"use_qkv_bias": True}, WIDE, note="biases"),
    Case("StableLm", {"use_parallel_residual": True}, WIDE, note="parallel"),
    Case("StableLm", {"qk_layernorm": True}, WIDE, note="norms per head"),
    Case("GPTJ", {"rotary_dim": 4}, {**GPT2, "n_embd": 32}, "half rotary"),
    Case(
        "GPTJ",
        {"rotary_dim": 4, "tie_word_embeddings": True, "n_inner": 20},
        GPT2,
        "tied, n_inner",
        is_slow=True,
    ),
    Case("Cohere", {"attention_bias": True}, note="biases"),
    Case("Cohere", {"use_qk_norm": True}, WIDE, note="norms per head"),
    Case("Cohere2", {"sliding_window": 4, "num_hidden_layers": 5, "logit_scale": 0.25}),
    Case(
        "Cohere2",
        {
            "sliding_window": 4,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "tie_word_embeddings": False,
            "head_dim": 8,
            "rope_parameters": {**YARN, "rope_theta": 5e4},
        },
        note="YaRN, untied",
    ),
    Case("Starcoder2", {"sliding_window": 4}, note="window"),
    Case(
        "Starcoder2",
        {"use_bias": False, "tie_word_embeddings": False, "hidden_act": "silu"},
        note="no biases, untied",
        is_slow=True,
    ),
    Case("SeedOss", sizes=WIDE_HEADS),
    Case("SeedOss", {"attention_out_bias": True, "mlp_bias": True}, WIDE_HEADS, "biases"),
    Case("Ernie4_5", sizes=WIDE_HEADS),
    Case("Ernie4_5", {"use_bias": True, "tie_word_embeddings": False}, WIDE_HEADS, "biases"),
    Case("T5", sizes=T5),
    Case(
        "T5",
        {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        T5,
        "1.1",
        untied=True,
    ),
    Case("T5", {"tie_word_embeddings": False}, T5, "without a head", is_slow=True),
    Case("Bart", {"pad_token_id": 0}, BART, "sides of other sizes"),
    Case("Bart", {"pad_token_id": 0, "scale_embedding": True}, {**BART, **EQUAL}, "scaled"),
    Case("Bert", sizes=ENCODER),
    Case("Bert", {"hidden_act": "gelu_new"}, ENCODER, "other GELU", is_slow=True),
    Case("Roberta", {"type_vocab_size": 1, "hidden_act": "relu"}, ENCODER),
    Case("XLMRoberta", sizes=ENCODER, is_slow=True),
    Case("ModernBert", {"local_attention": 6, "num_hidden_layers": 5}, ENCODER),
    Case(
        "ModernBert",
        {
            "local_attention": 4,
            "global_attn_every_n_layers": 2,
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
            "norm_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "classifier_bias": True,
            "classifier_activation": "relu",
            "decoder_bias": False,
            "tie_word_embeddings": False,
        },
        ENCODER,
        "biases, YaRN, untied",
    ),
]


def test_activations_are_those_of_transformers():
    inputs = np.linspace(-8, 8, 65, dtype=np.float32)
    for spelling, activation in ACTIVATIONS.items():
        expected = transformers.activations.ACT2FN[spelling](torch.tensor(inputs)).numpy()
        result = build(activation).apply({}, jnp.asarray(inputs))
        np.testing.assert_allclose(result, expected, atol=2e-6, err_msg=spelling)


def name_of(case):
    return f"{case.family} {case.note}".strip().replace(" ", "-")


@pytest.fixture(
    scope="module",
    params=[pytest.param(c, marks=[pytest.mark.slow] * c.is_slow, id=name_of(c)) for c in CASES],
)
def theirs(request, tmp_path_factory):
    """A case, the model of Transformers and its folder."""
    case = request.param
    text = "Text" if case.family in OF_IMAGES_TOO else ""
    config_class = getattr(transformers, f"{case.family}{text}Config")
    head = HEADS.get(case.family, "ForMaskedLM" if case.sizes is ENCODER else "ForCausalLM")
    model_class = getattr(transformers, case.family + head)
    torch.manual_seed(0)
    model = model_class(config_class(**{**case.sizes, **case.options})).eval()
    if case.untied:
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    with torch.no_grad():
        # Norms and biases start at 1 and 0, where a mistake would not be seen.
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
        for name, bias in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias.copy_(0.1 * torch.randn_like(bias))
            if name.endswith("layer_scalar"):
                bias.add_(0.5 * torch.randn_like(bias))
    folder = tmp_path_factory.mktemp("theirs")
    model.save_pretrained(folder)
    return case, model, folder


def inputs(length, *, seed=0):
    return np.random.default_rng(seed).integers(1, VOCAB_SIZE, (2, length))


def their_logits(case, model, length):
    with torch.no_grad():
        if case.family not in SEQUENCES:
            return model(torch.tensor(inputs(length))).logits.numpy()
        source, target = inputs(length), inputs(length + 2, seed=1)
        outputs = model(input_ids=torch.tensor(source), decoder_input_ids=torch.tensor(target))
        return outputs.logits.numpy()


def our_logits(case, model, variables, length):
    ids = (jnp.asarray(inputs(length)),)
    if case.family in SEQUENCES:
        ids = (*ids, jnp.asarray(inputs(length + 2, seed=1)))

    @jax.jit
    def run(variables):
        network = "model" if case.family in SEQUENCES else "lm"
        return model.apply(variables, *ids, method=lambda m, *ids: getattr(m, network).logits(*ids))

    return np.asarray(run(variables))


@pytest.mark.parametrize("repeated", [True, False], ids=["repeated", "unrolled"])
def test_logits_agree(theirs, parity_table, repeated):
    case, model, folder = theirs
    config, variables = import_model(folder, repeated=repeated)
    ours = build(config)
    length = 13 if repeated else 1
    expected = their_logits(case, model, length)
    error = np.abs(our_logits(case, ours, variables, length) - expected).max()
    error /= np.abs(expected).max()
    stack = "repeated" if repeated else "unrolled"
    parity_table.append((model.config.model_type, f"{case.note or 'plain'}, {stack}", float(error)))
    assert error <= TOLERANCE


# The code of the other family is in its published folders.
THEIRS = [family for family in FAMILIES if family.model_type != "minicpm"]


@pytest.mark.parametrize("family", THEIRS, ids=lambda family: family.model_type)
def test_missing_keys_have_the_defaults_of_transformers(family):
    model_type = family.model_type.replace("kimi_k2", "deepseek_v3")
    # The defaults of GLM are no model: they give heads of 42.7 coordinates, half of them rotated.
    # In those of Qwen, the vectors of images have another size than texts.
    sizes = {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4}
    qwen = {key: {"text_config": sizes} for key in ("qwen2_5_vl", "qwen3_5", "qwen3_5_moe")}
    # Those of Gemma 3 give 14 x 14 patches, which are not 256 squares, and a head.
    tower = {"image_size": 896, "patch_size": 14, "vision_use_head": False}
    gemma = {"gemma3": {"vision_config": tower}}
    heads = {"glm4_moe": {"head_dim": 128}, **qwen, **gemma}.get(model_type, {})
    full = transformers.AutoConfig.for_model(model_type, **heads).to_dict()
    needed = {"model_type", "vocab_size", "hidden_size", "intermediate_size"}
    needed |= {"num_hidden_layers", "num_attention_heads", *heads}
    if full.get("num_experts_per_tok", 1) is None:  # DeepSeek V2 has no default that works.
        full["num_experts_per_tok"] = 6
        needed |= {"num_experts_per_tok"}
    shorter = {key: value for key, value in full.items() if key in needed}
    assert family.read_config(shorter) == family.read_config(full)


@pytest.mark.parametrize("family", THEIRS, ids=lambda family: family.model_type)
def test_copies_are_the_tied_tensors_of_transformers(family):
    tied = getattr(transformers, family.architecture)._tied_weights_keys
    if family.model_type == "bart":
        inner = transformers.BartModel._tied_weights_keys
        tied = tied | {f"model.{copy}": f"model.{of}" for copy, of in inner.items()}
    if family.model_type == "qwen2_5_vl":  # Its folders leave a part of the names out.
        tied = {copy: of.replace(".language_model", "") for copy, of in tied.items()}
    assert family.copies == (tied or {})


def test_minicpm_is_granite_with_other_keys(tmp_path, parity_table):
    factors = {"embedding_multiplier": 12.0, "attention_multiplier": 0.5, "logits_scaling": 2.0}
    case = Case("Granite", {**factors, "residual_multiplier": 1.4 / 3**0.5})
    torch.manual_seed(0)
    config = transformers.GraniteConfig(**SIZES, **case.options, tie_word_embeddings=True)
    model = transformers.GraniteForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    keys = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 8, "vocab_size": VOCAB_SIZE}
    keys |= {name: size for name, size in SIZES.items() if name != "pad_token_id"}
    keys |= {"architectures": ["MiniCPMForCausalLM"], "hidden_act": "silu"}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    ours, variables = import_model(tmp_path)
    expected = their_logits(case, model, 13)
    error = np.abs(our_logits(case, build(ours), variables, 13) - expected).max()
    parity_table.append(("minicpm", "", float(error / np.abs(expected).max())))
    assert error <= TOLERANCE * np.abs(expected).max()


def test_the_balance_loss_of_mixtral_agrees():
    sizes = {**SIZES, "num_hidden_layers": 1, "num_local_experts": 4, "router_aux_loss_coef": 0.5}
    torch.manual_seed(0)
    theirs = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes)).eval()
    experts, is_token = theirs.model.layers[0].mlp, np.ones((2, 9), bool)
    is_token[1, 5:] = False
    seen: list[Any] = []
    experts.register_forward_pre_hook(lambda _, args: seen.append(args[0].numpy()))
    with torch.no_grad():
        outputs = theirs(
            torch.tensor(inputs(9)),
            attention_mask=torch.tensor(is_token).long(),
            output_router_logits=True,
        )
    network = MIXTRAL.read_config({**sizes, "model_type": "mixtral"}).lm_tpl
    ours = build(network.stack_tpl.layer_tpl.feed_forward_tpl.set(input_dims=16, hidden_dims=24))
    variables = ours.init(jax.random.key(0))
    variables["params"]["router"]["w"] = jnp.asarray(experts.gate.weight.detach().numpy().T)
    x, is_token = jnp.asarray(seen[0]), jnp.asarray(is_token)
    _, updates = ours.clone(train=False).apply(
        variables, x, is_token=is_token, mutable=["aux_loss"]
    )
    (loss,) = jax.tree.leaves(updates)
    np.testing.assert_allclose(loss, 0.5 * outputs.aux_loss.numpy(), rtol=1e-5)


def test_cached_greedy_decoding_gives_the_same_tokens(theirs):
    case, model, folder = theirs
    config, variables = import_model(folder)
    if case.sizes is ENCODER:
        pytest.skip("a masked language model does not decode")
    config.decoder = SampleDecoder.HParams.config(max_decode_steps=NEW_TOKENS, temperature=0.0)
    ours, prompts = build(config), inputs(5)
    with torch.no_grad():
        options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
        # Their cache takes it that both sides are equally deep.
        options["use_cache"] = case.family not in SEQUENCES
        expected = model.generate(torch.tensor(prompts), **options).numpy()
    ids = jnp.asarray(prompts, jnp.int32)
    lengths = jnp.full((2,), 5, jnp.int32)
    batch = NestedMap(ids=ids, prompt_lengths=lengths)
    if case.family in SEQUENCES:
        batch = NestedMap(src=NestedMap(ids=ids, paddings=jnp.zeros((2, 5))))
    decode = jax.jit(lambda variables: ours.apply(variables, batch, method="decode"))
    np.testing.assert_array_equal(decode(variables).ids, expected)


@pytest.mark.parametrize(
    "theirs",
    [
        pytest.param(case, id=name_of(case))
        for case in CASES
        if ({"num_experts", "num_local_experts", "n_routed_experts"} & {*case.sizes, *case.options})
        or case.family
        in ("Cohere2", "Gemma4", "GPTJ", "Mamba2", "Qwen3_5", "FalconH1", "Lfm2", "OlmoHybrid")
        if not case.is_slow
    ],
    indirect=True,
)
def test_packed_rows_equal_separate_rows(theirs):
    config, variables = import_model(theirs[2])
    ours, lengths = build(config), (9, 4)
    ids = jnp.asarray(inputs(9))
    packed = jnp.concatenate([row[:n] for row, n in zip(ids, lengths, strict=True)])[None]
    packing = {
        "segment_ids": jnp.repeat(jnp.array([1, 2]), jnp.array(lengths))[None],
        "segment_pos": jnp.concatenate([jnp.arange(n) for n in lengths])[None],
    }
    run = jax.jit(
        lambda ids, **packing: ours.apply(
            variables, ids, method=lambda m, x: m.lm.logits(x, **packing)
        )
    )
    separate, logits = run(ids), run(packed, **packing)[0]
    expected = jnp.concatenate([row[:n] for row, n in zip(separate, lengths, strict=True)])
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "sizes"), [("DeepseekV3", LATENT), ("Glm4Moe", GLM)], ids=["DeepseekV3", "Glm4Moe"]
)
def test_modules_of_multi_token_prediction_agree(family, sizes, parity_table, tmp_path):
    made = getattr(transformers, f"{family}Config")(**sizes, num_nextn_predict_layers=2)
    ours = family_of(made.model_type).read_config(made.to_dict())
    drawn = build(ours).init(jax.random.key(0))
    draw = np.random.default_rng(0)
    drawn = jax.tree.map(lambda leaf: leaf + 0.1 * draw.normal(size=leaf.shape), drawn)
    drawn = jax.tree.map(lambda leaf: leaf.astype(np.float32), drawn)
    export_model(tmp_path, ours, drawn)
    theirs = getattr(transformers, f"{family}ForCausalLM").from_pretrained(tmp_path).eval()
    first = theirs.config.num_hidden_layers
    # Those of Transformers are the numbers of published models.
    theirs._keys_to_ignore_on_load_unexpected = [
        rf"model\.layers\.{first + module}\." for module in (0, 1)
    ]
    modules = transformers.modeling_layers.MtpModel.from_pretrained(theirs).eval()
    config, variables = import_model(tmp_path)
    ids, length = inputs(9), 9 - 2

    def logits_of(model):
        lm = model.lm
        hidden, result = lm.hidden(jnp.asarray(ids))[:, :length], []
        for depth, module in enumerate(lm.mtp.layers, start=1):
            hidden = module(
                hidden,
                lm.embedding(jnp.asarray(ids[:, depth : length + depth])),
                mask=AttentionMask.causal_mask(2, length),
                positions=jnp.broadcast_to(jnp.arange(length), (2, length)),
            )
            result.append(lm.softmax.logits(hidden))
        return result

    result = build(config).apply(variables, method=logits_of)
    with torch.no_grad():
        hidden = theirs.model(torch.tensor(ids)).last_hidden_state[:, :length]
        for depth in (1, 2):
            hidden = modules.forward_layer(
                depth - 1,
                hidden,
                torch.arange(length)[None],
                None,
                input_ids=torch.tensor(ids[:, depth : length + depth]),
            )
            expected = theirs.lm_head(hidden).numpy()
            error = float(np.abs(result[depth - 1] - expected).max() / np.abs(expected).max())
            parity_table.append((made.model_type, f"multi-token prediction {depth}", error))
            assert error <= TOLERANCE


@pytest.mark.slow
def test_the_text_of_a_model_of_text_and_images_is_exported(tmp_path):
    vision = {"hidden_size": 16, "intermediate_size": 64, "patch_size": 4, "image_size": 8}
    vision |= {"num_hidden_layers": 1, "num_attention_heads": 2, "vision_output_dim": 16}
    torch.manual_seed(0)
    made = transformers.Llama4Config(text_config=LLAMA4, vision_config=vision)
    both = transformers.Llama4ForConditionalGeneration(made).eval()
    both.save_pretrained(tmp_path / "both")
    model = import_model(tmp_path / "both")
    with pytest.raises(UnsupportedModelError, match="llama4_text"):
        export_model(tmp_path / "text", *model, family="llama4")
    export_model(tmp_path / "text", *model, tokenizer_folder=tmp_path / "both")
    text, ids = transformers.Llama4ForCausalLM.from_pretrained(tmp_path / "text"), inputs(9)
    with torch.no_grad():
        expected, result = (one(torch.tensor(ids)).logits.numpy() for one in (both, text.eval()))
    np.testing.assert_array_equal(result, expected)


ENCODERS = ["Bert", "Roberta", "ModernBert"]


@pytest.mark.parametrize("family", ENCODERS)
def test_hidden_states_and_logits_of_padded_rows_agree(family, tmp_path):
    options = {**ENCODER, "num_hidden_layers": 5, "pad_token_id": 1, "local_attention": 4}
    config_class = getattr(transformers, f"{family}Config")
    options = {key: value for key, value in options.items() if hasattr(config_class(), key)}
    theirs = getattr(transformers, f"{family}ForMaskedLM")(config_class(**options)).eval()
    # An encoder without its head, as models for embeddings are saved, and the whole model.
    theirs.base_model.save_pretrained(tmp_path / "encoder")
    theirs.save_pretrained(tmp_path / "whole")
    ids, is_token = inputs(13) // 2 + 2, np.arange(13) < np.array([[13], [9]])
    ids = np.where(is_token, ids, 1)
    arrays = {"input_ids": ids, "attention_mask": is_token}
    if family == "Bert":
        arrays["token_type_ids"] = ids % 2
    with torch.no_grad():
        tensors = {name: torch.tensor(array).long() for name, array in arrays.items()}
        outputs = theirs(**tensors, output_hidden_states=True)
    packing = {"segment_ids": is_token.astype(np.int32)}
    packing |= {name: arrays[name] for name in ("token_type_ids",) if name in arrays}
    for name in ("encoder", "whole"):
        config, variables = import_model(tmp_path / name)
        ours = build(config)
        hidden = ours.apply(variables, ids, method=lambda m, ids: m.lm.hidden(ids, **packing))
        expected = outputs.hidden_states[-1].numpy()[is_token]
        np.testing.assert_allclose(hidden[is_token], expected, atol=1e-5 * np.abs(expected).max())
    logits = ours.apply(variables, ids, method=lambda m, ids: m.lm.logits(ids, **packing))
    expected = outputs.logits.numpy()[is_token]
    np.testing.assert_allclose(logits[is_token], expected, atol=1e-5 * np.abs(expected).max())
    export_model(tmp_path / "again", *import_model(tmp_path / "encoder"))
    again = type(theirs.base_model).from_pretrained(tmp_path / "again").eval()
    with torch.no_grad():
        hidden = again(**tensors).last_hidden_state.numpy()
    np.testing.assert_array_equal(hidden, outputs.hidden_states[-1].numpy())


def test_transformers_loads_an_exported_model(theirs, tmp_path):
    case, model, folder = theirs
    config, variables = import_model(folder)
    # Plain models are exported without token ids, whose defaults may be beyond the vocabulary.
    source = folder if case.note else None
    family = model.config.model_type
    export_model(tmp_path, config, variables, tokenizer_folder=source, family=family)
    again = type(model).from_pretrained(tmp_path).eval()
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert (getattr(again.config, key, None) or 0) < VOCAB_SIZE
    # PyTorch rounds the products of these experts by the address of their weights.
    is_rounded = "enable_moe_block" in case.options or case.family == "Qwen3Next"
    tolerance = 1e-6 if is_rounded else 0.0
    logits = their_logits(case, again, 9), their_logits(case, model, 9)
    np.testing.assert_allclose(*logits, rtol=0.0, atol=tolerance)
    assert again.config.get_text_config().vocab_size == VOCAB_SIZE
