"""The decoder-only Transformer with its most important fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from layerkit.base.base_layer import BaseLayer
from layerkit.base.weights import WeightInit
from layerkit.config import Config
from layerkit.config.checks import check_choice, check_sizes
from layerkit.decoding import SampleDecoder
from layerkit.layers import (
    GELU,
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
_POSITIONS = (
    "rotary",
    "sinusoidal",
    "trainable",
    "none",
    "sinusoidal+rotary",
    "trainable+rotary",
)
_SIZES = (
    "NUM_LAYERS",
    "MODEL_DIMS",
    "HIDDEN_DIMS",
    "NUM_HEADS",
    "NUM_KV_HEADS",
    "DIMS_PER_HEAD",
    "VOCAB_SIZE",
    "MAX_SEQ_LEN",
    "MAX_POSITIONS",
    "MAX_DECODE_STEPS",
)


class TransformerLmModel:
    """Fields of the model, from which `model()` builds the config."""

    NUM_LAYERS: int = 2
    MODEL_DIMS: int = 128
    HIDDEN_DIMS: int | None = None
    """Hidden size of the feed-forward layer; None for four times MODEL_DIMS."""
    NUM_HEADS: int = 4
    NUM_KV_HEADS: int | None = None
    """Number of key and value heads; None for that of query heads."""
    DIMS_PER_HEAD: int | None = None
    """Size of a head; None for MODEL_DIMS / NUM_HEADS."""
    VOCAB_SIZE: int = 32000
    MAX_SEQ_LEN: int = 1024
    ACTIVATION: str = "gelu"
    USE_GATED_ACTIVATION: bool = False
    ATTENTION_BIAS: bool = False
    """Use biases in the query, key, value and output projections."""
    FEED_FORWARD_BIAS: bool = False
    """Use biases in the feed-forward layer."""
    PER_DIM_SCALE: bool = False
    """Learn a scale for each coordinate of a head, in the logits of attention."""
    COMBINE_QKV: bool = False
    """Keep the query, key and value projections as one weight, which optimizers see as a whole."""
    SOFTMAX_BIAS: bool = False
    """Use a bias for each token of the vocabulary in the logits."""
    NORM: str = "layer_norm"
    """`layer_norm` or `rms_norm`."""
    NORM_EPSILON: float = 1e-6
    POSITIONS: str = "sinusoidal"
    """`rotary`, `sinusoidal`, `trainable`, `none`, or both, as in Pax: `sinusoidal+rotary` or
    `trainable+rotary`."""
    MAX_POSITIONS: int | None = None
    """Number of trainable positions; None for MAX_SEQ_LEN."""
    ATTENTION_LOGIT_CAP: float | None = None
    """Bound of the logits of attention; None for no bound."""
    SOFTMAX_LOGIT_CAP: float | None = None
    """Bound of the logits of tokens; None for no bound."""
    SOFTMAX_CHUNK_SIZE: int | None = None
    """Number of positions whose logits are in memory at a time; None for all, or for 512 from a
    vocabulary of 65,536 on."""
    ATTENTION_BACKEND: str = "auto"
    DROPOUT_RATE: float = 0.0
    INPUT_DROPOUT_RATE: float | None = None
    """Dropout rate of embeddings; None for DROPOUT_RATE."""
    LAYER_INPUT_DROPOUT_RATE: float = 0.0
    """Dropout rate of the input of each layer, as Pax's `input_dropout_prob` of repeated layers."""
    SCALE_EMBEDDING: bool = False
    """Multiply embeddings by √MODEL_DIMS (Vaswani et al., 2017)."""
    WEIGHT_INIT: str = "xavier"
    """`xavier`, `xavier_last_axes` (Praxis), or `fan_in`; see `layerkit.WeightInit`."""
    INIT_STD: float | None = None
    """Standard deviation of the normal initializer of all matrices; None for WEIGHT_INIT."""
    SCALE_RESIDUAL_INIT: bool = False
    """Divide the initial output weights of residual branches by √(2·NUM_LAYERS) (GPT-2)."""
    FPROP_DTYPE: str = "float32"
    """Dtype of the computation; weights are float32."""
    USE_REPEATED_LAYER: bool = True
    """Run layers as a scan over stacked weights instead of unrolled."""
    CHECKPOINT_POLICY: str = "none"
    """Rematerialization policy of `layerkit.ops.remat`, or Pax's name of one."""
    MAX_DECODE_STEPS: int = 64
    TEMPERATURE: float = 1.0
    EOS_ID: int | None = None

    reduced_fields: ClassVar[Mapping[str, Any]] = {
        "NUM_LAYERS": 2,
        "MAX_POSITIONS": None,
        "MODEL_DIMS": 64,
        "HIDDEN_DIMS": 256,
        "NUM_HEADS": 4,
        "DIMS_PER_HEAD": 16,
        "FPROP_DTYPE": "float32",
    }

    def model(self) -> Config:
        """Return the config of the LanguageModel.

        Raises:
          ConfigError: A field has an unknown name, or a size below 1.
        """
        check_sizes(None, **{field: getattr(self, field) for field in _SIZES})
        check_choice(None, tuple(_NORMS), NORM=self.NORM)
        norm: Config = Config(_NORMS[self.NORM], epsilon=self.NORM_EPSILON)
        lm: Config = TransformerLm.HParams.config(
            vocab_size=self.VOCAB_SIZE,
            model_dims=self.MODEL_DIMS,
            hidden_dims=4 * self.MODEL_DIMS if self.HIDDEN_DIMS is None else self.HIDDEN_DIMS,
            num_layers=self.NUM_LAYERS,
            num_heads=self.NUM_HEADS,
            num_kv_heads=self.NUM_KV_HEADS,
            dim_per_head=self.DIMS_PER_HEAD,
            stack_tpl=self.stack(),
            final_norm_tpl=norm,
            dropout_rate=self.DROPOUT_RATE
            if self.INPUT_DROPOUT_RATE is None
            else self.INPUT_DROPOUT_RATE,
        )
        lm.softmax_tpl.set(
            use_bias=self.SOFTMAX_BIAS,
            logit_soft_cap=self.SOFTMAX_LOGIT_CAP,
            chunk_size=self.SOFTMAX_CHUNK_SIZE,
            scale_by_sqrt_dims=self.SCALE_EMBEDDING,
        )
        layer = lm.stack_tpl.layer_tpl
        layer.set(
            norm_tpl=norm.clone(),
            dropout_rate=self.DROPOUT_RATE,
            input_dropout_rate=self.LAYER_INPUT_DROPOUT_RATE,
        )
        layer.attention_tpl.set(
            logit_cap=self.ATTENTION_LOGIT_CAP,
            use_bias=self.ATTENTION_BIAS,
            per_dim_scale=self.PER_DIM_SCALE,
            combined_qkv=self.COMBINE_QKV,
            backend=self.ATTENTION_BACKEND,
        )
        check_choice(None, tuple(_ACTIVATIONS), ACTIVATION=self.ACTIVATION)
        layer.feed_forward_tpl.set(
            activation_tpl=_ACTIVATIONS[self.ACTIVATION].clone(),
            use_gate=self.USE_GATED_ACTIVATION,
            has_bias=self.FEED_FORWARD_BIAS,
        )
        self._set_positions(lm)
        self._set_initial_weights(lm)
        return LanguageModel.HParams.config(
            lm_tpl=lm,
            fprop_dtype=self.FPROP_DTYPE,
            decoder=SampleDecoder.HParams.config(
                max_decode_steps=self.MAX_DECODE_STEPS,
                temperature=self.TEMPERATURE,
                eos_id=self.EOS_ID,
            ),
        )

    def stack(self) -> Config:
        """Return the config of the stack of layers, which a recipe of parallelism may replace."""
        stack = StackedTransformerRepeated if self.USE_REPEATED_LAYER else StackedTransformer
        return stack.HParams.config(remat=remat_policy(self.CHECKPOINT_POLICY))

    def _set_initial_weights(self, lm: Config) -> None:
        lm.params_init = self._weight_init()
        # Without INIT_STD, embedding vectors have unit length on average.
        std = self.MODEL_DIMS**-0.5 if self.INIT_STD is None else self.INIT_STD
        lm.softmax_tpl.weight_init = WeightInit.Gaussian(std)
        if self.SCALE_RESIDUAL_INIT:
            scaled = self._weight_init(scale=(2 * self.NUM_LAYERS) ** -0.5)
            layer = lm.stack_tpl.layer_tpl
            layer.attention_tpl.output_tpl.params_init = scaled
            layer.feed_forward_tpl.down_init = scaled

    def _weight_init(self, *, scale: float = 1.0) -> WeightInit:
        if self.INIT_STD is not None:
            return WeightInit.Gaussian(scale * self.INIT_STD)
        check_choice(None, tuple(_INITS), WEIGHT_INIT=self.WEIGHT_INIT)
        return _INITS[self.WEIGHT_INIT](scale)

    def _set_positions(self, lm: Config) -> None:
        check_choice(None, _POSITIONS, POSITIONS=self.POSITIONS)
        kinds = self.POSITIONS.split("+")
        if "rotary" in kinds:
            rotary = RotaryPositionalEmbedding.HParams.config()
            lm.stack_tpl.layer_tpl.attention_tpl.rotary_tpl = rotary
        if "sinusoidal" in kinds:
            lm.position_tpl = PositionalEmbedding.HParams.config()
        if "trainable" in kinds:
            lm.position_tpl = TrainablePositionalEmbedding.HParams.config(
                max_length=self.MAX_SEQ_LEN if self.MAX_POSITIONS is None else self.MAX_POSITIONS
            )


def remat_policy(name: str) -> str:
    """Return the policy of `layerkit.ops.remat` for its own name or for that of Pax.

    Raises:
      ConfigError: A policy of Pax has no counterpart.
    """
    last = name.rpartition(".")[2]  # Pax writes AutodiffCheckpointType.SAVE_NOTHING
    if last.startswith("SAVE_"):
        check_choice(None, tuple(_PAX_CHECKPOINT_POLICIES), CHECKPOINT_POLICY=last)
    return _PAX_CHECKPOINT_POLICIES.get(last, name)
