"""The decoder-only Transformer, from the fields that people change most."""

from __future__ import annotations

from collections.abc import Collection

from layerkit.base_layer import BaseLayer
from layerkit.config import Config
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
from layerkit.near_names import near_names
from layerkit.weights import WeightInit

_ACTIVATIONS: dict[str, type[BaseLayer]] = {"relu": ReLU, "gelu": GELU, "silu": SiLU}
_NORMS: dict[str, type[BaseLayer]] = {"layer_norm": LayerNorm, "rms_norm": RmsNorm}
_INITS = {"xavier": WeightInit.Xavier, "fan_in": WeightInit.FanIn}
_POSITIONS = ("rotary", "sinusoidal", "trainable", "none")
_AT_LEAST_ONE = (
    "NUM_LAYERS",
    "MODEL_DIMS",
    "HIDDEN_DIMS",
    "NUM_HEADS",
    "NUM_KV_HEADS",
    "DIMS_PER_HEAD",
    "VOCAB_SIZE",
    "MAX_SEQ_LEN",
    "MAX_DECODE_STEPS",
)


class TransformerLmModel:
    """Fields of the model; `model()` puts it together."""

    NUM_LAYERS: int = 2
    MODEL_DIMS: int = 128
    HIDDEN_DIMS: int | None = None
    """Wide dimension of the feed-forward; None for four times MODEL_DIMS."""
    NUM_HEADS: int = 4
    NUM_KV_HEADS: int | None = None
    """Key and value heads; None for as many as query heads."""
    DIMS_PER_HEAD: int | None = None
    """None for MODEL_DIMS / NUM_HEADS."""
    VOCAB_SIZE: int = 32000
    MAX_SEQ_LEN: int = 1024
    ACTIVATION: str = "gelu"
    USE_GATED_ACTIVATION: bool = False
    NORM: str = "layer_norm"
    POSITIONS: str = "sinusoidal"
    ATTENTION_LOGIT_CAP: float | None = None
    SOFTMAX_LOGIT_CAP: float | None = None
    SOFTMAX_CHUNK_SIZE: int | None = None
    """Positions whose logits exist at one time; None for all."""
    ATTENTION_BACKEND: str = "auto"
    DROPOUT_RATE: float = 0.0
    WEIGHT_INIT: str = "xavier"
    SCALE_RESIDUAL_INIT: bool = False
    """Divides the weights that end a residual branch by √(2·NUM_LAYERS) at the start (GPT-2)."""
    FPROP_DTYPE: str = "float32"
    """Of the computation; weights are float32."""
    USE_REPEATED_LAYER: bool = True
    """One scan over stacked weights instead of a layer after a layer."""
    CHECKPOINT_POLICY: str = "none"
    """What the backward pass keeps; see `layerkit.layers.remat`."""
    MAX_DECODE_STEPS: int = 64
    TEMPERATURE: float = 1.0
    EOS_ID: int | None = None

    def model(self) -> Config:
        """The config of the LanguageModel.

        Raises:
          ValueError: a field that names something that does not exist, or a size below 1.
        """
        for field in _AT_LEAST_ONE:
            size = getattr(self, field)
            if size is not None and size < 1:
                raise ValueError(f"{field}={size} must be at least 1")
        norm = _pick("NORM", self.NORM, _NORMS)
        lm: Config = TransformerLm.HParams.config(
            vocab_size=self.VOCAB_SIZE,
            model_dims=self.MODEL_DIMS,
            hidden_dims=4 * self.MODEL_DIMS if self.HIDDEN_DIMS is None else self.HIDDEN_DIMS,
            num_layers=self.NUM_LAYERS,
            num_heads=self.NUM_HEADS,
            num_kv_heads=self.NUM_KV_HEADS,
            dim_per_head=self.DIMS_PER_HEAD,
            final_norm_tpl=norm.HParams.config(),
            dropout_rate=self.DROPOUT_RATE,
        )
        stack = StackedTransformerRepeated if self.USE_REPEATED_LAYER else StackedTransformer
        lm.stack_tpl = stack.HParams.config(remat=self.CHECKPOINT_POLICY)
        lm.softmax_tpl.set(
            logit_soft_cap=self.SOFTMAX_LOGIT_CAP, chunk_size=self.SOFTMAX_CHUNK_SIZE
        )
        layer = lm.stack_tpl.layer_tpl
        layer.set(norm_tpl=norm.HParams.config(), dropout_rate=self.DROPOUT_RATE)
        layer.attention_tpl.set(logit_cap=self.ATTENTION_LOGIT_CAP, backend=self.ATTENTION_BACKEND)
        activation = _pick("ACTIVATION", self.ACTIVATION, _ACTIVATIONS)
        layer.feed_forward_tpl.set(
            activation_tpl=activation.HParams.config(), use_gate=self.USE_GATED_ACTIVATION
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

    def _set_initial_weights(self, lm: Config) -> None:
        _check("WEIGHT_INIT", self.WEIGHT_INIT, _INITS)
        lm.params_init = _INITS[self.WEIGHT_INIT]()
        # The embedding is no projection: its vectors start with unit length.
        lm.softmax_tpl.weight_init = WeightInit.Gaussian(self.MODEL_DIMS**-0.5)
        if self.SCALE_RESIDUAL_INIT:
            scaled = _INITS[self.WEIGHT_INIT]((2 * self.NUM_LAYERS) ** -0.5)
            layer = lm.stack_tpl.layer_tpl
            layer.attention_tpl.output_tpl.params_init = scaled
            layer.feed_forward_tpl.down_init = scaled

    def _set_positions(self, lm: Config) -> None:
        _check("POSITIONS", self.POSITIONS, _POSITIONS)
        if self.POSITIONS == "rotary":
            rotary = RotaryPositionalEmbedding.HParams.config()
            lm.stack_tpl.layer_tpl.attention_tpl.rotary_tpl = rotary
        elif self.POSITIONS == "sinusoidal":
            lm.position_tpl = PositionalEmbedding.HParams.config()
        elif self.POSITIONS == "trainable":
            lm.position_tpl = TrainablePositionalEmbedding.HParams.config(
                max_length=self.MAX_SEQ_LEN
            )


def _pick(field: str, name: str, table: dict[str, type[BaseLayer]]) -> type[BaseLayer]:
    _check(field, name, table)
    return table[name]


def _check(field: str, name: str, table: Collection[str]) -> None:
    if name not in table:
        valid = ", ".join(table)
        raise ValueError(f"{field}={name!r}{near_names(name, table)} It is one of {valid}.")
