"""LmExperiment, the base class of language-model experiments, and the decoder of its fields."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

from layerkit import layers
from layerkit.base.base_layer import BaseLayer
from layerkit.base.weights import WeightInit
from layerkit.config import Config, target_of
from layerkit.config.checks import check_choice, check_sizes, require
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
    SquaredReLU,
    StackedTransformer,
    StackedTransformerRepeated,
    TrainablePositionalEmbedding,
)
from layerkit.models import LanguageModel, TransformerLm
from layerkit.ops.attention.backends import BackendName
from layerkit_experiments.recipes.optimizer_choices import OPTIMIZERS
from layerkit_experiments.recipes.training import (
    TrainedExperiment,
    train_config,
)
from layerkit_runner.config.experiment import experiment_fields
from layerkit_runner.step.task import SingleTask

DataFormat = Literal["seqio", "grain", "local_text", "synthetic"]
TEXT_FIELDS = (
    *("DATA_FORMAT", "TFDS_DATA_DIR", "GRAIN_DATA_DIR", "VOCAB_PATH", "PACKED_INPUT"),
    "EVAL_NUM_BATCHES",
)
"""Fields of published text, for `unused_fields` of a class with other data."""
REDUCED_TEXT: Mapping[str, Any] = {
    "DATA_FORMAT": "local_text",
    "VOCAB_SIZE": 259,
    "PERCORE_BATCH_SIZE": 8.0,
    "MAX_SEQ_LEN": 64,
}
"""Values of `reduced_fields` of a class that reads published text."""


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
    "QK_CLIP": "stack_tpl.layer_tpl.attention_tpl.qk_clip",
    "WINDOW": "stack_tpl.layer_tpl.attention_tpl.window",
    "PER_DIM_SCALE": "stack_tpl.layer_tpl.attention_tpl.per_dim_scale",
    "COMBINE_QKV": "stack_tpl.layer_tpl.attention_tpl.combined_qkv",
    "USE_GATED_ACTIVATION": "stack_tpl.layer_tpl.feed_forward_tpl.use_gate",
    "FEED_FORWARD_BIAS": "stack_tpl.layer_tpl.feed_forward_tpl.has_bias",
}
# `gelu` is the approximation by tanh, with which most published models were trained.
_ACTIVATIONS: dict[str, Config] = {
    "relu": ReLU.HParams.config(),
    "squared_relu": SquaredReLU.HParams.config(),
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
# Names in `layerkit.layers`, which imports a layer when it is used.
_DOTS = {
    "fp8_delayed": "Fp8Dot",
    "fp8_current": "Fp8CurrentDot",
    "mxfp8": "MxFp8Dot",
    "nvfp4": "NvFp4Dot",
    "int8": "Int8Dot",
}
_LAYERS = r"lm_tpl\.stack_tpl\..*"


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
    layer.attention_tpl.qk_norm_tpl = norm.clone() if fields.QK_NORM else None
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
    chunk_size, cap = fields.SOFTMAX_CHUNK_SIZE, fields.SOFTMAX_LOGIT_CAP
    model.lm_tpl.softmax_tpl = FullSoftmax.HParams.config(chunk_size=chunk_size, logit_soft_cap=cap)
    init = WeightInit.Gaussian(fields.INIT_STD or 1.0)
    model.lm_tpl.embedding_tpl = Embedding.HParams.config(weight_init=init)
    return model


def width_fields(fields: Any, size: int) -> dict[str, Any]:
    """Return the fields of a decoder of a size, by the rules of docs/scaling.md."""
    head, last, known = fields.DIMS_PER_HEAD, fields.MAX_STEPS, experiment_fields(type(fields))
    dims = 2 * size * fields.NUM_HEADS if head is None else size * head
    growth, rate = dims / fields.MODEL_DIMS, fields.LEARNING_RATE
    if rate and getattr(fields, "WIDTH_TRANSFER", None) is None:
        rate = float(f"{rate / math.sqrt(growth):.4g}")
    rows, parts = fields.PERCORE_BATCH_SIZE, fields.GRADIENT_ACCUMULATION_STEPS
    grown = parts * max(1.0, round(rows * growth**1.3 / parts))
    values = {
        "PERCORE_BATCH_SIZE": grown if rows >= 1 and growth != 1.0 else rows,
        "MODEL_DIMS": dims,
        "HIDDEN_DIMS": fields.HIDDEN_DIMS and round(fields.HIDDEN_DIMS * growth),
        "LEARNING_RATE": rate,
    }
    unread = OPTIMIZERS[fields.OPTIMIZER].unread_rate_fields(fields)
    for name in ("WARMUP_STEPS", "DECAY_START", "DECAY_END", "CONSTANT_STEPS"):
        steps = None if name in unread else getattr(fields, name, None)
        values[name] = steps / last if type(steps) is int and steps <= last else steps
    if head is not None:
        values["NUM_HEADS"] = heads = max(1, round(fields.NUM_HEADS * growth))
        most = max(1, (fields.NUM_KV_HEADS or fields.NUM_HEADS) * heads // fields.NUM_HEADS)
        values["NUM_KV_HEADS"] = max(n for n in range(1, most + 1) if heads % n == 0)
    return {name: v for name, v in values.items() if v is not None and name in known}


def alternate_windows(fields: Any, model: Config) -> Config:
    """Return the config of a LanguageModel whose every WINDOW_PERIOD-th layer has no window."""
    near = model.lm_tpl.stack_tpl.layer_tpl
    far = near.clone()
    far.attention_tpl.window = None
    repeat_layers(model, *[near] * (fields.WINDOW_PERIOD - 1), far)
    return model


def repeat_layers(model: Config, *layers: Config) -> None:
    """Let the stack of a LanguageModel repeat copies of layers, in the place of its own layer."""
    stack = model.lm_tpl.stack_tpl
    stack.layer_tpl = Config(target_of(stack)).layer_tpl
    stack.block_tpls = tuple(layer.clone() for layer in layers)


def layer_stack(fields: Any) -> Config:
    """Return the config of a stack of layers, scanned or unrolled."""
    stack = StackedTransformerRepeated if fields.USE_REPEATED_LAYER else StackedTransformer
    return stack.HParams.config(remat=remat_policy(fields.CHECKPOINT_POLICY))


def remat_policy(name: str) -> str:
    """Return the policy of `layerkit.ops.remat` for its own name or for that of Pax."""
    last = name.rpartition(".")[2]  # Pax writes AutodiffCheckpointType.SAVE_NOTHING
    return _PAX_CHECKPOINT_POLICIES.get(last, name)


def set_paths(config: Config, fields: Any, paths: Mapping[str, str]) -> None:
    """Set dotted paths in a config, given by the names of fields, to the values of the fields."""
    for name, path in paths.items():
        *parents, last = path.split(".")
        setattr(functools.reduce(getattr, parents, config), last, getattr(fields, name))


def _set_positions(fields: Any, lm: Config) -> None:
    kinds = fields.POSITIONS.split("+")
    if "rotary" in kinds:
        rotary = RotaryPositionalEmbedding.HParams.config(max_timescale=fields.ROTARY_BASE)
        attention = lm.stack_tpl.layer_tpl.attention_tpl
        attention.set(rotary_tpl=rotary, qk_norm_before_rotary=fields.QK_NORM)
    if "sinusoidal" in kinds:
        lm.position_tpl = PositionalEmbedding.HParams.config()
    if "trainable" in kinds:
        lm.position_tpl = TrainablePositionalEmbedding.HParams.config(
            max_length=fields.MAX_SEQ_LEN if fields.MAX_POSITIONS is None else fields.MAX_POSITIONS
        )


def _set_initial_weights(fields: Any, lm: Config) -> None:
    std = fields.INIT_STD
    init = _INITS[fields.WEIGHT_INIT] if std is None else lambda x: WeightInit.Gaussian(x * std)
    lm.params_init = init(1.0)
    # Without INIT_STD, embedding vectors have unit length on average.
    lm.softmax_tpl.weight_init = WeightInit.Gaussian(
        fields.MODEL_DIMS**-0.5 if std is None else std
    )
    if fields.SCALE_RESIDUAL_INIT:
        layer, scaled = lm.stack_tpl.layer_tpl, init((2 * fields.NUM_LAYERS) ** -0.5)
        layer.attention_tpl.output_tpl.params_init = layer.feed_forward_tpl.down_init = scaled


def quantized(fields: Any, model: Config) -> Config:
    """Return the config of a LanguageModel with the products of QUANTIZATION in its layers.

    Embedding and softmax keep FPROP_DTYPE. `USE_FP8`, which some experiments have from Pax, is
    another name of `QUANTIZATION="fp8_delayed"`; beside another QUANTIZATION it is an error.
    """
    name = fields.QUANTIZATION
    if getattr(fields, "USE_FP8", False):
        is_same, expected = name in (None, "fp8_delayed"), "None or 'fp8_delayed' with USE_FP8=True"
        require(is_same, None, "QUANTIZATION", name, expected)
        name = "fp8_delayed"
    if name is None:
        return model
    dot = getattr(layers, _DOTS[name])
    return layers.replace_dots(model, dot.HParams.config(), only=_LAYERS)


class LmExperiment(TrainedExperiment, abstract=True):
    """Base class: a decoder, trained by AdamW with a cosine on a mesh, on published text.

    A subclass composes another model, optimizer, mesh or data by another recipe, such as `learner =
    adamw_linear`, and lists the fields that this one does not read in `unused_fields`.
    """

    tags: ClassVar[tuple[str, ...]] = ("lm",)
    tfds_name: ClassVar[str] = "c4/en:3.0.1"
    """Name, configuration and version of the TFDS data set; by default the English C4 (Raffel et
    al., 2020, arXiv:1910.10683)."""
    eval_split: ClassVar[str] = "validation"
    """TFDS name of the held-out split."""

    # Model.
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
    """Size of the embedding, at least the size of the vocabulary."""
    MAX_SEQ_LEN: int = 1024
    ACTIVATION: Literal["relu", "squared_relu", "gelu", "gelu_exact", "silu"] = "gelu"
    USE_GATED_ACTIVATION: bool = False
    ATTENTION_BIAS: bool = False
    """Use biases in the query, key, value and output projections."""
    FEED_FORWARD_BIAS: bool = False
    """Use biases in the feed-forward layer."""
    PER_DIM_SCALE: bool = False
    """Learn a scale for each coordinate of a head, in the logits of attention."""
    QK_NORM: bool = False
    """Normalize queries and keys, before their rotation."""
    WINDOW: int | None = None
    """Number of positions that a query sees, itself and those before it; None for all."""
    COMBINE_QKV: bool = False
    """Keep the query, key and value projections as one weight, which optimizers see as a whole."""
    SOFTMAX_BIAS: bool = False
    """Use a bias for each token of the vocabulary in the logits."""
    NORM: Literal["layer_norm", "rms_norm"] = "layer_norm"
    NORM_EPSILON: float = 1e-6
    POSITIONS: Literal[
        "rotary", "sinusoidal", "trainable", "none", "sinusoidal+rotary", "trainable+rotary"
    ] = "sinusoidal"
    """Positions; those of attention and of the embedding at once, as in Pax, with a plus sign."""
    ROTARY_BASE: float = 10_000.0
    """Base of the frequencies of rotary positions."""
    MAX_POSITIONS: int | None = None
    """Number of trainable positions; None for MAX_SEQ_LEN."""
    ATTENTION_LOGIT_CAP: float | None = None
    """Bound of the logits of attention; None for no bound."""
    QK_CLIP: float | None = None
    """Logit of attention beyond which query and key weights are scaled (100 in Kimi K2)."""
    SOFTMAX_LOGIT_CAP: float | None = None
    """Bound of the logits of tokens; None for no bound."""
    SOFTMAX_CHUNK_SIZE: int | None = None
    """Positions with logits in memory at a time; None for 1 GiB of logits per device."""
    ATTENTION_BACKEND: BackendName = "auto"
    DROPOUT_RATE: float = 0.0
    INPUT_DROPOUT_RATE: float | None = None
    """Dropout rate of embeddings; None for DROPOUT_RATE."""
    LAYER_INPUT_DROPOUT_RATE: float = 0.0
    """Dropout rate of the input of each layer, as Pax's `input_dropout_prob` of repeated layers."""
    SCALE_EMBEDDING: bool = False
    """Multiply embeddings by √MODEL_DIMS (Vaswani et al., 2017)."""
    WEIGHT_INIT: Literal["xavier", "xavier_last_axes", "fan_in"] = "xavier"
    """See `layerkit.base.weights.WeightInit`; `xavier_last_axes` is that of Praxis."""
    INIT_STD: float | None = None
    """Standard deviation of the normal initializer of all matrices; None for WEIGHT_INIT."""
    SCALE_RESIDUAL_INIT: bool = False
    """Divide the initial output weights of residual branches by √(2·NUM_LAYERS) (GPT-2)."""
    WIDTH_TRANSFER: int | None = None
    """MODEL_DIMS for which LEARNING_RATE was chosen; see docs/optimization.md. None: this one."""
    FPROP_DTYPE: str = "float32"
    """Dtype of the computation; weights are float32."""
    USE_REPEATED_LAYER: bool = True
    """Run layers as a scan over stacked weights instead of unrolled."""
    CHECKPOINT_POLICY: str = "none"
    """Rematerialization policy of `layerkit.ops.remat`, or Pax's name of one."""
    QUANTIZATION: Literal["fp8_delayed", "fp8_current", "mxfp8", "nvfp4", "int8"] | None = None
    """Format of the products of the layers, see docs/quantization.md; None for FPROP_DTYPE."""
    MAX_DECODE_STEPS: int = 64
    TEMPERATURE: float = 1.0
    EOS_ID: int | None = 1

    # Data.
    DATA_FORMAT: DataFormat = "seqio"
    """`seqio`: TFDS folders; `grain`: token records; `local_text`: Python's source; `synthetic`."""
    TFDS_DATA_DIR: str | None = None
    """Folder of TFDS data for `seqio`; None for the default of TensorFlow Datasets."""
    GRAIN_DATA_DIR: str | None = None
    """Folder of token records, or of LAMBADA's JSON lines, for `grain`."""
    VOCAB_PATH: str | None = None
    """A SentencePiece `.model`, or `bytes`; None for the environment variable VOCAB_PATH."""
    PACKED_INPUT: bool = True
    """Pack several documents into a training row; attention does not cross documents."""
    EVAL_NUM_BATCHES: int | None = 8
    """Batches per evaluation, which continues the last one; None reads the whole held-out split."""
    PERCORE_BATCH_SIZE: float = 8.0
    """Rows per device; a fraction if several devices share a row."""
    PROMPTS_PER_DEVICE: float = 0.0
    """Held-out rows per device that the model continues every DECODE_INTERVAL_STEPS; 0 for none."""
    PROMPT_LENGTH: int = 64
    """Maximum number of ids of such a row that the model reads first."""

    reduced_fields: ClassVar[Mapping[str, Any]] = {
        "NUM_LAYERS": 2,
        "MAX_POSITIONS": None,
        "MODEL_DIMS": 64,
        "HIDDEN_DIMS": 256,
        "NUM_HEADS": 4,
        "DIMS_PER_HEAD": 16,
        "FPROP_DTYPE": "float32",
    }

    model = decoder
    stack = layer_stack
    size_fields = width_fields

    def datasets(self) -> list[Config]:
        """Return configs of the training and the held-out input."""
        batches = self.EVAL_NUM_BATCHES
        held_out = self.read(name="heldout", is_training=False, eval_loop_num_batches=batches)
        return [self.read(name="train", is_training=True), held_out]

    def readers(self) -> Mapping[str, Callable[..., Config]]:
        """Return functions by DATA_FORMAT; see `published_data.corpora`."""
        # Imported here, since other data need none of it.
        from layerkit_experiments.recipes.published_data.corpora import TEXT_READERS

        return TEXT_READERS

    def read(self, **options: Any) -> Config:
        """Return the config of an input by the reader of DATA_FORMAT."""
        readers, name = self.readers(), self.DATA_FORMAT
        check_choice(None, tuple(readers), DATA_FORMAT=name)
        return readers[name](self, percore_batch_size=self.PERCORE_BATCH_SIZE, **options)

    def decode_datasets(self) -> list[Config]:
        """Return the config of prompts, the beginnings of held-out rows."""
        if not self.PROMPTS_PER_DEVICE:
            return []
        from layerkit_experiments.recipes.published_data.prompts import row_prompts  # few decode

        return [row_prompts(self, self.datasets()[-1])]

    def task(self) -> Config:
        """Return the config of the task."""
        train, model = train_config(self, self.learner()), quantized(self, self.model())
        task: Config = SingleTask.HParams.config(name="lm", model=model, train=train)
        if self.WIDTH_TRANSFER is None:
            return task
        from layerkit_experiments.recipes.width_transfer import WidthTransfer

        return WidthTransfer.apply(self, task)

    def validate(self) -> None:
        """Raise an error if decoding needs more learned positions than there are."""
        check_sizes(None, MAX_POSITIONS=self.MAX_POSITIONS)
        positions = self.MAX_POSITIONS or self.MAX_SEQ_LEN
        for prompts in self.decode_datasets() if "trainable" in self.POSITIONS else ():
            steps, left = self.MAX_DECODE_STEPS, positions - getattr(prompts, "prompt_length", 0)
            expected = f"at most {left}, since the model has {positions} positions"
            require(steps <= left, None, "MAX_DECODE_STEPS", steps, expected)

    def data_summary(self) -> str:
        """Return a short description of the training data."""
        source = self.DATA_FORMAT
        return "synthetic tokens" if source == "synthetic" else f"{self.tfds_name} ({source})"
