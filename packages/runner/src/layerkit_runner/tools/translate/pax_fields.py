"""What each field of Pax's language-model experiments means here, and what its bases say.

Source: paxml's tasks/lm/model_params.py, tasks/lm/params/{c4,lm_cloud}.py and
contrib/gpu/scripts_gpu/{configs,tasks}.py (google/paxml).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from layerkit_runner.tools.translate.values import (
    Reader,
    number,
    or_none,
    positive_or_none,
    text,
    whole_number,
    whole_numbers,
    yes_or_no,
)

# Values of fields that are no literals, by the last part of their name.
DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS = {"ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}
# As CHECKPOINT_POLICY takes them.
CHECKPOINT_POLICIES = {
    "SAVE_EVERYTHING": "none",
    "SAVE_NOTHING": "full",
    "SAVE_DOT_ONLY": "dots",
    "SAVE_DOT_WITH_NO_BATCH_DIM": "dots_no_batch",
    "SAVE_DOT_WITH_NO_BATCH_DIMS": "dots_no_batch",
}

# The same name and meaning.
SAME: Mapping[str, Reader] = {
    "NUM_LAYERS": whole_number,
    "MODEL_DIMS": whole_number,
    "HIDDEN_DIMS": or_none(whole_number),
    "NUM_HEADS": or_none(whole_number),
    "DIMS_PER_HEAD": or_none(whole_number),
    "VOCAB_SIZE": whole_number,
    "MAX_SEQ_LEN": whole_number,
    "PERCORE_BATCH_SIZE": number,
    "USE_REPEATED_LAYER": yes_or_no,
    "USE_GATED_ACTIVATION": yes_or_no,
    "FPROP_DTYPE": text,
    "NUM_STAGES": or_none(whole_number),
    "CIRCULAR_REPEAT": whole_number,
    "MICROBATCH_SIZE": or_none(whole_number),
    "NUM_MICROBATCHES": or_none(whole_number),
    "ICI_MESH_SHAPE": or_none(whole_numbers),
    "DCN_MESH_SHAPE": or_none(whole_numbers),
    "LEARNING_RATE": number,
    "WEIGHT_DECAY": number,
    "ADAM_BETA1": number,
    "ADAM_BETA2": number,
    "ADAM_EPSILON": number,
    "INIT_STD": or_none(number),
    "PACKED_INPUT": yes_or_no,
    "MAX_STEPS": or_none(whole_number),
    "SUMMARY_INTERVAL_STEPS": whole_number,
    "EVAL_INTERVAL_STEPS": or_none(whole_number),
    "CHECKPOINT_EVERY_N_STEPS": whole_number,
    "CHECKPOINT_MAX_TO_KEEP": or_none(whole_number),
}

# Another name.
RENAMED: Mapping[str, tuple[str, Reader]] = {
    "DROPOUT_PROB": ("DROPOUT_RATE", number),
    "INPUT_DROPOUT_PROB": ("INPUT_DROPOUT_RATE", number),
    "USE_BIAS": ("ATTENTION_BIAS", yes_or_no),
    "LAYERNORM_EPSILON": ("NORM_EPSILON", number),
    "CHECKPOINT_SAVE_MAX_TO_KEEP": ("CHECKPOINT_MAX_TO_KEEP", or_none(whole_number)),
    # Pax writes -1 or 0 for "none".
    "ATTEN_LOGIT_CAP": ("ATTENTION_LOGIT_CAP", positive_or_none),
    "SOFTMAX_CAP_LOGITS": ("SOFTMAX_LOGIT_CAP", positive_or_none),
    "CLIP_GRADIENT_NORM_TO_VALUE": ("CLIP_GRADIENT_NORM", positive_or_none),
    "ADAM_CLIP_THRESHOLD": ("UPDATE_RMS_CAP", positive_or_none),
}

# How Pax's program is written, or what ours always does; no number depends on it.
NEUTRAL = (
    "COMBINE_QKV",
    "TRAINING_OPTIMIZED_SHARDING",
    "EMB_W_DATA_DIMS",
    "PIPELINE_BROADCAST_INPUTS",
    "STREAM_IO",
    "PROFILER_NUM_STEPS",
    "PROFILER_MIN_DURATION_SEC",
    "PROFILER_CAPTURE_STEP",
    "EMBEDDING_LOOKUP_STYLE",
    # Learnt positions are as many as MAX_SEQ_LEN.
    "TRAINABLE_PE_MAX_SEQ_LEN",
)

# Values at which they say nothing; with others there is no recipe.
ONLY: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "NORM_POLICY": (("pre",), "recipes normalise before each branch"),
    "ENABLE_DCONV": ((False,), "recipes have no convolutions in attention"),
    "RELATIVE_BIAS": ((False,), "a relative bias is a field of the attention layer"),
    "REL_POS_EMB_DIM": ((None,), "Transformer-XL positions are a field of the attention layer"),
    "SEPARATE_EMBEDDING": ((False,), "LlamaDecoder of lm.llama has an embedding of its own"),
    "ADAM_EPSILON_ROOT": ((0, 0.0), "Adam's other epsilon is 0"),
    "LR_LRED_MAX": ((1, 1.0), "the highest rate is LEARNING_RATE"),
    "LR_COS_MAX": ((1, 1.0), "the highest rate is LEARNING_RATE"),
}

# Their values are names of other modules.
NAMED_BY_SYMBOLS = ("FPROP_DTYPE", "ACTIVATION_CLS", "CHECKPOINT_POLICY")

# Read together with others; see `pax`.
COMPOSED = (
    "ACTIVATION_CLS",
    "CHECKPOINT_POLICY",
    "TRAINABLE_POSITION_EMB",
    "USE_ROTARY_POSITION_EMB",
    "SOFTMAX_INIT_STD",
    "DECAY_END",
    "LR_SCHEDULE",
    *(f"LR_{kind}_{what}" for kind in ("LRED", "COS") for what in ("WARMUP", "DECAY_START")),
    *(f"LR_{kind}_{what}" for kind in ("LRED", "COS") for what in ("DECAY_END", "MIN_RATIO")),
)


# What Pax's language models say, and what their methods ask for, where it changes nothing here.
UNSET: Mapping[str, Any] = {
    "PACKED_INPUT": True,
    "SEPARATE_EMBEDDING": False,
    "TRAINABLE_POSITION_EMB": False,
    "USE_ROTARY_POSITION_EMB": False,
    "RELATIVE_BIAS": False,
    "NUM_STAGES": None,
    "EMBEDDING_LOOKUP_STYLE": "matmul",
}


@dataclasses.dataclass(frozen=True)
class PaxBase:
    """A base class of Pax's that files inherit without holding it.

    Attributes:
      bases: Its own, of `BASES`.
      fields: What it sets, as Pax names it.
      recipe: Our recipe of its data or partitioner; None where fields tell.
      optimizer: That of its `task()`; None where it sets none.
      is_language_model: Whether its `task()` makes one.
    """

    bases: tuple[str, ...] = ()
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    recipe: str | None = None
    optimizer: str | None = None
    is_language_model: bool = False


_SPMD_ADAFACTOR = {
    "NUM_LAYERS": 10,
    "VOCAB_SIZE": 32000,
    "DIMS_PER_HEAD": 128,
    "NUM_HEADS": None,
    "MODEL_DIMS": 2048,
    "HIDDEN_DIMS": 8192,
    "FPROP_DTYPE": "bfloat16",
    "USE_REPEATED_LAYER": False,
    "ACTIVATION_CLS": "ReLU",
    "USE_GATED_ACTIVATION": False,
    "DROPOUT_PROB": 0.0,
    "LEARNING_RATE": 2.5e-4,
    "CLIP_GRADIENT_NORM_TO_VALUE": 5.0,
    "WEIGHT_DECAY": 1e-3,
    "SOFTMAX_CAP_LOGITS": 30.0,
    "ATTEN_LOGIT_CAP": 50.0,
    "CHECKPOINT_POLICY": "SAVE_NOTHING",
    "CHECKPOINT_EVERY_N_STEPS": 5000,
    "SUMMARY_INTERVAL_STEPS": 100,
    "CHECKPOINT_MAX_TO_KEEP": 10,
    "EVAL_INTERVAL_STEPS": 100,
}
_PMAP_ADAM = {
    "NUM_LAYERS": 32,
    "VOCAB_SIZE": 32000,
    "NUM_HEADS": 16,
    "MODEL_DIMS": 1024,
    "HIDDEN_DIMS": 4096,
    "INPUT_DROPOUT_PROB": 0.0,
    "DROPOUT_PROB": 0.0,
    "LEARNING_RATE": 1e-3,
    "WEIGHT_DECAY": 1e-3,
    "USE_REPEATED_LAYER": False,
    "ACTIVATION_CLS": "ReLU",
    "USE_GATED_ACTIVATION": False,
    "DECAY_END": 300000,
    "ATTEN_LOGIT_CAP": 50.0,
    "USE_BIAS": False,
}
_SPMD_ADAM = {
    "NUM_LAYERS": 32,
    "NUM_HEADS": 16,
    "MODEL_DIMS": 1024,
    "HIDDEN_DIMS": 4096,
    "FPROP_DTYPE": "float32",
    "USE_BIAS": False,
    "LEARNING_RATE": 1e-3,
    "ADAM_BETA1": 0.9,
    "ADAM_BETA2": 0.99,
    "ADAM_CLIP_THRESHOLD": 1.0,
    "ADAM_EPSILON": 1e-6,
    "LR_SCHEDULE": "linear_rampup_exponential_decay",
    "LR_LRED_WARMUP": 4000,
    "LR_LRED_DECAY_START": 4001,
    "LR_LRED_DECAY_END": 300000,
    "LR_LRED_MIN_RATIO": 0.1,
    "LR_COS_WARMUP": 4000,
    "LR_COS_DECAY_START": 4001,
    "LR_COS_DECAY_END": 300000,
    "LR_COS_MIN_RATIO": 0.1,
}
_C4_ADAM = {
    "NUM_LAYERS": 24,
    "NUM_HEADS": 32,
    "MODEL_DIMS": 2048,
    "HIDDEN_DIMS": 8192,
    "DIMS_PER_HEAD": None,
    "VOCAB_SIZE": 32128,
    "ACTIVATION_CLS": "GELU",
    "USE_GATED_ACTIVATION": False,
    "CHECKPOINT_POLICY": "SAVE_DOT_FOR_MLPERF_200B",
    "CHECKPOINT_EVERY_N_STEPS": 1000,
    "ICI_MESH_SHAPE": [1, 4, 2],
}
_LM_CLOUD_ADAM = {
    "NUM_LAYERS": 2,
    "MODEL_DIMS": 2048,
    "HIDDEN_DIMS": 8192,
    "ACTIVATION_CLS": "GELU",
    "USE_GATED_ACTIVATION": False,
    "CHECKPOINT_POLICY": "SAVE_NOTHING",
    "ICI_MESH_SHAPE": [1, 4, 2],
}

BASES: Mapping[str, PaxBase] = {
    "object": PaxBase(),
    "BaseExperiment": PaxBase(),
    "TransformerLmSpmdAdafactor": PaxBase(
        fields=_SPMD_ADAFACTOR, optimizer="ShardedAdafactor", is_language_model=True
    ),
    "TransformerLmPmapAdam": PaxBase(
        fields=_PMAP_ADAM, recipe="Pmap", optimizer="Adam", is_language_model=True
    ),
    "TransformerLmSpmdAdam": PaxBase(("TransformerLmSpmdAdafactor",), _SPMD_ADAM, None, "Adam"),
    "TransformerLmSpmdPipelineAdafactor": PaxBase(
        ("TransformerLmSpmdAdafactor",), {"CIRCULAR_REPEAT": 1}, "Pipelined"
    ),
    "TransformerLmSpmdPipelineAdam": PaxBase(
        ("TransformerLmSpmdPipelineAdafactor",), _SPMD_ADAM, None, "Adam"
    ),
    "C4UnsupervisedDataset": PaxBase(
        fields={"PERCORE_BATCH_SIZE": 1, "MAX_SEQ_LEN": 1024}, recipe="C4"
    ),
    "PileUnsupervisedDataset": PaxBase(recipe="ThePile"),
    "LambadaDataset": PaxBase(recipe="Lambada"),
    "SyntheticDataset": PaxBase(
        fields={"PERCORE_BATCH_SIZE": 16, "MAX_SEQ_LEN": 1024}, recipe="SyntheticTokens"
    ),
    "C4SpmdAdam": PaxBase(("TransformerLmSpmdAdam", "C4UnsupervisedDataset"), _C4_ADAM),
    "LmCloudSpmdAdam": PaxBase(("TransformerLmSpmdAdam", "SyntheticDataset"), _LM_CLOUD_ADAM),
}
