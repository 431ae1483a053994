"""Published config.json files of all families: what varies, and their numbers of parameters."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest

from layerkit.config import build
from layerkit.interop.hugging_face import UnsupportedModelError
from layerkit.interop.hugging_face.families import family_in, family_of
from layerkit.interop.hugging_face.tensors import dissect

os.environ.setdefault("HF_HUB_OFFLINE", "1")

SIZE_KEYS = {
    "gpt2": "n_embd n_layer n_head",
    "gptj": "n_embd n_layer n_head vocab_size",
    "gpt_neox": "hidden_size intermediate_size num_hidden_layers num_attention_heads vocab_size",
    "t5": "d_model d_kv d_ff num_layers num_heads",
    "bart": "d_model encoder_layers decoder_layers vocab_size",
    "whisper": "d_model encoder_layers decoder_layers encoder_ffn_dim decoder_ffn_dim"
    " encoder_attention_heads decoder_attention_heads num_mel_bins vocab_size",
}
ENCODER_SIZES = "hidden_size intermediate_size num_hidden_layers num_attention_heads vocab_size"
SIZE_KEYS |= dict.fromkeys(["bert", "roberta", "xlm-roberta", "modernbert"], ENCODER_SIZES)
LLAMA_SIZES = "hidden_size intermediate_size num_hidden_layers num_attention_heads"
LLAMA_SIZES += " num_key_value_heads vocab_size"
SIZE_KEYS["qwen3_5_moe_text"] = LLAMA_SIZES.replace("intermediate", "moe_intermediate")

# Options of the files of a family, without sizes. Those without effect on the model, such as
# `max_window_layers` without a window, may differ from those of a single file.
ANY = {"torch_dtype": "bfloat16", "use_cache": True, "initializer_range": 0.02}
LLAMA = {**ANY, "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5}
LLAMA3 = {**LLAMA, "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False}
LLAMA3 |= {"pretraining_tp": 1, "rope_theta": 500000.0, "max_position_embeddings": 131072}
SCALED = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED |= {"original_max_position_embeddings": 8192}
SMOL = {**LLAMA3, "is_llama_config": True, "rope_interleaved": False, "rope_scaling": None}
SMOL |= {"rope_theta": 100000, "tie_word_embeddings": True, "transformers.js_config": {"a": 1}}
NEOX = {**ANY, "model_type": "gpt_neox", "hidden_act": "gelu", "layer_norm_eps": 1e-5}
NEOX |= {"rotary_emb_base": 10000, "rotary_pct": 0.25, "max_position_embeddings": 2048}
NEOX |= {"tie_word_embeddings": False, "use_parallel_residual": True}
NEOX20 = {**NEOX, "attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0}
STABLELM = {**ANY, "model_type": "stablelm", "hidden_act": "silu", "layer_norm_eps": 1e-5}
STABLELM |= {"partial_rotary_factor": 0.25, "rope_theta": 10000, "tie_word_embeddings": False}
GRANITE = {**LLAMA, "model_type": "granite", "attention_bias": False, "attention_dropout": 0.1}
GRANITE |= {"mlp_bias": False, "embedding_multiplier": 12.0, "residual_multiplier": 0.22}
GRANITE |= {"rope_scaling": None, "rope_theta": 5000000.0, "tie_word_embeddings": True}
SMOL3 = {**LLAMA3, "model_type": "smollm3", "rms_norm_eps": 1e-6, "rope_theta": 5000000.0}
SMOL3 |= {"layer_types": ["full_attention"] * 36, "max_window_layers": 28, "pretraining_tp": 2}
SMOL3 |= {"no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "rope_scaling": None}
SMOL3 |= {"sliding_window": None, "use_sliding_window": False, "max_position_embeddings": 65536}
GPT2 = {**ANY, "model_type": "gpt2", "activation_function": "gelu_new", "attn_pdrop": 0.1}
GPT2 |= {"n_ctx": 1024, "n_positions": 1024, "summary_type": "cls_index", "vocab_size": 50257}
GPT2 |= {"summary_activation": None, "summary_first_dropout": 0.1, "summary_use_proj": True}
SPECIAL = {"n_special": 0, "predict_special_tokens": True}
MISTRAL = {**LLAMA, "model_type": "mistral", "max_position_embeddings": 32768}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_experts_per_tok": 2, "num_local_experts": 8}
MIXTRAL |= {"output_router_logits": False, "rope_theta": 1e6, "router_aux_loss_coef": 0.02}
MIXTRAL |= {"sliding_window": None, "attention_dropout": 0.0}
PHI3 = {**LLAMA, "model_type": "phi3", "attention_bias": False, "embd_pdrop": 0.0}
PHI3 |= {"auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "resid_pdrop": 0.0}
PHI3 |= {"original_max_position_embeddings": 4096, "max_position_embeddings": 4096}
LONG = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
LONG_PHI3 = {**PHI3, "max_position_embeddings": 131072, "sliding_window": 262144}
MINI4 = {**LONG_PHI3, "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False}
MINI4 |= {"mlp_bias": False, "partial_rotary_factor": 0.75, "tie_word_embeddings": True}
QWEN2 = {**LLAMA, "model_type": "qwen2", "rms_norm_eps": 1e-6, "rope_theta": 1e6}
QWEN2 |= {"sliding_window": 32768, "use_sliding_window": False, "attention_dropout": 0.0}
QWEN2 |= {"max_window_layers": 28}
QWEN3 = {**QWEN2, "model_type": "qwen3", "attention_bias": False, "head_dim": 128}
QWEN3 |= {"sliding_window": None, "rope_scaling": None, "max_position_embeddings": 40960}
EXPERTS = {"decoder_sparse_step": 1, "output_router_logits": False, "router_aux_loss_coef": 0.001}
QWEN2_MOE = {**QWEN2, **EXPERTS, "model_type": "qwen2_moe", "norm_topk_prob": False}
QWEN2_MOE |= {"tie_word_embeddings": False}
QWEN3_MOE = {**QWEN3, **EXPERTS, "model_type": "qwen3_moe", "norm_topk_prob": True}
QWEN3_MOE |= {"num_experts": 128, "num_experts_per_tok": 8, "mlp_only_layers": []}
CODER = {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True}
QWEN3_NEXT = {**ANY, "model_type": "qwen3_next", "full_attention_interval": 4, "head_dim": 256}
QWEN3_NEXT |= {"attention_bias": False, "hidden_act": "silu", "rms_norm_eps": 1e-6}
QWEN3_NEXT |= {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "rope_theta": 10000000}
QWEN3_NEXT |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "rope_scaling": None}
QWEN3_NEXT |= {"linear_value_head_dim": 128, "partial_rotary_factor": 0.25}
QWEN3_NEXT |= {"use_sliding_window": False, "moe_intermediate_size": 512, "mlp_only_layers": []}
QWEN3_NEXT |= {"num_experts_per_tok": 10, "shared_expert_intermediate_size": 512}
QWEN3_5_ROPE = {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default"}
QWEN3_5_ROPE |= {"partial_rotary_factor": 0.25, "rope_theta": 10000000}
DELTA_KEYS = ("hidden_act", "rms_norm_eps", "head_dim", "full_attention_interval")
DELTA_KEYS += tuple(key for key in QWEN3_NEXT if key.startswith("linear_"))
QWEN3_5 = {**ANY, **{key: QWEN3_NEXT[key] for key in DELTA_KEYS}, "attn_output_gate": True}
QWEN3_5 |= {"model_type": "qwen3_5_text", "attention_bias": False, "attention_dropout": 0.0}
QWEN3_5 |= {"mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1}
QWEN3_5 |= {"mtp_use_dedicated_embeddings": False, "rope_parameters": QWEN3_5_ROPE}
QWEN_TOWER = {"depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420}
QWEN_TOWER |= {"num_heads": 16, "in_chans": 3, "patch_size": 14, "spatial_merge_size": 2}
QWEN_TOWER |= {"spatial_patch_size": 14, "temporal_patch_size": 2, "tokens_per_second": 2}
QWEN_TOWER |= {"window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]}
QWEN2_5_VL = {**LLAMA, "model_type": "qwen2_5_vl", "rms_norm_eps": 1e-6, "rope_theta": 1e6}
QWEN2_5_VL |= {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
QWEN2_5_VL |= {"image_token_id": 151655, "video_token_id": 151656, "vision_token_id": 151654}
QWEN2_5_VL |= {"vision_start_token_id": 151652, "vision_end_token_id": 151653}
QWEN2_5_VL |= {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 28}
QWEN2_5_VL |= {"attention_dropout": 0.0, "vision_config": {**QWEN_TOWER, "out_hidden_size": 3584}}
SMALL_QWEN_TOWER = {**QWEN_TOWER, "out_hidden_size": 2048}
QWEN3_5_MOE = {**QWEN3_5, "model_type": "qwen3_5_moe_text", "num_experts": 256}
QWEN3_5_MOE |= {"num_experts_per_tok": 8, "shared_expert_intermediate_size": 512}
QWEN3_5_MOE |= {"router_aux_loss_coef": 0.001, "output_router_logits": False}
OLMOE = {**LLAMA, "model_type": "olmoe", "attention_bias": False, "clip_qkv": None}
OLMOE |= {"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False}
OLMOE |= {"output_router_logits": False, "router_aux_loss_coef": 0.01, "rope_theta": 10000.0}
LATENT = {**ANY, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000, "ep_size": 1}
LATENT |= {"attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": False}
LATENT |= {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "v_head_dim": 128}
LATENT |= {"qk_rope_head_dim": 64, "moe_layer_freq": 1, "max_position_embeddings": 163840}
LATENT_YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
LATENT_YARN |= {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
LATENT["rope_scaling"] = LATENT_YARN
DEEPSEEK2 = {**LATENT, "model_type": "deepseek_v2", "first_k_dense_replace": 1, "seq_aux": True}
DEEPSEEK2 |= {"aux_loss_alpha": 0.001, "n_shared_experts": 2, "num_experts_per_tok": 6}
DEEPSEEK2 |= {"norm_topk_prob": False, "scoring_func": "softmax"}
IN_GROUPS = {"n_routed_experts": 160, "topk_method": "group_limited_greedy", "n_group": 8}
IN_GROUPS |= {"routed_scaling_factor": 16.0}
DEEPSEEK2_LITE = {**DEEPSEEK2, "n_routed_experts": 64, "q_lora_rank": None, "topk_method": "greedy"}
DEEPSEEK2_LITE |= {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
DEEPSEEK2_LITE |= {"moe_intermediate_size": 1408}
DEEPSEEK2_LITE |= {"rope_scaling": {**LATENT_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}}
DEEPSEEK3 = {**LATENT, "model_type": "deepseek_v3", "moe_intermediate_size": 2048}
DEEPSEEK3 |= {"n_shared_experts": 1, "num_experts_per_tok": 8, "norm_topk_prob": True}
DEEPSEEK3 |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 1}
DEEPSEEK3 |= {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}
KIMI2 = {**DEEPSEEK3, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "seq_aux": True}
KIMI2 |= {"num_nextn_predict_layers": 0, "aux_loss_alpha": 0.001, "rope_theta": 50000.0}
KIMI2 |= {"pretraining_tp": 1, "max_position_embeddings": 131072, "routed_scaling_factor": 2.827}
KIMI2 |= {"rope_scaling": {**LATENT_YARN, "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0}}
MOONLIGHT = {**KIMI2, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "q_lora_rank": None}
MOONLIGHT |= {"rope_scaling": None, "moe_intermediate_size": 1408, "n_routed_experts": 64}
MOONLIGHT |= {"n_shared_experts": 2, "num_experts_per_tok": 6, "routed_scaling_factor": 2.446}
ALTERNATING = ["sliding_attention", "full_attention"]
GLM = {**LLAMA, "model_type": "glm4_moe", "attention_bias": True, "attention_dropout": 0.0}
GLM |= {"head_dim": 128, "norm_topk_prob": True, "n_group": 1, "topk_group": 1}
GLM |= {"n_shared_experts": 1, "num_experts_per_tok": 8, "num_nextn_predict_layers": 1}
GLM |= {"partial_rotary_factor": 0.5, "rope_scaling": None, "rope_theta": 1000000}
BIG = {"moe_intermediate_size": 1536, "n_routed_experts": 160, "first_k_dense_replace": 3}
BIG |= {"routed_scaling_factor": 2.5, "use_qk_norm": True}
AIR = {"moe_intermediate_size": 1408, "n_routed_experts": 128, "first_k_dense_replace": 1}
AIR |= {"routed_scaling_factor": 1.0, "use_qk_norm": False}
LLAMA4 = {**LLAMA, "model_type": "llama4_text", "attention_bias": False, "head_dim": 128}
LLAMA4 |= {"attention_chunk_size": 8192, "attention_dropout": 0.0, "intermediate_size_mlp": 16384}
LLAMA4 |= {"attn_scale": 0.1, "attn_temperature_tuning": True, "floor_scale": 8192}
LLAMA4 |= {"for_llm_compressor": False, "no_rope_layers": [1, 1, 1, 0] * 12, "rope_theta": 5e5}
LLAMA4 |= {"num_experts_per_tok": 1, "output_router_logits": False, "router_jitter_noise": 0.0}
LLAMA4 |= {"router_aux_loss_coef": 0.001, "use_qk_norm": True, "pad_token_id": 200018}
STEP = {**SCALED, "factor": 16.0, "high_freq_factor": 1.0}
OSS = {**LLAMA, "model_type": "gpt_oss", "attention_bias": True, "attention_dropout": 0.0}
OSS |= {"head_dim": 64, "experts_per_token": 4, "num_experts_per_tok": 4, "swiglu_limit": 7.0}
OSS |= {"initial_context_length": 4096, "max_position_embeddings": 131072, "rope_theta": 150000}
OSS |= {"output_router_logits": False, "router_aux_loss_coef": 0.9, "sliding_window": 128}
OSS |= {"rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}}
OSS["rope_scaling"] |= {"original_max_position_embeddings": 4096, "truncate": False}
GEMMA = {**ANY, "model_type": "gemma", "attention_bias": False, "attention_dropout": 0.0}
GEMMA |= {"head_dim": 256, "hidden_act": "gelu", "hidden_activation": None, "rope_scaling": None}
GEMMA |= {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 8192}
GEMMA2 = {**ANY, "model_type": "gemma2", "attention_bias": False, "head_dim": 256}
GEMMA2 |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "vocab_size": 256000}
GEMMA2 |= {"cache_implementation": "hybrid", "hidden_act": "gelu_pytorch_tanh"}
GEMMA2 |= {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256}
GEMMA2 |= {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": 4096}
GEMMA3 = {**GEMMA2, "model_type": "gemma3_text", "attn_logit_softcapping": None}
GEMMA3 |= {"final_logit_softcapping": None, "rope_theta": 1000000, "rope_scaling": None}
GEMMA3 |= {"rope_local_base_freq": 10000, "sliding_window": 512}
GEMMA4 = {**ANY, "model_type": "gemma4_text", "attention_bias": False, "attention_dropout": 0.0}
GEMMA4 |= {"attention_k_eq_v": True, "enable_moe_block": False, "final_logit_softcapping": 30.0}
GEMMA4 |= {"global_head_dim": 512, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh"}
GEMMA4 |= {"hidden_size_per_layer_input": 0, "max_position_embeddings": 262144}
GEMMA4 |= {"moe_intermediate_size": None, "num_experts": None, "num_global_key_value_heads": 4}
GEMMA4 |= {"num_kv_shared_layers": 0, "rms_norm_eps": 1e-6, "sliding_window": 1024}
GEMMA4 |= {"tie_word_embeddings": True, "top_k_experts": None, "use_double_wide_mlp": False}
GEMMA4 |= {"use_bidirectional_attention": "vision", "vocab_size_per_layer_input": 262144}
GEMMA4_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0}
GEMMA4_ROPE = {"full_attention": GEMMA4_ROPE}
GEMMA4_ROPE |= {"sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}}
SMALL_GEMMA4 = {**GEMMA4, "attention_k_eq_v": False, "hidden_size_per_layer_input": 256}
SMALL_GEMMA4 |= {"num_global_key_value_heads": None, "rope_parameters": GEMMA4_ROPE}
SMALL_GEMMA4 |= {"max_position_embeddings": 131072, "sliding_window": 512}
SMALL_GEMMA4 |= {"use_bidirectional_attention": None}
OLMO2 = {**LLAMA, "model_type": "olmo2", "rms_norm_eps": 1e-6, "rope_theta": 500000.0}
OLMO3 = {**OLMO2, "model_type": "olmo3", "attention_bias": False, "sliding_window": 4096}
OLMO3 |= {"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8}
OLMO3_ROPE = {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.2079441541679836}
OLMO3_ROPE |= {"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 8192}
STAR2 = {**ANY, "model_type": "starcoder2", "attention_dropout": 0.1, "residual_dropout": 0.1}
STAR2 |= {"embedding_dropout": 0.1, "hidden_act": "gelu_pytorch_tanh", "mlp_type": "default"}
STAR2 |= {"norm_epsilon": 1e-5, "sliding_window": 4096, "use_bias": True, "norm_type": "layer_norm"}
SEED = {**LLAMA3, "model_type": "seed_oss", "attention_bias": True, "attention_out_bias": False}
SEED |= {"attention_dropout": 0.1, "residual_dropout": 0.1, "head_dim": 128, "rms_norm_eps": 1e-6}
T5 = {"model_type": "t5", "vocab_size": 32128, "is_encoder_decoder": True, "output_past": True}
T5 |= {"decoder_start_token_id": 0, "initializer_factor": 1.0, "dropout_rate": 0.1}
T5 |= {"relative_attention_num_buckets": 32, "layer_norm_epsilon": 1e-6}
FIRST_T5 = {**T5, "n_positions": 512, "task_specific_params": {"summarization": {}}}
T5_11 = {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
FLAN = {**T5_11, "n_positions": 512, "is_gated_act": True, "dense_act_fn": "gelu_new"}
BERT = {**ANY, "model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_act": "gelu"}
BERT |= {"attention_probs_dropout_prob": 0.1, "hidden_dropout_prob": 0.1, "pad_token_id": 0}
BERT |= {"layer_norm_eps": 1e-12, "max_position_embeddings": 512, "type_vocab_size": 2}
BERT |= {"position_embedding_type": "absolute", "gradient_checkpointing": False}
BERT_MODEL = {**BERT, "architectures": ["BertModel"], "classifier_dropout": None}
POOLER = {"directionality": "bidi", "pooler_fc_size": 768, "pooler_num_attention_heads": 12}
POOLER |= {"pooler_num_fc_layers": 3, "pooler_size_per_head": 128}
POOLER |= {"pooler_type": "first_token_transform"}
ROBERTA = {**BERT, "model_type": "roberta", "architectures": ["RobertaForMaskedLM"]}
ROBERTA |= {"bos_token_id": 0, "eos_token_id": 2, "layer_norm_eps": 1e-5, "pad_token_id": 1}
ROBERTA |= {"max_position_embeddings": 514, "type_vocab_size": 1}
XLM_ROBERTA = {**ROBERTA, "model_type": "xlm-roberta", "output_past": True}
MODERN = {**ANY, "model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"]}
MODERN |= {"attention_bias": False, "attention_dropout": 0.0, "classifier_activation": "gelu"}
MODERN |= {"classifier_bias": False, "classifier_dropout": 0.0, "classifier_pooling": "mean"}
MODERN |= {"cls_token_id": 50281, "decoder_bias": True, "deterministic_flash_attn": False}
MODERN |= {"embedding_dropout": 0.0, "global_attn_every_n_layers": 3, "local_attention": 128}
MODERN |= {"global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "pad_token_id": 50283}
MODERN |= {"hidden_activation": "gelu", "initializer_cutoff_factor": 2.0, "layer_norm_eps": 1e-5}
MODERN |= {"max_position_embeddings": 8192, "mlp_bias": False, "mlp_dropout": 0.0}
MODERN |= {"norm_bias": False, "norm_eps": 1e-5, "position_embedding_type": "absolute"}
MODERN |= {"reference_compile": True, "sparse_pred_ignore_index": -100, "sparse_prediction": False}
WHISPER = {"model_type": "whisper", "activation_function": "gelu", "is_encoder_decoder": True}
WHISPER |= {"apply_spec_augment": False, "scale_embedding": False, "use_weighted_layer_sum": False}
WHISPER |= {"max_source_positions": 1500, "max_target_positions": 448, "torch_dtype": "float16"}
WHISPER |= {"encoder_layerdrop": 0.0, "mask_time_prob": 0.05, "median_filter_width": 7}
WHISPER |= {"forced_decoder_ids": [[1, 50259]], "decoder_start_token_id": 50258}
BART = {"model_type": "bart", "activation_dropout": 0.1, "activation_function": "gelu"}
BART |= {"add_bias_logits": False, "add_final_layer_norm": False, "attention_dropout": 0.1}
BART |= {"bos_token_id": 0, "classif_dropout": 0.1, "decoder_layerdrop": 0.0, "dropout": 0.1}
BART |= {"classifier_dropout": 0.0, "decoder_start_token_id": 2, "early_stopping": True}
BART |= {"encoder_layerdrop": 0.0, "forced_bos_token_id": 0, "forced_eos_token_id": 2}
BART |= {"init_std": 0.02, "is_encoder_decoder": True, "max_position_embeddings": 1024}
BART |= {"no_repeat_ngram_size": 3, "normalize_before": False, "normalize_embedding": True}
BART |= {"num_beams": 4, "pad_token_id": 1, "scale_embedding": False, "use_cache": True}
BASE_BART = {"decoder_attention_heads": 12, "encoder_attention_heads": 12}
BASE_BART |= {"decoder_ffn_dim": 3072, "encoder_ffn_dim": 3072, "num_hidden_layers": 6}
LARGE_BART = {"decoder_attention_heads": 16, "encoder_attention_heads": 16}
LARGE_BART |= {"decoder_ffn_dim": 4096, "encoder_ffn_dim": 4096, "num_hidden_layers": 12}
CNN = {"extra_pos_embeddings": 2, "force_bos_token_to_be_generated": True, "output_past": True}
NEAR5 = (["sliding_attention"] * 5 + ["full_attention"]) * 3
LLAMA31 = {**LLAMA3, "rope_scaling": {**SCALED, "factor": 8.0}}
LLAMA32 = {**LLAMA3, "rope_scaling": {**SCALED, "factor": 32.0}, "tie_word_embeddings": True}
FALCON3 = {**LLAMA3, "rms_norm_eps": 1e-6, "rope_theta": 1000042, "head_dim": 256}
FALCON3 |= {"max_position_embeddings": 32768}
NEMO = {**MISTRAL, "attention_dropout": 0.0, "head_dim": 128, "sliding_window": None}
NEMO |= {"rope_theta": 1e6, "max_position_embeddings": 131072, "tie_word_embeddings": False}
TIED_QWEN2, TIED_QWEN3 = ({**QWEN, "tie_word_embeddings": True} for QWEN in (QWEN2, QWEN3))
COHERE = {**ANY, "model_type": "cohere", "attention_bias": False, "attention_dropout": 0.0}
COHERE |= {"hidden_act": "silu", "layer_norm_eps": 1e-5, "logit_scale": 0.0625}
COHERE |= {"max_position_embeddings": 8192, "rope_theta": 8000000.0, "use_qk_norm": False}
COHERE2 = {**COHERE, "model_type": "cohere2", "head_dim": 128, "logit_scale": 0.25}
COHERE2 |= {"order_of_interleaved_layers": "local_attn_first", "rope_theta": 50000.0}
COHERE2 |= {"position_embedding_type": "rope_gptj", "rotary_pct": 1.0, "sliding_window": 4096}
COHERE2 |= {"sliding_window_pattern": 4, "use_gated_activation": True, "use_parallel_block": True}
GRANITE4 = {**GRANITE, "model_type": "granitemoehybrid", "attention_dropout": 0.0}
GRANITE4 |= {"num_local_experts": 0, "num_experts_per_tok": 0, "output_router_logits": False}
GRANITE4 |= {"attention_multiplier": 0.015625, "normalization_function": "rmsnorm"}
GRANITE4 |= {"position_embedding_type": "rope", "rope_theta": 10000000}
FALCON_H1 = {**LLAMA3, "model_type": "falcon_h1", "attn_layer_indices": None, "rope_theta": 1e11}
FALCON_H1 |= {"mamba_chunk_size": 128, "mamba_conv_bias": True, "mamba_d_conv": 4}
FALCON_H1 |= {"mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1}
FALCON_H1 |= {"mamba_norm_before_gate": False, "mamba_proj_bias": False, "mamba_rms_norm": False}
FALCON_H1 |= {"mamba_use_mlp": True, "mlp_expansion_factor": 8, "num_logits_to_keep": 1}
FALCON_H1 |= {"projectors_bias": False, "key_multiplier": 0.39062499999999994}
FALCON_H1 |= {"mlp_multipliers": [0.8838834764831844, 0.5859375], "rope_scaling": None}
FALCON_H1 |= {"ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.35]}
OLMO_HYBRID = {**LLAMA3, "model_type": "olmo_hybrid", "rms_norm_eps": 1e-6, "rope_theta": None}
OLMO_HYBRID |= {"linear_allow_neg_eigval": True, "linear_conv_kernel_dim": 4}
OLMO_HYBRID |= {"linear_key_head_dim": 96, "linear_value_head_dim": 192}
LFM2 = {**ANY, "model_type": "lfm2", "block_auto_adjust_ff_dim": True, "block_dim": 2048}
LFM2 |= {"block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256}
LFM2 |= {"block_norm_eps": 1e-5, "block_out_init_scale": 1.0, "block_use_swiglu": True}
LFM2 |= {"block_use_xavier_init": True, "conv_L_cache": 3, "conv_bias": False, "conv_dim": 2048}
LFM2 |= {"conv_use_xavier_init": True, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "norm_eps": 1e-5}
LFM2 |= {"num_heads": 32, "rope_theta": 1e6, "tie_embedding": True, "use_pos_enc": True}
MINICPM = {"architectures": ["MiniCPMForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5}
MINICPM |= {"scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4}
MINICPM4_ROPE = {"rope_type": "longrope", "long_factor": [2.0] * 32, "short_factor": [1.0] * 32}
MINICPM4_ROPE |= {"original_max_position_embeddings": 32768}
GPTJ = {**GPT2, "model_type": "gptj", "n_positions": 2048, "rotary": True, "rotary_dim": 64}
GPTJ |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "n_inner": None, "resid_pdrop": 0.0}
GPTJ |= {"scale_attn_weights": True, "tie_word_embeddings": False}
del GPTJ["n_ctx"]


def granite4(layers: int, size: int, **options: Any) -> dict[str, Any]:
    types = {"layer_types": ["attention"] * layers, "shared_intermediate_size": size}
    return {**GRANITE4, **types, **options}


# Name: options, sizes in the order of the keys above, number of parameters.
PUBLISHED: dict[str, tuple[dict[str, Any], tuple[int, ...], int]] = {
    "distilgpt2": ({**GPT2, "_num_labels": 1, "id2label": {"0": "a"}}, (768, 6, 12), 81912576),
    "gpt2": (GPT2, (768, 12, 12), 124439808),
    "llama-7b": (
        {**LLAMA, "max_sequence_length": 2048},
        (4096, 11008, 32, 32, 32, 32000),
        6738415616,
    ),
    "Llama-3.1-8B": (
        {**LLAMA3, "rope_scaling": {**SCALED, "factor": 8.0}},
        (4096, 14336, 32, 32, 8, 128256),
        8030261248,
    ),
    "Llama-3.2-1B": (
        {**LLAMA3, "rope_scaling": {**SCALED, "factor": 32.0}, "tie_word_embeddings": True},
        (2048, 8192, 16, 32, 8, 128256),
        1235814400,
    ),
    "SmolLM2-135M": (SMOL, (576, 1536, 30, 9, 3, 49152), 134515008),
    "Mixtral-8x7B": (MIXTRAL, (4096, 14336, 32, 32, 8, 32000), 46702792704),
    "Qwen2.5-0.5B": (
        {**QWEN2, "tie_word_embeddings": True, "use_mrope": False},
        (896, 4864, 24, 14, 2, 151936),
        494032768,
    ),
    "Qwen2.5-7B-Instruct-1M": (
        {**QWEN2, "dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192}},
        (3584, 18944, 28, 28, 4, 152064),
        7615616512,
    ),
    "Qwen3-0.6B": (
        {**QWEN3, "tie_word_embeddings": True},
        (1024, 3072, 28, 16, 8, 151936),
        596049920,
    ),
    "Qwen1.5-MoE-A2.7B": (
        {
            **QWEN2_MOE,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "max_window_layers": 21,
        },
        (2048, 5632, 24, 16, 16, 151936),
        14315784192,
    ),
    "Qwen2-57B-A14B": (
        {
            **QWEN2_MOE,
            "moe_intermediate_size": 2560,
            "shared_expert_intermediate_size": 20480,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "sliding_window": 65536,
        },
        (3584, 18944, 28, 28, 4, 151936),
        57408658944,
    ),
    "Qwen3-30B-A3B": (
        {**QWEN3_MOE, "moe_intermediate_size": 768, "max_window_layers": 48},
        (2048, 6144, 48, 32, 4, 151936),
        30532122624,
    ),
    "Qwen3-235B-A22B": (
        {**QWEN3_MOE, "moe_intermediate_size": 1536, "max_window_layers": 94},
        (4096, 12288, 94, 64, 4, 151936),
        235093634560,
    ),
    # As Transformers counts, without the layer for multi-token prediction.
    "Qwen3-Next-80B-A3B": (
        {**QWEN3_NEXT, **EXPERTS, "num_experts": 512, "norm_topk_prob": True},
        (2048, 5120, 48, 16, 2, 151936),
        79674391296,
    ),
    "Qwen3.5-27B": (
        {**QWEN3_5, "linear_num_value_heads": 48},
        (5120, 17408, 64, 24, 4, 248320),
        26895998464,
    ),
    "Qwen2.5-VL-7B": (QWEN2_5_VL, (3584, 18944, 28, 28, 4, 152064), 8292166656),
    "Qwen2.5-VL-3B": (
        {**QWEN2_5_VL, "tie_word_embeddings": True, "vision_config": SMALL_QWEN_TOWER},
        (2048, 11008, 36, 16, 2, 151936),
        3754622976,
    ),
    "Qwen3.5-35B-A3B": (QWEN3_5_MOE, (2048, 512, 40, 16, 2, 248320), 34660610688),
    "Qwen3-Coder-480B-A35B": (
        {**QWEN3_MOE, **CODER, "moe_intermediate_size": 2560, "num_experts": 160},
        (6144, 8192, 62, 96, 8, 151936),
        480154875392,
    ),
    "OLMoE-1B-7B": (OLMOE, (2048, 1024, 16, 16, 16, 50304), 6919161856),
    "DeepSeek-V2": (
        {**DEEPSEEK2, **IN_GROUPS, "topk_group": 3, "moe_intermediate_size": 1536},
        (5120, 12288, 60, 128, 128, 102400),
        235741434880,
    ),
    "DeepSeek-V2-Lite": (DEEPSEEK2_LITE, (2048, 10944, 27, 16, 16, 102400), 15706484224),
    # Here without fp8 weights. Some count the 11.6 billion of multi-token prediction separately.
    "DeepSeek-V3": (
        {**DEEPSEEK3, "first_k_dense_replace": 3, "n_routed_experts": 256},
        (7168, 18432, 61, 128, 128, 129280),
        671026419200 + 11610068224,
    ),
    "Kimi-K2-Instruct": (
        {**KIMI2, "model_type": "kimi_k2", "n_routed_experts": 384},
        (7168, 18432, 61, 64, 64, 163840),
        1026408232448,
    ),
    "Moonlight-16B-A3B": (MOONLIGHT, (2048, 11264, 27, 16, 16, 163840), 15960110208),
    "GLM-4.5": (
        {**GLM, **BIG},
        (5120, 12288, 92, 96, 8, 151552),
        352797829024 + 3988069792,
    ),
    "GLM-4.5-Air": (
        {**GLM, **AIR},
        (4096, 10944, 46, 96, 8, 151552),
        106852251264 + 2375059584,
    ),
    "Llama-4-Scout-17B-16E": (
        {**LLAMA4, "rope_scaling": STEP, "num_local_experts": 16, "interleave_moe_layer_step": 1},
        (5120, 8192, 48, 40, 8, 202048),
        107769861120,
    ),
    "Llama-4-Maverick-17B-128E": (
        {**LLAMA4, "use_qk_norm": False, "num_local_experts": 128, "interleave_moe_layer_step": 2},
        (5120, 8192, 48, 40, 8, 202048),
        400711848960,
    ),
    "gpt-oss-20b": (
        {**OSS, "num_local_experts": 32, "layer_types": ALTERNATING * 12},
        (2880, 2880, 24, 64, 8, 201088),
        20914757184,
    ),
    "gpt-oss-120b": (
        {**OSS, "num_local_experts": 128, "layer_types": ALTERNATING * 18},
        (2880, 2880, 36, 64, 8, 201088),
        116829156672,
    ),
    "gemma-2b": (GEMMA, (2048, 16384, 18, 8, 1, 256000), 2506172416),
    "gemma-7b": (
        {**GEMMA, "hidden_activation": "gelu_pytorch_tanh"},
        (3072, 24576, 28, 16, 16, 256000),
        8537680896,
    ),
    "gemma-2-9b": (
        {**GEMMA2, "sliding_window_size": 4096},
        (3584, 14336, 42, 16, 8, 256000),
        9241705984,
    ),
    "gemma-2-27b": (
        {**GEMMA2, "head_dim": 128, "query_pre_attn_scalar": 144, "_attn_implementation": "eager"},
        (4608, 36864, 46, 32, 16, 256000),
        27227128320,
    ),
    "gemma-3-270m": (
        {
            **GEMMA3,
            "layer_types": NEAR5,
            "_sliding_window_pattern": 6,
            "use_bidirectional_attention": False,
        },
        (640, 2048, 18, 4, 1, 262144),
        268098176,
    ),
    "gemma-3-1b": (
        {**GEMMA3, "sliding_window_pattern": 6},
        (1152, 6912, 26, 4, 1, 262144),
        999885952,
    ),
    # With the factor of each layer. Its page states 30.7 billion.
    "gemma-4-31b": (
        {
            **GEMMA4,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
            "rope_parameters": GEMMA4_ROPE,
        },
        (5376, 21504, 60, 32, 16, 262144),
        30697345340,
    ),
    # Its page states 25.2 billion; the file of the whole model has 25805933872 weights.
    "gemma-4-26b-a4b": (
        {
            **GEMMA4,
            "enable_moe_block": True,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
            "moe_intermediate_size": 704,
            "num_experts": 128,
            "num_global_key_value_heads": 2,
            "rope_parameters": GEMMA4_ROPE,
            "top_k_experts": 8,
        },
        (2816, 2112, 30, 16, 8, 262144),
        25233141790,
    ),
    # Their pages state 5.1 and 8 billion, with the parts for images and sound.
    "gemma-4-e2b": (
        {
            **SMALL_GEMMA4,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
            "num_kv_shared_layers": 20,
            "use_double_wide_mlp": True,
        },
        (1536, 6144, 35, 8, 1, 262144),
        4628569379,
    ),
    "gemma-4-e4b": (
        {
            **SMALL_GEMMA4,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 7,
            "num_kv_shared_layers": 18,
        },
        (2560, 10240, 42, 8, 2, 262144),
        7463013418,
    ),
    "Phi-3-mini-4k": (
        {**PHI3, "rope_scaling": None, "sliding_window": 2047},
        (3072, 8192, 32, 32, 32, 32064),
        3821079552,
    ),
    "Phi-3-mini-128k": (
        {**LONG_PHI3, "rope_scaling": {**LONG, "type": "su"}},
        (3072, 8192, 32, 32, 32, 32064),
        3821079552,
    ),
    "phi-4": (
        {**PHI3, "rope_scaling": None, "sliding_window": None, "rope_theta": 250000},
        (5120, 17920, 40, 40, 10, 100352),
        14659507200,
    ),
    "Phi-4-mini": ({**MINI4, "rope_scaling": LONG}, (3072, 8192, 32, 24, 8, 200064), 3836021760),
    "OLMo-2-7B": (OLMO2, (4096, 11008, 32, 32, 32, 100352), 7298617344),
    "Olmo-3-7B": (
        {**OLMO3, "rope_scaling": OLMO3_ROPE},
        (4096, 11008, 32, 32, 32, 100278),
        7298011136,
    ),
    "Olmo-Hybrid-7B": (OLMO_HYBRID, (3840, 11008, 32, 30, 30, 100352), 7430870688),
    "SmolLM3-3B": (SMOL3, (2048, 11008, 36, 16, 4, 128256), 3075098624),
    "granite-3.1-2b": (
        {**GRANITE, "attention_multiplier": 0.015625, "logits_scaling": 8.0},
        (2048, 8192, 40, 32, 8, 49155),
        2533531648,
    ),
    "granite-3.1-8b": (
        {**GRANITE, "attention_multiplier": 0.0078125, "logits_scaling": 16.0},
        (4096, 12800, 40, 32, 8, 49155),
        8170848256,
    ),
    "pythia-70m": (NEOX, (512, 2048, 6, 8, 50304), 70426624),
    "gpt-neox-20b": (
        {**NEOX20, "hidden_act": "gelu_fast"},
        (6144, 24576, 44, 64, 50432),
        20554567680,
    ),
    "stablelm-2-1_6b": (
        {**STABLELM, "use_qkv_bias": True, "qk_layernorm": False, "use_parallel_residual": False},
        (2048, 5632, 24, 32, 32, 100352),
        1644515328,
    ),
    # Its page states 12143605760, which is this number if LayerNorms counted twice.
    "stablelm-2-12b": (
        {**STABLELM, "qk_layernorm": True, "use_parallel_residual": True},
        (5120, 13824, 40, 32, 8, 100352),
        12143185920,
    ),
    "stablelm-3b": (STABLELM, (2560, 6912, 32, 32, 32, 50304), 2795443200),
    "starcoder2-3b": (
        {**STAR2, "rope_theta": 999999.4420358813},
        (3072, 12288, 30, 24, 2, 49152),
        3030371328,
    ),
    "starcoder2-7b": ({**STAR2, "rope_theta": 1e6}, (4608, 18432, 32, 36, 4, 49152), 7173923840),
    "starcoder2-15b": (
        {**STAR2, "rope_theta": 100000, "tie_word_embeddings": False},
        (6144, 24576, 40, 48, 4, 49152),
        15957889024,
    ),
    "Seed-OSS-36B": (
        {**SEED, "rope_theta": 10000000.0, "rope_scaling": {"rope_type": "default"}},
        (5120, 27648, 64, 80, 8, 155136),
        36151104512,
    ),
    "ERNIE-4.5-0.3B": (
        {**ANY, "model_type": "ernie4_5", "head_dim": 128, "rope_theta": 500000, "use_bias": False},
        (1024, 3072, 18, 16, 2, 103424),
        360748032,
    ),
    "t5-small": (FIRST_T5, (512, 64, 2048, 6, 8), 60506624),
    "whisper-tiny": (WHISPER, (384, 4, 4, 1536, 1536, 6, 6, 80, 51865), 37760640),
    "t5-v1_1-base": (T5_11, (768, 64, 2048, 12, 12), 247577856),
    "flan-t5-small": (
        {**T5_11, "n_positions": 512, "num_decoder_layers": 8},
        (512, 64, 1024, 8, 6),
        76961152,
    ),
    "Llama-2-13b": (LLAMA, (5120, 13824, 40, 40, 40, 32000), 13015864320),
    "Llama-2-70b": (LLAMA, (8192, 28672, 80, 64, 8, 32000), 68976648192),
    "CodeLlama-34b": ({**LLAMA, "rope_theta": 1e6}, (8192, 22016, 48, 64, 8, 32000), 33743970304),
    "TinyLlama-1.1B": (LLAMA, (2048, 5632, 22, 32, 4, 32000), 1100048384),
    "Llama-3-8B": (
        {**LLAMA3, "max_position_embeddings": 8192},
        (4096, 14336, 32, 32, 8, 128256),
        8030261248,
    ),
    "Llama-3.3-70B": (LLAMA31, (8192, 28672, 80, 64, 8, 128256), 70553706496),
    "Llama-3.1-405B": (LLAMA31, (16384, 53248, 126, 128, 8, 128256), 405853388800),
    "Llama-3.2-3B": (LLAMA32, (3072, 8192, 28, 24, 8, 128256), 3212749824),
    "Falcon3-1B": (
        {**FALCON3, "max_position_embeddings": 4096},
        (2048, 8192, 18, 8, 4, 131072),
        1669408768,
    ),
    "Falcon3-3B": (FALCON3, (3072, 9216, 22, 12, 4, 131072), 3227655168),
    "Falcon3-7B": (FALCON3, (3072, 23040, 28, 12, 4, 131072), 7455550464),
    "Falcon3-10B": (FALCON3, (3072, 23040, 40, 12, 4, 131072), 10305653760),
    "SmolLM2-360M": (SMOL, (960, 2560, 32, 15, 5, 49152), 361821120),
    "SmolLM2-1.7B": ({**SMOL, "rope_theta": 130000}, (2048, 8192, 24, 32, 32, 49152), 1711376384),
    "Mistral-7B-v0.1": (
        {**MISTRAL, "sliding_window": 4096},
        (4096, 14336, 32, 32, 8, 32000),
        7241732096,
    ),
    "Mistral-7B-v0.3": (
        {**MISTRAL, "sliding_window": None, "rope_theta": 1e6},
        (4096, 14336, 32, 32, 8, 32768),
        7248023552,
    ),
    "Mistral-Nemo": (NEMO, (5120, 14336, 40, 32, 8, 131072), 12247782400),
    "Mistral-Small-24B": (
        {**NEMO, "rope_theta": 1e8, "max_position_embeddings": 32768},
        (5120, 32768, 40, 32, 8, 131072),
        23572403200,
    ),
    "Mistral-Large-2407": (NEMO, (12288, 28672, 88, 96, 8, 32768), 122610069504),
    "Mixtral-8x22B": (MIXTRAL, (6144, 16384, 56, 48, 8, 32000), 140620634112),
    "Qwen2.5-1.5B": (TIED_QWEN2, (1536, 8960, 28, 12, 2, 151936), 1543714304),
    "Qwen2.5-3B": (TIED_QWEN2, (2048, 11008, 36, 16, 2, 151936), 3085938688),
    "Qwen2.5-7B": (QWEN2, (3584, 18944, 28, 28, 4, 152064), 7615616512),
    "Qwen2.5-14B": ({**QWEN2, "rms_norm_eps": 1e-5}, (5120, 13824, 48, 40, 8, 152064), 14770033664),
    "Qwen2.5-32B": ({**QWEN2, "rms_norm_eps": 1e-5}, (5120, 27648, 64, 40, 8, 152064), 32763876352),
    "Qwen2.5-72B": ({**QWEN2, "rms_norm_eps": 1e-5}, (8192, 29568, 80, 64, 8, 152064), 72706203648),
    "Qwen3-4B": (TIED_QWEN3, (2560, 9728, 36, 32, 8, 151936), 4022468096),
    "Qwen3-8B": (QWEN3, (4096, 12288, 36, 32, 8, 151936), 8190735360),
    "Qwen3-14B": (QWEN3, (5120, 17408, 40, 40, 8, 151936), 14768307200),
    "Qwen3-32B": (QWEN3, (5120, 25600, 64, 64, 8, 151936), 32762123264),
    "gemma-2-2b": (GEMMA2, (2304, 9216, 26, 8, 4, 256000), 2614341888),
    "OLMo-2-13B": (OLMO2, (5120, 13824, 40, 40, 40, 100352), 13716198400),
    "Phi-3-medium-4k": (
        {**PHI3, "rope_scaling": None, "sliding_window": 2047},
        (5120, 17920, 40, 40, 10, 32064),
        13960238080,
    ),
    "pythia-410m": (NEOX, (1024, 4096, 24, 16, 50304), 405334016),
    "pythia-1.4b": (NEOX, (2048, 8192, 24, 16, 50304), 1414647808),
    "pythia-6.9b": (NEOX, (4096, 16384, 32, 32, 50432), 6857302016),
    "pythia-12b": (NEOX, (5120, 20480, 36, 40, 50688), 11846072320),
    "gpt2-xl": (GPT2, (1600, 48, 25), 1557611200),
    "gpt-j-6b": (GPTJ, (4096, 28, 16, 50400), 6050882784),
    "c4ai-command-r-v01": (COHERE, (8192, 22528, 40, 64, 64, 256000), 34980831232),
    "c4ai-command-r-plus": (
        {
            **COHERE,
            "use_qk_norm": True,
            "logit_scale": 0.8333333333333334,
            "rope_theta": 75000000.0,
        },
        (12288, 33792, 64, 96, 8, 256000),
        103810674688,
    ),
    "aya-23-8B": ({**COHERE, "rope_theta": 10000}, (4096, 14336, 32, 32, 8, 256000), 8028033024),
    "c4ai-command-r7b": (COHERE2, (4096, 14336, 32, 32, 8, 256000), 8028033024),
    "c4ai-command-a": (COHERE2, (12288, 36864, 64, 96, 8, 256000), 111057580032),
    "granite-4.0-350m": (
        granite4(28, 2048, residual_multiplier=0.263, logits_scaling=4.0),
        (1024, 2048, 28, 16, 4, 100352),
        352379904,
    ),
    "granite-4.0-1b": (
        granite4(40, 4096, attention_multiplier=0.0078125, logits_scaling=8.0),
        (2048, 4096, 40, 16, 4, 100352),
        1631750144,
    ),
    "granite-4.0-micro": (
        granite4(40, 8192, logits_scaling=10.0),
        (2560, 8192, 40, 40, 8, 100352),
        3402836480,
    ),
    "Falcon-H1-0.5B": (
        {**FALCON_H1, "head_dim": 64, "mamba_d_ssm": 1536, "mamba_n_heads": 24},
        (1024, 2048, 36, 8, 2, 32784),
        521411104,
    ),
    "LFM2-1.2B": (LFM2, (2048, 12288, 16, 32, 8, 65536), 1170340608),
    "MiniCPM-2B": (MINICPM, (2304, 5760, 40, 36, 36, 122753), 2724880896),
    "MiniCPM4-0.5B": (
        {**MINICPM, "rope_scaling": MINICPM4_ROPE, "max_position_embeddings": 32768},
        (1024, 4096, 24, 16, 2, 73448),
        433873920,
    ),
    "t5-base": (FIRST_T5, (768, 64, 3072, 12, 12), 222903552),
    "flan-t5-xxl": (FLAN, (4096, 64, 10240, 24, 64), 11135332352),
    "t5-v1_1-large": (T5_11, (1024, 64, 2816, 24, 16), 783150080),
    "flan-t5-xl": (FLAN, (2048, 64, 5120, 24, 32), 2849757184),
    "bert-base-uncased": (BERT, (768, 3072, 12, 12, 30522), 109514298),
    "bert-base-multilingual-cased": ({**BERT, **POOLER}, (768, 3072, 12, 12, 119547), 177974523),
    "bert-large-uncased": (BERT, (1024, 4096, 24, 16, 30522), 335174458),
    "all-MiniLM-L6-v2": (BERT_MODEL, (384, 1536, 6, 12, 30522), 22565376),
    "bge-small-en-v1.5": (BERT_MODEL, (384, 1536, 12, 12, 30522), 33212160),
    "roberta-base": (ROBERTA, (768, 3072, 12, 12, 50265), 124697433),
    "roberta-large": (ROBERTA, (1024, 4096, 24, 16, 50265), 355412057),
    "xlm-roberta-base": (XLM_ROBERTA, (768, 3072, 12, 12, 250002), 278295186),
    "ModernBERT-base": (MODERN, (768, 1152, 22, 12, 50368), 149655232),
    "ModernBERT-large": (MODERN, (1024, 2624, 28, 16, 50368), 395881664),
    "whisper-large-v3": (
        WHISPER,
        (1280, 32, 32, 5120, 5120, 20, 20, 128, 51866),
        1543490560,
    ),
    "bart-base": ({**BART, **BASE_BART}, (768, 6, 6, 50265), 139420416),
    "bart-large": ({**BART, **LARGE_BART}, (1024, 12, 12, 50265), 406291456),
    "bart-large-cnn": ({**BART, **LARGE_BART, **CNN}, (1024, 12, 12, 50264), 406290432),
    "distilbart-cnn-12-6": ({**BART, **LARGE_BART, **CNN}, (1024, 12, 6, 50264), 305510400),
}


def config_of(name):
    options, sizes, _ = PUBLISHED[name]
    keys = SIZE_KEYS.get(options.get("model_type"), LLAMA_SIZES).split()
    return {**options, **dict(zip(keys, sizes, strict=True))}


def parameters_of(content):
    family = family_in(content)
    anatomy = dissect(build(family.read_config(content)), family.rows)
    return sum(math.prod(weight.shape) for weight in anatomy.weights.values())


# Models of many layers, whose families have smaller models in the ordinary tests.
LARGER = ("gemma-4-e4b", "gemma-4-26b-a4b", "gemma-4-31b", "Qwen2.5-VL-7B")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LARGER)) for n in PUBLISHED]
)
def test_published_config_has_the_published_number_of_parameters(name):
    assert parameters_of(config_of(name)) == PUBLISHED[name][2]


def test_published_configs_are_read_as_transformers_reads_them():
    transformers = pytest.importorskip("transformers")
    # Transformers 5 rejects the older form of their rope_scaling, and has no class of the others.
    rejected = {"Phi-3-mini-128k", "Phi-4-mini", "Kimi-K2-Instruct", "MiniCPM-2B", "MiniCPM4-0.5B"}
    for name in set(PUBLISHED) - rejected:
        content = config_of(name)
        family = family_of(content["model_type"])
        theirs = transformers.AutoConfig.for_model(**content).to_dict()
        assert family.read_config(content) == family.read_config(theirs), name


def test_config_of_a_gguf_file_is_read():
    transformers = pytest.importorskip("transformers")
    content = {**config_of("SmolLM2-135M"), "head_dim": 64, "_model_name_or_path": "SmolLM2 135M"}
    theirs = transformers.LlamaConfig(**content).to_dict()
    assert "_model_name_or_path" in theirs
    family = family_of("llama")
    assert family.read_config(theirs) == family.read_config(config_of("SmolLM2-135M"))


def test_keys_that_transformers_reads_from_gguf_files_are_known(configs):
    pytest.importorskip("transformers")
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    for model_type, content in configs.items():
        known = GGUF_CONFIG_MAPPING.get(model_type.removesuffix("_text"), {}).values()
        more = {key: 4 for key in known if key is not None and key not in content}
        family_of(model_type).read_config({**content, **more})


FAR4 = {key: {"head_dim": 8, "num_key_value_heads": 1} for key in ("1", "03", "4")}
NEAR4 = ["sliding_attention", "full_attention"] * 2 + ["full_attention"]
HALF4 = {"partial_rotary_factor": 0.5, "rope_theta": 1e5}
ROPE4 = {"sliding_attention": {"rope_theta": 1e3}}
ROPE4 |= {"full_attention": {"rope_type": "proportional", **HALF4}}
# The values of options without effect, and one that changes the model.
OPTIONS = [
    ("llama", "hidden_dropout", 0.0, 0.1),
    ("mistral", "attention_bias", False, True),
    ("qwen2", "mlp_bias", False, True),
    ("olmo2", "clip_qkv", None, 8.0),
    ("olmoe", "clip_qkv", None, 8.0),
    ("olmoe", "head_dim", 2, 4),
    ("olmoe", "sliding_window", None, 4),
    ("qwen2_moe", "attention_bias", False, True),
    ("qwen2_moe", "num_local_experts", 3, 4),
    ("qwen2_moe", "shared_expert_intermediate_size", 7, 0),
    ("qwen3_moe", "layer_types", None, ["full_attention"] * 3),
    ("qwen3_moe", "shared_expert_intermediate_size", 0, 6),
    ("qwen3_moe", "use_qk_norm", True, False),
    (
        "qwen3_next",
        "layer_types",
        ["linear_attention", "full_attention"],
        ["sliding_attention"] * 2,
    ),
    ("qwen3_next", "rope_scaling", {"mrope_section": [1]}, {"type": "dynamic"}),
    ("qwen3_5_text", "attn_output_gate", True, False),
    ("qwen3_5_moe_text", "norm_topk_prob", True, False),
    ("deepseek_v2", "norm_topk_prob", False, True),
    ("deepseek_v2", "topk_method", "group_limited_greedy", "noaux_tc"),
    ("deepseek_v2", "mlp_bias", False, True),
    ("deepseek_v2", "rope_interleave", True, False),
    ("deepseek_v3", "num_key_value_heads", None, 2),
    ("deepseek_v3", "scoring_func", "sigmoid", "softmax"),
    ("deepseek_v3", "moe_layer_freq", 1, 2),
    ("kimi_k2", "topk_method", "noaux_tc", "greedy"),
    ("glm4_moe", "num_nextn_predict_layers", 1, -1),
    ("llama4_text", "attention_chunk_size", 4, None),
    ("llama4_text", "layer_types", None, ["sliding_attention"] * 3),
    ("llama4_text", "no_rope_layers", [1, 0, 1, 1], [1, 0]),
    ("llama4_text", "attn_temperature_tuning", 4, -1),
    ("gpt_oss", "hidden_act", "silu", "gelu"),
    ("gpt_oss", "mlp_bias", False, True),
    ("gemma", "hidden_activation", "gelu_pytorch_tanh", "relu"),
    ("gemma2", "use_bidirectional_attention", False, True),
    ("olmo3", "rope_parameters", {}, {"rope_type": "default", "rope_theta": 1e4}),
    ("gemma3_text", "rope_parameters", {}, {"rope_type": "default", "rope_theta": 1e4}),
    ("gemma3_text", "rope_parameters", {}, {"full_attention": HALF4}),
    ("gemma4_text", "enable_moe_block", False, True),  # without sizes of experts
    ("gemma4_text", "hidden_size_per_layer_input", None, 256),  # with another vocabulary
    ("gemma4_text", "num_kv_shared_layers", 0, 4),
    ("gemma4_text", "use_bidirectional_attention", "vision", "all"),
    ("gemma4_text", "per_layer_config", FAR4, {"1": {"intermediate_size": 12}}),
    ("gemma4_text", "per_layer_config", None, {"one": {"head_dim": 8}}),
    ("gemma4_text", "layer_types", NEAR4, ["full_attention"] * 4 + ["sliding_attention"]),
    ("gemma4_text", "rope_parameters", ROPE4, {**ROPE4, "sliding_attention": HALF4}),
    ("gemma4_text", "rope_parameters", ROPE4, {"full_attention": HALF4}),
    ("modernbert", "rope_parameters", {}, {"rope_type": "default", "rope_theta": 1e4}),
    ("gpt_oss", "rope_parameters", {"factor": 4.0}, {"rope_type": "yarn", "factor": 2.0}),
    ("gpt_neox", "attention_probs_dropout_prob", 0, 0.1),
    ("gpt_neox", "rotary_pct", 1.0, 0.3),
    ("stablelm", "hidden_dropout", 0.0, 0.1),
    ("smollm3", "no_rope_layers", [1, 0, 1, 0], [1, 0]),
    ("gptj", "rotary", True, False),
    ("gptj", "rotary_dim", 2, 3),
    ("cohere2", "sliding_window", 4, None),
    ("cohere2", "layer_types", None, ["mamba"] * 5),
    ("granitemoehybrid", "mamba_d_head", 4, 3),
    ("granitemoehybrid", "layer_types", ["linear_attention", "full_attention", "mamba"], ["moe"]),
    ("granitemoehybrid", "position_embedding_type", "rope", "alibi"),
    ("falcon_h1", "hidden_act", "silu", "gelu"),
    ("falcon_h1", "mamba_d_head", 3, 4),
    ("falcon_h1", "projectors_bias", True, False),
    ("lfm2", "hidden_act", "silu", "gelu"),
    ("olmo_hybrid", "layer_types", ["full_attention", "linear_attention"], ["conv"] * 2),
    ("mamba2", "expand", 1, 2),
    ("nemotron_h", "hybrid_override_pattern", "ME*-M", "MEX"),
    (
        "nemotron_h",
        "layers_block_type",
        ["mamba", "moe", "attention", "mlp", "mamba"],
        ["moe", "x"],
    ),
    ("nemotron_h", "moe_latent_size", None, 4),
    ("nemotron_h", "num_nextn_predict_layers", 0, 1),
    ("nemotron_h", "tie_word_embeddings", False, True),
    ("minicpm", "head_dim", 2, 4),
    ("minicpm", "sparse_config", None, {"kernel_size": 32}),
    ("phi3", "lm_head_bias", False, True),
    ("phi3", "full_attn_mod", 1, 2),
    ("bert", "tie_word_embeddings", True, False),
    ("bert", "position_embedding_type", "absolute", "relative_key"),
    ("bert", "is_decoder", False, True),
    ("roberta", "add_cross_attention", False, True),
    ("modernbert", "attention_dropout", 0.0, 0.1),
    ("bart", "normalize_embedding", True, False),
    ("whisper", "apply_spec_augment", False, True),
    ("whisper", "scale_embedding", False, True),
    ("bart", "decoder_layerdrop", 0.0, 0.1),
    ("bart", "tie_word_embeddings", True, False),
    ("llama", "residual_multiplier", 1.0, 0.22),
    ("llama", "residual_multiplier", None, 0),
    ("llama", "use_rope", True, False),
    ("llama", "partial_rotary_factor", 1.0, 0.5),
    ("gpt2", "quantization_config", {}, {"bits": 4}),
    ("llama", "rope_scaling", {"rope_type": "default", "mrope_section": []}, {"type": "dynamic"}),
]


@pytest.mark.parametrize(("family", "key", "usual", "other"), OPTIONS)
def test_option_is_neutral_until_it_changes_the_model(configs, family, key, usual, other):
    content = configs[family]
    read = family_of(family).read_config
    assert read({**content, key: usual}) == read(content)
    with pytest.raises(UnsupportedModelError, match=key if key != "rope_scaling" else "rope_type"):
        read({**content, key: other})


def test_older_keys_of_nemotron_h_are_read(configs):
    content, read = configs["nemotron_h"], family_of("nemotron_h").read_config
    # Those of Nemotron 3 Nano and of Nemotron-H 8B.
    assert read({**content, "norm_eps": 1e-5, "time_step_rank": 256}) == read(content)
    older = {key: value for key, value in content.items() if key != "head_dim"}
    assert read({**older, "attention_head_dim": content["head_dim"]}) == read(content)
