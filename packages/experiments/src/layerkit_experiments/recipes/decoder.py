"""The decoder-only Transformer, made from the fields of an experiment."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from layerkit.base.base_layer import BaseLayer
from layerkit.base.weights import WeightInit
from layerkit.config import Config
from layerkit.config.checks import check_sizes
from layerkit.decoding import SampleDecoder
from layerkit.layers import (
    GELU,
    Embedding,
    FullSoftmax,
    LayerNorm,
    PositionalEmbedding,
    ReLU,
    RmsNorm,
    RotaryPositionalEmbedding,
    SiLU,
    StackedTransformer,
    StackedTransformerRepeated,
    TrainablePositionalEmbedding,
)
from layerkit.models import LanguageModel, TransformerLm

# Fields whose value is that of a path in the config of the TransformerLm.
_PATHS = {
    "NUM_LAYERS": "num_layers",
    "MODEL_DIMS": "model_dims",
    "NUM_HEADS": "num_heads",
    "NUM_KV_HEADS": "num_kv_heads",
    "DIMS_PER_HEAD": "dim_per_head",
    "VOCAB_SIZE": "vocab_size",
    "SCALE_EMBEDDING": "softmax_tpl.scale_by_sqrt_dims",
    "SOFTMAX_BIAS": "softmax_tpl.use_bias",
    "SOFTMAX_LOGIT_CAP": "softmax_tpl.logit_soft_cap",
    "SOFTMAX_CHUNK_SIZE": "softmax_tpl.chunk_size",
    "DROPOUT_RATE": "stack_tpl.layer_tpl.dropout_rate",
    "LAYER_INPUT_DROPOUT_RATE": "stack_tpl.layer_tpl.input_dropout_rate",
    "ATTENTION_BACKEND": "stack_tpl.layer_tpl.attention_tpl.backend",
    "ATTENTION_BIAS": "stack_tpl.layer_tpl.attention_tpl.use_bias",
    "ATTENTION_LOGIT_CAP": "stack_tpl.layer_tpl.attention_tpl.logit_cap",
    "PER_DIM_SCALE": "stack_tpl.layer_tpl.attention_tpl.per_dim_scale",
    "COMBINE_QKV": "stack_tpl.layer_tpl.attention_tpl.combined_qkv",
    "USE_GATED_ACTIVATION": "stack_tpl.layer_tpl.feed_forward_tpl.use_gate",
    "FEED_FORWARD_BIAS": "stack_tpl.layer_tpl.feed_forward_tpl.has_bias",
}
# `gelu` is the approximation by tanh, with which most published models were trained.
_ACTIVATIONS: dict[str, Config] = {
    "relu": ReLU.HParams.config(),
    "gelu": GELU.HParams.config(),
    "gelu_exact": GELU.HParams.config(approximate=False),
    "silu": SiLU.HParams.config(),
}
_NORMS: dict[str, type[BaseLayer]] = {"layer_norm": LayerNorm, "rms_norm": RmsNorm}
_INITS = {
    "xavier": WeightInit.Xavier,
    "xavier_last_axes": WeightInit.XavierLastAxes,
    "fan_in": WeightInit.FanIn,
}
# Pax's names of policies, with the names here of policies that save the same values.
_PAX_CHECKPOINT_POLICIES = {
    "SAVE_EVERYTHING": "none",
    "SAVE_NOTHING": "full",
    "SAVE_DOT_ONLY": "dots",
    "SAVE_DOT_WITH_NO_BATCH_DIM": "dots_no_batch",
    "SAVE_DOT_WITH_NO_BATCH_DIMS": "dots_no_batch",
    "SAVE_QKV_OUT_PROJ": "save:query,key,value,attention_out",
    "SAVE_QKV_OUT_PROJ_SEPARATE": "save:query,key,value,attention_out",
    "SAVE_OUT_PROJ": "attention_out",
}


def decoder(fields: Any) -> Config:
    """Return the config of a LanguageModel with the fields of an `LmExperiment`."""
    check_sizes(None, NUM_LAYERS=fields.NUM_LAYERS, MODEL_DIMS=fields.MODEL_DIMS)
    lm: Config = TransformerLm.HParams.config(stack_tpl=fields.stack())
    set_paths(lm, fields, _PATHS)
    lm.hidden_dims = 4 * fields.MODEL_DIMS if fields.HIDDEN_DIMS is None else fields.HIDDEN_DIMS
    rate = fields.INPUT_DROPOUT_RATE
    lm.dropout_rate = fields.DROPOUT_RATE if rate is None else rate
    layer = lm.stack_tpl.layer_tpl
    norm: Config = Config(_NORMS[fields.NORM], epsilon=fields.NORM_EPSILON)
    lm.final_norm_tpl, layer.norm_tpl = norm, norm.clone()
    layer.feed_forward_tpl.activation_tpl = _ACTIVATIONS[fields.ACTIVATION].clone()
    _set_positions(fields, lm)
    _set_initial_weights(fields, lm)
    return LanguageModel.HParams.config(
        lm_tpl=lm,
        fprop_dtype=fields.FPROP_DTYPE,
        decoder=SampleDecoder.HParams.config(
            max_decode_steps=fields.MAX_DECODE_STEPS,
            temperature=fields.TEMPERATURE,
            eos_id=fields.EOS_ID,
        ),
    )


def untied_decoder(fields: Any) -> Config:
    """Return the config of a `decoder` with a softmax that does not share the embedding."""
    model = decoder(fields)
    model.lm_tpl.softmax_tpl = FullSoftmax.HParams.config(
        chunk_size=fields.SOFTMAX_CHUNK_SIZE, logit_soft_cap=fields.SOFTMAX_LOGIT_CAP
    )
    model.lm_tpl.embedding_tpl = Embedding.HParams.config(weight_init=WeightInit.Gaussian(1.0))
    return model


def layer_stack(fields: Any) -> Config:
    """Return the config of a stack of layers, scanned or unrolled."""
    stack = StackedTransformerRepeated if fields.USE_REPEATED_LAYER else StackedTransformer
    return stack.HParams.config(remat=remat_policy(fields.CHECKPOINT_POLICY))


def remat_policy(name: str) -> str:
    """Return the policy of `layerkit.ops.remat` for its own name or for that of Pax."""
    last = name.rpartition(".")[2]  # Pax writes AutodiffCheckpointType.SAVE_NOTHING
    return _PAX_CHECKPOINT_POLICIES.get(last, name)


def set_paths(config: Config, fields: Any, paths: Mapping[str, str]) -> None:
    """Set paths in a config to the values of fields.

    Args:
      config: Config that is changed.
      fields: Experiment.
      paths: Dotted paths in the config by the names of fields.
    """
    for name, path in paths.items():
        *parents, last = path.split(".")
        setattr(functools.reduce(getattr, parents, config), last, getattr(fields, name))


def _set_positions(fields: Any, lm: Config) -> None:
    kinds = fields.POSITIONS.split("+")
    if "rotary" in kinds:
        rotary = RotaryPositionalEmbedding.HParams.config()
        lm.stack_tpl.layer_tpl.attention_tpl.rotary_tpl = rotary
    if "sinusoidal" in kinds:
        lm.position_tpl = PositionalEmbedding.HParams.config()
    if "trainable" in kinds:
        lm.position_tpl = TrainablePositionalEmbedding.HParams.config(
            max_length=fields.MAX_SEQ_LEN if fields.MAX_POSITIONS is None else fields.MAX_POSITIONS
        )


def _set_initial_weights(fields: Any, lm: Config) -> None:
    lm.params_init = _weight_init(fields)
    # Without INIT_STD, embedding vectors have unit length on average.
    std = fields.MODEL_DIMS**-0.5 if fields.INIT_STD is None else fields.INIT_STD
    lm.softmax_tpl.weight_init = WeightInit.Gaussian(std)
    if fields.SCALE_RESIDUAL_INIT:
        scaled = _weight_init(fields, scale=(2 * fields.NUM_LAYERS) ** -0.5)
        layer = lm.stack_tpl.layer_tpl
        layer.attention_tpl.output_tpl.params_init = scaled
        layer.feed_forward_tpl.down_init = scaled


def _weight_init(fields: Any, *, scale: float = 1.0) -> WeightInit:
    if fields.INIT_STD is not None:
        return WeightInit.Gaussian(scale * fields.INIT_STD)
    return _INITS[fields.WEIGHT_INIT](scale)
