"""Models with open weights, trained from scratch with the values that their authors publish.

A docstring names the source of the values, and what is not published, for which batch and rates of
LLaMA 2 stand in. Each class is the main stage of pre-training, without the longer contexts and the
annealing that follow. Data are C4; `DATA_FORMAT="grain"` reads the tokens of any tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from layerkit.config import Config
from layerkit.layers import MultiTokenPrediction, SiLU
from layerkit_experiments.recipes.experts import MixtureOfExperts, add_experts, mixture
from layerkit_experiments.recipes.language_model import (
    REDUCED_TEXT,
    LmExperiment,
    alternate_windows,
    decoder,
    untied_decoder,
)
from layerkit_experiments.recipes.latent_attention import use_latent_attention
from layerkit_experiments.recipes.meshes import EXPERT_AXES

_REDUCED = {**REDUCED_TEXT, "INIT_STD": None}


def balanced_mixture(fields: Any) -> Config:
    """Return the config of a LanguageModel with experts that balance all choices of a token.

    Args:
      fields: Experiment with the fields of `MixtureOfExperts`.
    """
    model = untied_decoder(fields)
    experts = mixture(fields, model).set(balance_all_choices=True)
    return add_experts(fields, model, experts)


class OpenLm(LmExperiment, abstract=True):
    """Rotary decoder with RMS norms, SwiGLU and an untied embedding, in bfloat16."""

    tags: ClassVar[tuple[str, ...]] = ("multislice",)

    NORM = "rms_norm"
    POSITIONS = "rotary"
    ACTIVATION = "silu"
    USE_GATED_ACTIVATION = True
    INIT_STD = 0.02
    FPROP_DTYPE = "bfloat16"
    CHECKPOINT_POLICY = "full"
    EOS_ID = None
    MAX_SEQ_LEN = 4096
    LEARNING_RATE = 3e-4
    WARMUP_STEPS = 2000
    MAX_STEPS = 1_000_000

    reduced_fields: ClassVar[Mapping[str, Any]] = _REDUCED
    model = untied_decoder


class Qwen3_8B(OpenLm):  # noqa: N801 - the name of the size
    """Qwen 3 8B on 16 nodes of 8 GPUs (h100x128), fully sharded.

    Sizes, lengths and the 30T tokens of the first stage are those of the report (Qwen team, 2025,
    arXiv:2505.09388), which names no batch, rate or initial weights.
    """

    NUM_LAYERS = 36
    MODEL_DIMS = 4096
    HIDDEN_DIMS = 12288
    NUM_HEADS = 32
    NUM_KV_HEADS = 8
    DIMS_PER_HEAD = 128
    QK_NORM = True
    VOCAB_SIZE = 151_936
    MAX_STEPS = 7_150_000
    PERCORE_BATCH_SIZE = 8.0
    ICI_MESH_SHAPE = [1, 8, 1]
    DCN_MESH_SHAPE = [1, 16, 1]

    reduced_fields: ClassVar[Mapping[str, Any]] = {"NUM_KV_HEADS": 2}


class Qwen3_30B_A3B(MixtureOfExperts, OpenLm):  # noqa: N801
    """Qwen 3 30B-A3B on 16 nodes, whose 8 GPUs share the experts (h100x128).

    The source is that of `Qwen3_8B`; the weight of the balance is that of the configuration.
    """

    NUM_LAYERS = 48
    MODEL_DIMS = 2048
    HIDDEN_DIMS = 768
    NUM_HEADS = 32
    NUM_KV_HEADS = 4
    DIMS_PER_HEAD = 128
    QK_NORM = True
    VOCAB_SIZE = 151_936
    NUM_EXPERTS = 128
    NUM_EXPERTS_PER_TOKEN = 8
    USE_GATED_EXPERTS = True
    LOAD_BALANCE_WEIGHT = 0.001 * 8 / 48  # 0.001 for the sum of 8 choices, over all 48 layers
    MAX_STEPS = 7_150_000
    PERCORE_BATCH_SIZE = 8.0
    ICI_MESH_SHAPE = [1, 1, 8, 1]
    DCN_MESH_SHAPE = [1, 16, 1, 1]

    reduced_fields: ClassVar[Mapping[str, Any]] = {"NUM_KV_HEADS": 2, "NUM_EXPERTS_PER_TOKEN": 2}
    mesh_axes = EXPERT_AXES
    model = balanced_mixture


class Mixtral8x7B(MixtureOfExperts, OpenLm):
    """Mixtral 8x7B on 16 nodes, whose 8 GPUs share the experts (h100x128).

    Sizes and the length of rows are those of the report (Jiang et al., 2024, arXiv:2401.04088), the
    base of the positions and the weight of the balance those of the configuration. Batch, rates and
    the number of tokens are not published.
    """

    NUM_LAYERS = 32
    MODEL_DIMS = 4096
    HIDDEN_DIMS = 14336
    NUM_HEADS = 32
    NUM_KV_HEADS = 8
    NORM_EPSILON = 1e-5
    ROTARY_BASE = 1e6
    VOCAB_SIZE = 32_000
    MAX_SEQ_LEN = 32_768
    USE_GATED_EXPERTS = True
    LOAD_BALANCE_WEIGHT = 0.02 * 2 / 32  # 0.02 for the sum of 2 choices, over all 32 layers
    MAX_STEPS = 500_000
    PERCORE_BATCH_SIZE = 1.0
    ICI_MESH_SHAPE = [1, 1, 8, 1]
    DCN_MESH_SHAPE = [1, 16, 1, 1]

    reduced_fields: ClassVar[Mapping[str, Any]] = {"NUM_KV_HEADS": 2}
    mesh_axes = EXPERT_AXES
    model = balanced_mixture


class DeepSeekV3(MixtureOfExperts, OpenLm):
    """DeepSeek-V3 671B on 256 nodes of 8 GPUs, its experts over 64 pairs (h100x2048).

    Values are those of the report (DeepSeek-AI, 2024, arXiv:2412.19437): 2.2e-4 for 10T of 14.8T
    tokens, then a cosine to a tenth over 4.3T; 15,360 rows, to which batches grow within 469B
    tokens. The report has 16 stages of a pipeline on 2048 H800, products in fp8, a small loss that
    balances each row (here the batch), and at the end a rate of 7.3e-6, fixed biases of the router,
    and a weight of 0.1 (here 0.3) of the second token that a further module predicts.
    """

    LATENT_DIMS: int = 512
    """Size of the latent of keys and values."""
    QUERY_LATENT_DIMS: int | None = 1536
    """Size of the latent of queries."""
    PLAIN_DIMS_PER_HEAD: int = 128
    """Coordinates of queries and keys without position, and the size of values."""
    ROTARY_DIMS_PER_HEAD: int = 64
    """Rotated coordinates of queries and keys."""

    NUM_LAYERS = 61
    MODEL_DIMS = 7168
    HIDDEN_DIMS = 2048
    NUM_HEADS = 128
    POSITIONS = "none"  # type: ignore[assignment]
    VOCAB_SIZE = 129_280
    INIT_STD = 0.006
    NUM_EXPERTS = 256
    NUM_EXPERTS_PER_TOKEN = 8
    NUM_SHARED_EXPERTS = 1
    USE_GATED_EXPERTS = True
    LOAD_BALANCE_WEIGHT = 1e-4
    LEARNING_RATE = 2.2e-4
    DECAY_START = 158_946
    DECAY_END = 227_293
    MAX_STEPS = 235_240
    PERCORE_BATCH_SIZE = 7.5
    GRADIENT_ACCUMULATION_STEPS = 5
    SEQUENCE_PARALLEL = True
    ICI_MESH_SHAPE = [1, 1, 4, 2]
    DCN_MESH_SHAPE = [1, 16, 16, 1]

    reduced_fields: ClassVar[Mapping[str, Any]] = {
        "LATENT_DIMS": 16,
        "QUERY_LATENT_DIMS": 32,
        "PLAIN_DIMS_PER_HEAD": 8,
        "ROTARY_DIMS_PER_HEAD": 8,
        "DIMS_PER_HEAD": None,
        "NUM_EXPERTS": 16,
        "NUM_EXPERTS_PER_TOKEN": 2,
    }
    mesh_axes = EXPERT_AXES

    def size_fields(self, size: int) -> dict[str, Any]:
        """Return no fields, since no rule of a size scales the latents."""
        del size
        return {}

    def model(self) -> Config:
        """Return the config of the LanguageModel: 3 dense layers, 9 times as wide as an expert."""
        model = use_latent_attention(self, untied_decoder(self))
        dense = model.lm_tpl.stack_tpl.layer_tpl.clone(hidden_dims=9 * self.HIDDEN_DIMS)
        experts = mixture(self, model).set(balance_all_choices=True, exchange_buffer_factor=1.5)
        experts.router_tpl.set(
            score="sigmoid",
            weight_scale=2.5,
            use_score_bias=True,
            score_bias_rate=0.001,
            num_expert_groups=8,
            num_chosen_groups=4,
        )
        stack = add_experts(self, model, experts).lm_tpl.stack_tpl
        stack.layer_tpl.hidden_dims, model.lm_tpl.hidden_dims = self.HIDDEN_DIMS, 0
        stack.first_tpls = (dense,) * min(3, self.NUM_LAYERS - 1)
        model.lm_tpl.mtp_tpl = MultiTokenPrediction.HParams.config(loss_weight=0.3)
        return model


class GptOss(MixtureOfExperts, LmExperiment, abstract=True):
    """Windows in every other layer, sinks, and experts with biases and bounds, before YaRN.

    Sizes are those of the model card (OpenAI, 2025, arXiv:2508.10925), which says nothing about
    batch, rates or the number of tokens.
    """

    tags: ClassVar[tuple[str, ...]] = ("multislice",)

    WINDOW_PERIOD: int = 2
    """Period of the layers, the last of which has no window."""
    EXCHANGE_BUFFER_FACTOR: float | None = None
    """Rows for which a device has room in training, relative to those that balanced routing sends;
    None for all. Choices beyond them add nothing."""

    MODEL_DIMS = 2880
    HIDDEN_DIMS = 2880
    NUM_HEADS = 64
    NUM_KV_HEADS = 8
    DIMS_PER_HEAD = 64
    NORM = "rms_norm"
    NORM_EPSILON = 1e-5
    POSITIONS = "rotary"
    ROTARY_BASE = 150_000.0
    WINDOW = 128
    ATTENTION_BIAS = True
    VOCAB_SIZE = 201_088
    NUM_EXPERTS_PER_TOKEN = 4
    USE_GATED_EXPERTS = True
    INIT_STD = 0.02
    FPROP_DTYPE = "bfloat16"
    CHECKPOINT_POLICY = "full"
    EOS_ID = None
    MAX_SEQ_LEN = 4096
    LEARNING_RATE = 3e-4
    WARMUP_STEPS = 2000
    MAX_STEPS = 500_000

    reduced_fields: ClassVar[Mapping[str, Any]] = {
        **_REDUCED,
        "NUM_KV_HEADS": 2,
        "NUM_EXPERTS_PER_TOKEN": 2,
        "WINDOW": 16,
    }
    mesh_axes = EXPERT_AXES

    def model(self) -> Config:
        """Return the config of the LanguageModel."""
        model = untied_decoder(self)
        experts = mixture(self, model).set(
            use_bias=True,
            gate_limit=7.0,
            up_offset=1.0,
            activation_tpl=SiLU.HParams.config(beta=1.702),
            balance_all_choices=True,
            exchange_buffer_factor=self.EXCHANGE_BUFFER_FACTOR,
        )
        experts.router_tpl.use_bias = True
        model.lm_tpl.stack_tpl.layer_tpl.attention_tpl.use_sinks = True
        return alternate_windows(self, add_experts(self, model, experts))


class GptOss20B(GptOss):
    """gpt-oss-20b on 16 nodes, whose 8 GPUs share the experts (h100x128)."""

    NUM_LAYERS = 24
    NUM_EXPERTS = 32
    PERCORE_BATCH_SIZE = 8.0
    ICI_MESH_SHAPE = [1, 1, 8, 1]
    DCN_MESH_SHAPE = [1, 16, 1, 1]


class GptOss120B(GptOss):
    """gpt-oss-120b on 64 nodes, whose 8 GPUs share the experts (h100x512)."""

    NUM_LAYERS = 36
    NUM_EXPERTS = 128
    LEARNING_RATE = 1.5e-4
    PERCORE_BATCH_SIZE = 2.0
    ICI_MESH_SHAPE = [1, 1, 8, 1]
    DCN_MESH_SHAPE = [1, 64, 1, 1]


class Olmo3_7B(OpenLm):  # noqa: N801
    """OLMo 3 7B on 32 nodes of 8 GPUs (h100x256), fully sharded.

    Values are those of `OLMo-3-1025-7B-pretrain-1.py` in allenai/OLMo-core: 512 rows of 8192
    tokens, and a cosine over 5T tokens, which its second part stretches to 7T. It pads the
    vocabulary to 100,352 and excludes the embedding from weight decay.
    """

    WINDOW_PERIOD: int = 4
    """Period of the layers, the last of which has no window."""
    Z_LOSS_WEIGHT: float = 1e-5
    """Weight of the z-loss of the softmax."""

    NUM_LAYERS = 32
    MODEL_DIMS = 4096
    HIDDEN_DIMS = 11_008
    NUM_HEADS = 32
    DIMS_PER_HEAD = 128
    QK_NORM = True
    WINDOW = 4096
    ROTARY_BASE = 500_000.0
    VOCAB_SIZE = 100_278
    MAX_SEQ_LEN = 8192
    MAX_STEPS = 1_192_092
    PERCORE_BATCH_SIZE = 2.0
    ICI_MESH_SHAPE = [1, 8, 1]
    DCN_MESH_SHAPE = [1, 32, 1]

    reduced_fields: ClassVar[Mapping[str, Any]] = {"WINDOW": 16}

    def model(self) -> Config:
        """Return the config of the LanguageModel, with norms after branches."""
        model = untied_decoder(self)
        layer = model.lm_tpl.stack_tpl.layer_tpl
        layer.norm_policy = "branch"
        layer.attention_tpl.qk_norm_over = "projection"
        model.lm_tpl.softmax_tpl.z_loss_weight = self.Z_LOSS_WEIGHT
        return alternate_windows(self, model)


class Gemma3_4B(OpenLm):  # noqa: N801
    """Gemma 3 4B, text, on 16 nodes of 8 GPUs (h100x128), fully sharded.

    Sizes, the 4T tokens and rows of 32,768 are those of the report (Gemma team, 2025,
    arXiv:2503.19786), which names no batch, rate or initial weights. Its run was a distillation on
    2048 TPU v5e.
    """

    WINDOW_PERIOD: int = 6
    """Period of the layers, the last of which has no window."""
    WINDOW_ROTARY_BASE: float = 10_000.0
    """Base of the frequencies of rotary positions in layers with a window."""

    NUM_LAYERS = 34
    MODEL_DIMS = 2560
    HIDDEN_DIMS = 10_240
    NUM_HEADS = 8
    NUM_KV_HEADS = 4
    DIMS_PER_HEAD = 256
    QK_NORM = True
    WINDOW = 1024
    ROTARY_BASE = 1_000_000.0
    ACTIVATION = "gelu"  # type: ignore[assignment]
    SCALE_EMBEDDING = True
    VOCAB_SIZE = 262_144
    MAX_SEQ_LEN = 32_768
    MAX_STEPS = 953_674
    PERCORE_BATCH_SIZE = 1.0
    ICI_MESH_SHAPE = [1, 8, 1]
    DCN_MESH_SHAPE = [1, 16, 1]

    reduced_fields: ClassVar[Mapping[str, Any]] = {"NUM_KV_HEADS": 2, "WINDOW": 16}

    def model(self) -> Config:
        """Return the config of the LanguageModel, with norms before and after branches."""
        model = decoder(self)
        layer = model.lm_tpl.stack_tpl.layer_tpl
        layer.norm_policy = "pre_post"
        attention = layer.attention_tpl.set(logit_scale=self.DIMS_PER_HEAD**-0.5)
        _set_offsets(1.0, model.lm_tpl.final_norm_tpl, layer.norm_tpl, attention.qk_norm_tpl)
        alternate_windows(self, model)
        for near in model.lm_tpl.stack_tpl.block_tpls[:-1]:
            near.attention_tpl.rotary_tpl.max_timescale = self.WINDOW_ROTARY_BASE
        return model


class Gpt2_124M(LmExperiment):  # noqa: N801
    """GPT-2 124M, the baseline of the speed runs of nanoGPT, on a node of 8 GPUs (h100x8).

    Values are those of llm.c (karpathy/llm.c, discussion 481), which reaches a loss of about 3.29
    after 10B tokens of FineWeb. nanoGPT's own `config/train_gpt2.py` trains 600,000 steps on
    OpenWebText with a warmup of 2000 and a cosine to a tenth.
    """

    NUM_LAYERS = 12
    MODEL_DIMS = 768
    NUM_HEADS = 12
    NORM_EPSILON = 1e-5
    ACTIVATION = "gelu"
    POSITIONS = "trainable"
    ATTENTION_BIAS = True
    FEED_FORWARD_BIAS = True
    INIT_STD = 0.02
    SCALE_RESIDUAL_INIT = True
    FPROP_DTYPE = "bfloat16"
    CHECKPOINT_POLICY = "full"
    EOS_ID = None
    VOCAB_SIZE = 50_257
    MAX_SEQ_LEN = 1024
    PERCORE_BATCH_SIZE = 64.0
    ICI_MESH_SHAPE = [8, 1, 1]
    LEARNING_RATE = 6e-4
    MIN_LEARNING_RATE_RATIO = 0.0
    WARMUP_STEPS = 700
    MAX_STEPS = 19_560
    EVAL_INTERVAL_STEPS = 250

    reduced_fields: ClassVar[Mapping[str, Any]] = _REDUCED

    def model(self) -> Config:
        """Return the config of the LanguageModel, whose norms store scales as GPT-2 does."""
        model = decoder(self)
        _set_offsets(0.0, model.lm_tpl.final_norm_tpl, model.lm_tpl.stack_tpl.layer_tpl.norm_tpl)
        return model


def _set_offsets(offset: float, *norms: Config) -> None:
    for norm in norms:
        norm.scale_offset = offset
