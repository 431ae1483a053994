"""What each key of MaxText means here.

A rule takes the value of a key and all values, and returns our fields; `NotTranslatedError` says
that this value has no counterpart. Sizes that MaxText scales, meshes, schedules and timescales
depend on several keys and stand in `maxtext`.

Source: MaxText's configs/base.yml, `get_individual_scales` and the remat policies of its decoder
(AI-Hypercomputer/maxtext).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from layerkit_runner.tools.translate.values import (
    NotTranslatedError,
    Reader,
    number,
    positive_or_none,
    text,
    whole_number,
    yes_or_no,
)

Rule = Callable[[Any, Mapping[str, Any]], dict[str, Any]]

# Keys that say where things go or how fast they run, and change no number of the run.
NEUTRAL = frozenset(
    """
    run_name base_output_directory base_config override_model_config hardware
    enable_checkpointing async_checkpointing save_checkpoint_on_completion force_unroll
    enable_single_replica_ckpt_restoring checkpoint_storage_target_data_file_size_bytes
    checkpoint_storage_use_ocdbt checkpoint_storage_use_zarr3 checkpoint_storage_concurrent_gb
    metrics_file gcs_metrics save_config_to_gcs log_config jax_cache_dir
    enable_profiler profiler profiler_steps skip_first_n_steps_for_profiler
    upload_all_profiler_results hide_profiler_step_metric profile_cleanly
    record_internal_nn_metrics enable_goodput_recording monitor_goodput
    goodput_upload_interval_seconds enable_tensorboard use_vertex_tensorboard
    vertex_tensorboard_project vertex_tensorboard_region collect_stack_trace stack_trace_to_cloud
    stack_trace_interval_seconds enable_checkpoint_cloud_logger enable_checkpoint_standard_logger
    param_scan_axis fused_qkv fused_mlp use_iota_embed
    grain_worker_count expansion_factor_real_data hf_access_token
    compiled_trainstep_file compile_topology compile_topology_num_slices num_slices
    quantization_local_shard_count max_corpus_chars enable_data_shuffling data_shuffle_seed
    max_prefill_predict_length prompt load_from_prefill_dir prefill_cache_dir
    autoregressive_decode_assert decode_sampling_strategy decode_sampling_nucleus_p
    decode_sampling_top_k decode_sampling_temperature enable_single_controller
    """.split()  # noqa: SIM905
)

# Made of several keys; see `maxtext`.
COMPOSED = frozenset(
    """
    scale global_parameter_scale base_num_decoder_layers base_emb_dim base_mlp_dim
    base_num_heads base_num_query_heads base_num_kv_heads
    steps learning_rate_schedule_steps warmup_steps_fraction
    rope_min_timescale rope_max_timescale
    """.split()  # noqa: SIM905
)

_DTYPES = ("float32", "bfloat16", "float16")

# By MaxText's names of what it keeps: q, k, v and what attention and feed-forward gave is our
# `projections`, and all outputs of projections `dots_no_batch`.
_REMAT = {
    "none": "none",
    "full": "full",
    "minimal": "dots_no_batch",
    "save_dot_except_mlpwi": "projections",
    "save_out_proj": "attention_out",
}
_NEAREST_REMAT = {
    "save_dot_except_mlp": "projections, which also keeps what the feed-forward gave",
    "save_dot_with_context_except_mlp": "projections",
    "minimal_with_context": "dots_no_batch",
    "minimal_flash": "dots_no_batch",
    "save_qkv_proj": "projections, which also keeps what the branches gave",
    "minimal_offloaded": "offload_projections",
    "qkv_proj_offloaded": "offload_projections",
}

_ATTENTION = {
    "autoselected": "auto",
    "dot_product": "xla",
    "cudnn_flash_te": "cudnn",
    "cudnn_flash_jax": "cudnn",
    "flash": "pallas",
}

_ROTARY = {
    "NORM": "rms_norm",
    "POSITIONS": "rotary",
    "ATTENTION_BIAS": False,
    "FEED_FORWARD_BIAS": False,
}
_DECODERS: dict[str, dict[str, Any]] = {
    "default": _ROTARY,
    "llama2": _ROTARY,
    "mistral": _ROTARY,
    "gpt3": {"NORM": "layer_norm", "ATTENTION_BIAS": True, "FEED_FORWARD_BIAS": True},
}
_DATA = {"c4": "C4", "the_pile": "ThePile"}


def rename(name: str, read: Reader) -> Rule:
    """The same value under our name."""
    return lambda value, values: {name: read(value)}


def only(allowed: Collection[Any], *, because: str) -> Rule:
    """Values that change nothing here; any other has no counterpart."""

    def rule(value: Any, values: Mapping[str, Any]) -> dict[str, Any]:
        if value not in allowed:
            raise NotTranslatedError(because)
        return {}

    return rule


def _dtype(value: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    if value not in _DTYPES:
        raise NotTranslatedError(f"FPROP_DTYPE is one of {', '.join(_DTYPES)}")
    return {"FPROP_DTYPE": value}


def _remat(value: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    if text(value) in _REMAT:
        return {"CHECKPOINT_POLICY": _REMAT[value]}
    near = f"; the nearest is {_NEAREST_REMAT[value]}" if value in _NEAREST_REMAT else ""
    raise NotTranslatedError(f"CHECKPOINT_POLICY has none that keeps just that{near}")


def _attention(value: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    if text(value) not in _ATTENTION:
        raise NotTranslatedError("ATTENTION_BACKEND is one of auto, xla, cudnn and pallas")
    return {"ATTENTION_BACKEND": _ATTENTION[value]}


def _decoder_block(value: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    if text(value) not in _DECODERS:
        raise NotTranslatedError(
            f"recipes know {', '.join(_DECODERS)}; a model that is on Hugging Face can be imported"
            " from there (docs/hugging_face.md)"
        )
    return dict(_DECODERS[value])


def _activations(value: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    names = list(value) if isinstance(value, (list, tuple)) else [value]
    if names[:1] not in (["relu"], ["gelu"], ["silu"]) or names[1:] not in ([], ["linear"]):
        raise NotTranslatedError("ACTIVATION is relu, gelu or silu, with or without a linear gate")
    return {"ACTIVATION": names[0], "USE_GATED_ACTIVATION": len(names) == 2}


def _dropout(value: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    rate = number(value)
    return {"DROPOUT_RATE": rate if values.get("enable_dropout", True) else 0.0}


def _trainable_positions(value: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    length = whole_number(value)
    if length <= 0:
        return {}
    longest = values.get("max_target_length", length)
    if isinstance(longest, (int, float)) and length < longest:
        raise NotTranslatedError("there are as many learnt positions as MAX_SEQ_LEN")
    return {"POSITIONS": "trainable"}


def _tied(value: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    # A decoder with an embedding of its own is another recipe, which `maxtext` chooses.
    if yes_or_no(value) and values.get("normalize_embedding_logits", True):
        raise NotTranslatedError(
            "normalize_embedding_logits divides logits by √emb_dim, which ours does not"
        )
    return {}


def _read_with_others(value: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """For a switch of another key, with which it is told."""
    yes_or_no(value)
    return {}


def _fixed_positions(value: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    return {"POSITIONS": "sinusoidal"} if yes_or_no(value) else {}


def _optimizer(value: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    if value not in ("adamw", "adam_pax"):
        raise NotTranslatedError("recipes have Adam; any optimizer of Optax can be a recipe")
    return {"DECAYED_WEIGHTS": "all"}


def _steps_or_none(value: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    steps = whole_number(value)
    return {"EVAL_INTERVAL_STEPS": steps if steps > 0 else None}


def _data_set(value: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    if value == "synthetic" or data_recipe(values) is not None:
        return {}
    raise NotTranslatedError(
        "recipes have C4, The Pile and synthetic tokens; docs/inputs.md tells of others"
    )


def data_recipe(values: Mapping[str, Any]) -> str | None:
    """The recipe of the data set that is named; None for others."""
    if values.get("dataset_type") == "synthetic":
        return "SyntheticTokens"
    name = str(values.get("dataset_name", "c4")).partition("/")[0].partition(":")[0]
    return _DATA.get(name)


_NO_QUANTIZATION = "see docs/transformers.md for fp8 and int8: a field of layers, not of the recipe"
_NO_EXPERTS = "see lm.moe and docs/mixture_of_experts.md"

RULES: dict[str, Rule] = {
    "head_dim": rename("DIMS_PER_HEAD", whole_number),
    "vocab_size": rename("VOCAB_SIZE", whole_number),
    "max_target_length": rename("MAX_SEQ_LEN", whole_number),
    "per_device_batch_size": rename("PERCORE_BATCH_SIZE", number),
    "dtype": _dtype,
    "weight_dtype": only(["float32"], because="weights are kept in float32"),
    "remat_policy": _remat,
    "scan_layers": rename("USE_REPEATED_LAYER", yes_or_no),
    "attention": _attention,
    "attention_type": only(["global"], because="windows are a field of the attention layer"),
    "sliding_window_size": only([0], because="windows are a field of the attention layer"),
    "decoder_block": _decoder_block,
    "mlp_activations": _activations,
    "dropout_rate": _dropout,
    "enable_dropout": _read_with_others,
    "trainable_position_size": _trainable_positions,
    "use_untrainable_positional_embedding": _fixed_positions,
    "logits_via_embedding": _tied,
    "normalize_embedding_logits": _read_with_others,
    "logits_dot_in_fp32": lambda value, values: {},
    "cast_logits_to_fp32": only([True], because="the loss is always computed in float32"),
    "normalization_layer_epsilon": rename("NORM_EPSILON", number),
    "attn_logits_soft_cap": rename("ATTENTION_LOGIT_CAP", positive_or_none),
    "final_logits_soft_cap": rename("SOFTMAX_LOGIT_CAP", positive_or_none),
    "num_experts": only([1], because=_NO_EXPERTS),
    "num_experts_per_tok": only([1], because=_NO_EXPERTS),
    "quantization": only(["", None], because=_NO_QUANTIZATION),
    "quantize_kvcache": only([False], because=_NO_QUANTIZATION),
    "learning_rate": rename("LEARNING_RATE", number),
    "cosine_learning_rate_final_fraction": rename("MIN_LEARNING_RATE_RATIO", number),
    "learning_rate_final_fraction": rename("MIN_LEARNING_RATE_RATIO", number),
    "lr_schedule_type": only(["cosine"], because="the recipe is a cosine"),
    "opt_type": _optimizer,
    "adam_b1": rename("ADAM_BETA1", number),
    "adam_b2": rename("ADAM_BETA2", number),
    "adam_eps": rename("ADAM_EPSILON", number),
    "adam_eps_root": only([0], because="Adam's other epsilon is 0"),
    "adam_weight_decay": rename("WEIGHT_DECAY", number),
    "mu_dtype": only(["", None, "float32"], because="moments are kept in float32"),
    "gradient_clipping_threshold": rename("CLIP_GRADIENT_NORM", positive_or_none),
    "gradient_accumulation_steps": only(
        [1], because="add --fdl.task.train.gradient_accumulation_steps=N to the command"
    ),
    "checkpoint_period": rename("CHECKPOINT_EVERY_N_STEPS", whole_number),
    "log_period": rename("SUMMARY_INTERVAL_STEPS", whole_number),
    "eval_interval": _steps_or_none,
    "init_weights_seed": rename("SEED", whole_number),
    "dataset_type": _data_set,
    "dataset_name": _data_set,
    "dataset_path": only(["", None], because="where data lie is TFDS_DATA_DIR or GRAIN_DATA_DIR"),
    "tokenizer_path": only(["", None], because="a SentencePiece model is VOCAB_PATH"),
    "model_name": only(
        ["default"], because="give its file, configs/models/NAME.yml, besides the others"
    ),
    "load_parameters_path": only(["", None], because="weights of our own are --init_from=DIR"),
    "load_full_state_path": only(["", None], because="--restore_checkpoint_dir=DIR reads our own"),
    "reuse_example_batch": only([0], because="synthetic data are for that"),
    "target_eval_loss": only([0], because="early stopping is a field of the task"),
}
