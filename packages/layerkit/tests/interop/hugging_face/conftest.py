"""Small folders of every family, and the table that the parity tests print."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from layerkit.config import build
from layerkit.interop.hugging_face.families import family_of
from layerkit.interop.hugging_face.tensors import dissect, pieces_of, their_shapes

SIZES = {
    "vocab_size": 12,
    "hidden_size": 8,
    "intermediate_size": 10,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "architectures": ["…"],
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA_ONLY = {"num_key_value_heads", "rms_norm_eps"}
ROPE = {"rope_theta": 10000.0, "rope_scaling": None}
SILU = {"hidden_act": "silu"}
GEMMA = {
    **SIZES,
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 4,
    "query_pre_attn_scalar": 6,
    "sliding_window": 4,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
COHERE = {
    **{key: value for key, value in SIZES.items() if key != "rms_norm_eps"},
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.25,
    "tie_word_embeddings": True,
    "attention_bias": False,
}
GRANITE = {
    **SIZES,
    **ROPE,
    **SILU,
    "attention_bias": False,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.22,
    "logits_scaling": 49.0,
}
EXPERTS = {
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.02,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
}
DELTA = {
    **SIZES,
    **ROPE,
    **SILU,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 8,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 3,
}
SEPARATE_DELTA = {key: value for key, value in DELTA.items() if key[:4] not in ("head", "part")}
SEPARATE_DELTA |= {"linear_num_value_heads": 2, "linear_allow_neg_eigval": True}
SEPARATE_DELTA |= {"layer_types": ["full_attention", "linear_attention"]}
LATENT = {**SIZES, **ROPE, **SILU, "num_key_value_heads": 4, "q_lora_rank": 6, "kv_lora_rank": 5}
LATENT |= {"qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": 7, "attention_bias": True}
LATENT |= {"moe_intermediate_size": 6, "n_routed_experts": 4, "n_shared_experts": 2, "n_group": 2}
LATENT |= {"num_experts_per_tok": 2, "topk_group": 1, "first_k_dense_replace": 1}
LATENT |= {"moe_layer_freq": 1, "aux_loss_alpha": 0.001}
SOFTMAX = {"scoring_func": "softmax", "topk_method": "group_limited_greedy"}
SIGMOID = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": True}
SIGMOID |= {"routed_scaling_factor": 2.5, "norm_topk_prob": True}
BERT = {
    **{key: value for key, value in SIZES.items() if key not in _LLAMA_ONLY},
    "hidden_act": "gelu_new",
    "layer_norm_eps": 1e-12,
    "type_vocab_size": 2,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "position_embedding_type": "absolute",
    "tie_word_embeddings": True,
}
del BERT["attention_dropout"]
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "vocab_size": 12,
        "n_embd": 8,
        "n_layer": 3,
        "n_head": 2,
        "n_positions": 16,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "attn_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "resid_pdrop": 0.1,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": True,
    },
    "llama": {**SIZES, **ROPE, **SILU, "attention_bias": False, "mlp_bias": True},
    "mistral": {**SIZES, **ROPE, **SILU, "sliding_window": 4},
    "mixtral": {
        **SIZES,
        **ROPE,
        **SILU,
        "sliding_window": None,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.02,
        "router_jitter_noise": 0.0,
    },
    "qwen2": {**SIZES, **ROPE, **SILU, "use_sliding_window": False, "tie_word_embeddings": True},
    "qwen3": {**SIZES, **ROPE, **SILU, "head_dim": 4, "attention_bias": False},
    "qwen2_moe": {
        **SIZES,
        **ROPE,
        **SILU,
        **EXPERTS,
        "shared_expert_intermediate_size": 7,
        "qkv_bias": True,
        "use_sliding_window": False,
    },
    "qwen3_moe": {
        **SIZES,
        **ROPE,
        **SILU,
        **EXPERTS,
        "head_dim": 4,
        "attention_bias": False,
        "use_sliding_window": False,
    },
    "qwen3_next": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 7},
    "qwen3_5_text": {**DELTA, "attn_output_gate": True},
    "qwen3_5_moe_text": {
        **{key: value for key, value in DELTA.items() if key != "intermediate_size"},
        "attn_output_gate": True,
        "moe_intermediate_size": 6,
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.02,
        "shared_expert_intermediate_size": 7,
    },
    "deepseek_v2": {**LATENT, **SOFTMAX, "routed_scaling_factor": 16.0, "norm_topk_prob": False},
    "deepseek_v3": {**LATENT, **SIGMOID},
    "kimi_k2": {**LATENT, **SIGMOID, "q_lora_rank": None},
    "glm4_moe": {
        **SIZES,
        **ROPE,
        **SILU,
        "head_dim": 4,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "moe_intermediate_size": 6,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
    },
    "llama4_text": {
        **SIZES,
        **ROPE,
        **SILU,
        "head_dim": 4,
        "attention_bias": False,
        "num_local_experts": 3,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 7,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 0, 1],
        "attention_chunk_size": 4,
        "floor_scale": 4,
        "router_aux_loss_coef": 0.02,
    },
    "gpt_oss": {
        **SIZES,
        **SILU,
        "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False},
        "head_dim": 4,
        "attention_bias": True,
        "sliding_window": 4,
        "swiglu_limit": 7.0,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.02,
    },
    "gemma": {
        **SIZES,
        **ROPE,
        "hidden_act": "gelu_pytorch_tanh",
        "head_dim": 4,
        "tie_word_embeddings": True,
        "attention_bias": False,
    },
    "gemma2": {**GEMMA, **ROPE, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": {
        **GEMMA,
        **ROPE,
        "rope_local_base_freq": 1000.0,
        "num_hidden_layers": 5,
        "sliding_window_pattern": 2,
    },
    "gemma4_text": {
        **{key: GEMMA[key] for key in {*SIZES, "hidden_activation", "attention_bias"}},
        "final_logit_softcapping": 30.0,
        "sliding_window": 4,
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        "head_dim": 4,
        "global_head_dim": 8,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.5,
                "rope_theta": 1e5,
            },
        },
    },
    "phi3": {
        **SIZES,
        **ROPE,
        **SILU,
        "sliding_window": None,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    "olmo2": {**SIZES, **ROPE, **SILU, "attention_bias": False},
    "olmoe": {
        **SIZES,
        **ROPE,
        **SILU,
        "attention_bias": False,
        "clip_qkv": None,
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.02,
    },
    "olmo3": {
        **SIZES,
        **ROPE,
        **SILU,
        "attention_bias": False,
        "sliding_window": 4,
        "num_hidden_layers": 5,
    },
    "olmo_hybrid": SEPARATE_DELTA,
    "lfm2": {
        **{key: value for key, value in SIZES.items() if key != "rms_norm_eps"},
        **ROPE,
        **SILU,
        "norm_eps": 1e-6,
        "num_hidden_layers": 2,
        "layer_types": ["conv", "full_attention"],
        "head_dim": 4,
        "block_auto_adjust_ff_dim": True,
        "block_ff_dim": None,
        "block_multiple_of": 4,
        "block_ffn_dim_multiplier": 1.5,
        "conv_L_cache": 4,
        "conv_bias": True,
    },
    "smollm3": {**SIZES, **ROPE, **SILU, "attention_bias": False, "no_rope_layers": [1, 0, 1]},
    "granite": {**GRANITE, "mlp_bias": False},
    "granitemoehybrid": {
        **GRANITE,
        "shared_intermediate_size": 6,
        "position_embedding_type": "rope",
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.02,
        "layer_types": ["mamba", "attention", "mamba"],
        "mamba_n_heads": 4,
        "mamba_n_groups": 2,
        "mamba_d_head": "auto",
        "mamba_d_state": 3,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    },
    "mamba2": {
        "vocab_size": 12,
        "hidden_size": 8,
        "num_hidden_layers": 3,
        "num_heads": 4,
        "head_dim": 2,
        "expand": 1,
        "state_size": 3,
        "n_groups": 2,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "hidden_act": "silu",
        "layer_norm_epsilon": 1e-5,
        "time_step_limit": [0.001, 0.5],
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "falcon_h1": {
        **SIZES,
        **ROPE,
        **SILU,
        "num_hidden_layers": 2,
        "head_dim": 4,
        "attention_bias": False,
        "mlp_bias": False,
        "mamba_d_ssm": 12,
        "mamba_n_heads": 4,
        "mamba_d_head": "auto",
        "mamba_n_groups": 2,
        "mamba_d_state": 3,
        "mamba_d_conv": 3,
        "mamba_conv_bias": True,
        "mamba_proj_bias": True,
        "projectors_bias": True,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "time_step_limit": [0.001, 0.5],
        "embedding_multiplier": 5.6,
        "lm_head_multiplier": 0.3,
        "key_multiplier": 0.39,
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.9,
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.24,
        "ssm_multipliers": [0.35, 0.25, 0.18, 0.5, 0.36],
        "mlp_multipliers": [0.88, 0.59],
    },
    "nemotron_h": {
        "vocab_size": 12,
        "hidden_size": 8,
        "hybrid_override_pattern": "ME*-M",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "attention_dropout": 0.0,
        "layer_norm_epsilon": 1e-5,
        "mamba_num_heads": 4,
        "mamba_head_dim": 2,
        "n_groups": 2,
        "ssm_state_size": 3,
        "conv_kernel": 4,
        "use_bias": True,
        "use_conv_bias": True,
        "mamba_hidden_act": "silu",
        "time_step_min": 0.001,
        "intermediate_size": 10,
        "mlp_bias": False,
        "n_routed_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 6,
        "moe_shared_expert_intermediate_size": 7,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "minicpm": {
        **SIZES,
        **ROPE,
        **SILU,
        "attention_bias": False,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 4,
    },
    "gpt_neox": {
        **{key: value for key, value in SIZES.items() if key not in _LLAMA_ONLY},
        "hidden_act": "gelu_new",
        "layer_norm_eps": 1e-5,
        "attention_bias": True,
        "hidden_dropout": 0.0,
        "rotary_emb_base": 10000.0,
        "rotary_pct": 1.0,
        "rope_scaling": None,
        "use_parallel_residual": True,
    },
    "stablelm": {
        **{key: value for key, value in SIZES.items() if key != "rms_norm_eps"},
        **ROPE,
        **SILU,
        "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 1.0,
        "use_qkv_bias": True,
        "qk_layernorm": True,
        "use_parallel_residual": False,
    },
    "gptj": {
        "vocab_size": 12,
        "n_embd": 8,
        "n_layer": 3,
        "n_head": 2,
        "n_positions": 16,
        "n_inner": None,
        "rotary_dim": 2,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "attn_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "resid_pdrop": 0.1,
        "tie_word_embeddings": False,
    },
    "cohere": {**COHERE, **ROPE, **SILU, "use_qk_norm": True},
    "cohere2": {
        **COHERE,
        **ROPE,
        **SILU,
        "num_hidden_layers": 5,
        "sliding_window": 4,
        "sliding_window_pattern": 2,
    },
    "starcoder2": {
        **{key: value for key, value in SIZES.items() if key != "rms_norm_eps"},
        **ROPE,
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "use_bias": True,
        "sliding_window": 4,
        "residual_dropout": 0.0,
        "embedding_dropout": 0.0,
    },
    "seed_oss": {
        **SIZES,
        **ROPE,
        **SILU,
        "head_dim": 4,
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
        "residual_dropout": 0.0,
    },
    "ernie4_5": {**SIZES, **ROPE, **SILU, "head_dim": 4, "use_bias": True},
    "t5": {
        "vocab_size": 12,
        "d_model": 8,
        "d_kv": 4,
        "d_ff": 10,
        "num_layers": 2,
        "num_decoder_layers": 3,
        "num_heads": 2,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 16,
        "layer_norm_epsilon": 1e-6,
        "dropout_rate": 0.1,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
        "is_encoder_decoder": True,
    },
    "bart": {
        "vocab_size": 12,
        "d_model": 8,
        "encoder_ffn_dim": 10,
        "decoder_ffn_dim": 9,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 2,
        "max_position_embeddings": 16,
        "activation_function": "gelu_new",
        "dropout": 0.1,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "encoder_layerdrop": 0.0,
        "scale_embedding": False,
        "tie_word_embeddings": True,
        "decoder_start_token_id": 2,
        "is_encoder_decoder": True,
    },
    "bert": BERT,
    "roberta": {**BERT, "pad_token_id": 1},
    "xlm-roberta": {**BERT, "type_vocab_size": 1},
    "modernbert": {
        **{key: value for key, value in SIZES.items() if key not in _LLAMA_ONLY},
        "num_hidden_layers": 5,
        "norm_eps": 1e-5,
        "norm_bias": False,
        "hidden_activation": "gelu_new",
        "attention_bias": False,
        "mlp_bias": False,
        "mlp_dropout": 0.0,
        "embedding_dropout": 0.0,
        "decoder_bias": True,
        "classifier_bias": False,
        "classifier_activation": "gelu_new",
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
        "local_attention": 6,
        "tie_word_embeddings": True,
    },
}
_TOWER = {
    "hidden_size": 8,
    "intermediate_size": 10,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "hidden_act": "gelu_new",
    "layer_norm_eps": 1e-5,
}
_IMAGES = {**_TOWER, "image_size": 19, "patch_size": 6, "num_channels": 2}
_TEXTS = {**_TOWER, "vocab_size": 12, "max_position_embeddings": 7}
_QWEN_IMAGES = {
    "depth": 3,
    "hidden_size": 8,
    "intermediate_size": 10,
    "num_heads": 2,
    "hidden_act": "gelu_new",
    "patch_size": 2,
    "out_hidden_size": 8,
}
_SECTIONS = {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 0]}}
CONFIGS |= {
    "vit": {**_IMAGES, "qkv_bias": True, "id2label": {"0": "LABEL_0", "1": "LABEL_1"}},
    "clip": {"vision_config": _IMAGES, "text_config": _TEXTS, "projection_dim": 6},
    "siglip": {"vision_config": _IMAGES, "text_config": _TEXTS},
    "whisper": {
        "vocab_size": 12,
        "d_model": 8,
        "num_mel_bins": 4,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 10,
        "decoder_ffn_dim": 9,
        "max_source_positions": 6,
        "max_target_positions": 7,
        "activation_function": "gelu_new",
        "dropout": 0.1,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "scale_embedding": False,
        "tie_word_embeddings": True,
        "decoder_start_token_id": 2,
        "is_encoder_decoder": True,
    },
    "gemma3": {
        "vision_config": {**_IMAGES, "vision_use_head": False},
        "text_config": CONFIGS["gemma3_text"],
        "mm_tokens_per_image": 1,
        "image_token_index": 7,
    },
    "qwen2_5_vl": {
        "text_config": {
            **SIZES,
            **SILU,
            "rope_theta": 10000.0,
            "rope_scaling": {"rope_type": "default", "mrope_section": [0, 0, 1]},
            "use_sliding_window": False,
        },
        "vision_config": {
            **_QWEN_IMAGES,
            "hidden_act": "silu",
            "window_size": 8,
            "fullatt_block_indexes": [1],
        },
        "image_token_id": 7,
    },
    "qwen3_5": {
        "text_config": {**CONFIGS["qwen3_5_text"], **_SECTIONS},
        "vision_config": {**_QWEN_IMAGES, "num_position_embeddings": 9},
        "image_token_id": 7,
    },
    "qwen3_5_moe": {
        "text_config": {**CONFIGS["qwen3_5_moe_text"], **_SECTIONS},
        "vision_config": {**_QWEN_IMAGES, "num_position_embeddings": 9},
        "image_token_id": 7,
    },
}
for _name, _config in CONFIGS.items():
    _config["model_type"] = _name


@pytest.fixture
def configs():
    """A small config.json of every family."""
    return CONFIGS


@pytest.fixture
def make_folder(tmp_path):
    """Writes a folder of a family with random tensors; `edit` changes only its config.json."""
    safetensors = pytest.importorskip("safetensors.numpy")

    def make(family, *, dtype=np.float32, change=None, edit=None, **keys):
        content = {**CONFIGS[family], **keys, "torch_dtype": np.dtype(dtype).name}
        rows = family_of(family).rows
        pieces = pieces_of(dissect(build(family_of(family).read_config(content)), rows), rows)
        state = {piece.name for piece in pieces if piece.path[-1] == "score_bias"}
        draw = np.random.default_rng(0)
        tensors = {
            name: draw.normal(size=shape).astype(np.float32 if name in state else dtype)
            for name, shape in their_shapes(pieces).items()
        }
        names = {piece.path: piece.name for piece in pieces if not piece.is_copy}
        tensors |= {p.name: tensors[names[p.path]] for p in pieces if p.is_copy}
        if change is not None:
            change(tensors)
        folder = tmp_path / f"folder of {family}"
        folder.mkdir(exist_ok=True)
        safetensors.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps({**content, **(edit or {})}))
        return folder

    return make


@pytest.fixture
def read_tensors():
    """All tensors of a folder, whatever its files."""
    safetensors = pytest.importorskip("safetensors.numpy")

    def read(folder):
        files = sorted(folder.glob("*.safetensors"))
        return {k: v for file in files for k, v in safetensors.load_file(file).items()}

    return read


@pytest.fixture
def bfloat16():
    """The dtype, which NumPy does not have."""
    return ml_dtypes.bfloat16


_PARITY = pytest.StashKey[list[tuple[str, str, float]]]()


@pytest.fixture(scope="session")
def parity_table(request):
    """(`model_type`, what is special, relative error), to be printed at the end."""
    return request.config.stash.setdefault(_PARITY, [])


def pytest_terminal_summary(terminalreporter):
    table = terminalreporter.config.stash.get(_PARITY, [])
    if not table:
        return
    terminalreporter.section("logits against Transformers: max |difference| / max |logit|")
    for family, note, error in table:
        terminalreporter.write_line(f"{family:<12} {note:<40} {error:.1e}")
    # Set by the session `parity`. Errors of the same model vary between machines.
    if path := os.environ.get("PARITY_ERRORS"):
        errors = json.loads(Path(path).read_text())
        for family, _, error in table:
            errors[family] = max(errors.get(family, 0.0), float(f"{error:.1e}"))
        Path(path).write_text(json.dumps(errors, indent=2, sort_keys=True) + "\n")
