"""Qwen 3.5 and 3.6 with images (Qwen team, 2026): Qwen3-Next with other joined projections.

The projections of delta nets are joined by kinds instead of heads. The feed-forward is dense, or
experts in all layers, which published folders join in one tensor. `qwen3_5` and `qwen3_5_moe` add
the tower of Qwen3-VL, whose learned positions are interpolated.
"""

from __future__ import annotations

import dataclasses
import math

from layerkit.config import Config
from layerkit.interop.hugging_face.expert_layers import EXPERTS, balance_loss, experts_key
from layerkit.interop.hugging_face.families.llama import (
    LAYER,
    LLAMA_ROWS,
    THEIR_LAYER,
    llama_family,
    llama_network,
)
from layerkit.interop.hugging_face.families.qwen2_moe import (
    EXPERT_ROWS,
    shared_expert,
    shared_expert_network,
)
from layerkit.interop.hugging_face.families.qwen3_next import (
    GATED_LAYERS,
    MTP,
    delta_net_layers,
    delta_net_projections,
    delta_net_rows,
)
from layerkit.interop.hugging_face.families.qwen_images import (
    TOKENS,
    add_images,
    image_entries,
    image_rows,
)
from layerkit.interop.hugging_face.family import Family, text_part
from layerkit.interop.hugging_face.keys import ConfigFile, Entry, fixed, key
from layerkit.interop.hugging_face.parts import nested
from layerkit.interop.hugging_face.rotary import rotary
from layerkit.interop.hugging_face.tensors import Row
from layerkit.layers.basic.normalizations import LayerNorm

_GATE = fixed("attn_output_gate", value=True)
# The state is always float32.
_NEUTRAL = frozenset({"mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"})
_PROJECTIONS = delta_net_projections(
    {
        "in_proj_qkv": ("query", "key", "value"),
        "in_proj_z": ("gate",),
        "in_proj_b": ("beta",),
        "in_proj_a": ("step",),
    }
)


def _dense_entries(**positions: Entry) -> tuple[Entry, ...]:
    return delta_net_layers(kv_heads=4, **positions), _GATE


def _mixture_entries(**positions: Entry) -> tuple[Entry, ...]:
    hidden_size = key("moe_intermediate_size", "hidden_dims", 512)
    return (
        delta_net_layers(kv_heads=2, hidden_size=hidden_size, **positions),
        _GATE,
        shared_expert(512),
        experts_key(256),
        key("num_experts_per_tok", EXPERTS + "num_experts_per_token", 8),
        fixed("norm_topk_prob", value=True),
        balance_loss(0.001),
    )


QWEN3_5_TEXT = llama_family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    network=lambda: llama_network(**GATED_LAYERS),
    entries=_dense_entries(),
    rows=delta_net_rows(LLAMA_ROWS, _PROJECTIONS),
    neutral=_NEUTRAL,
    buffers=MTP,
)

_EXPERTS, _MLP = THEIR_LAYER + "mlp.experts.", LAYER + "feed_forward/"

QWEN3_5_MOE_TEXT = llama_family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    network=lambda: shared_expert_network(**GATED_LAYERS),
    entries=_mixture_entries(),
    rows=delta_net_rows(EXPERT_ROWS, _PROJECTIONS),
    fused_rows=(
        *(
            Row(
                _EXPERTS + "gate_up_proj",
                _MLP + name,
                "experts out in -> experts in out",
                joined_axis=1,
            )
            for name in ("gate", "up")
        ),
        Row(_EXPERTS + "down_proj", _MLP + "down", "experts out in -> experts in out"),
    ),
    neutral=_NEUTRAL | {"intermediate_size", "mlp_only_layers"},
    buffers=MTP,
)


def _read_grid(file: ConfigFile, tower: Config) -> None:
    size = file.get("num_position_embeddings", 2304)
    side = math.isqrt(size)
    if not size or side**2 != size:
        raise file.invalid("num_position_embeddings", "the square of a number of rows")
    tower.position_grid = (side, side)


_GRID = Entry(_read_grid, lambda tower: {"num_position_embeddings": math.prod(tower.position_grid)})
_POSITIONS = rotary(default_fraction=0.25, sections=(11, 11, 10), section_order="interleaved")


def _with_images(text: Family, architecture: str, entries: tuple[Entry, ...]) -> Family:
    """Return the family of a text with images."""

    def network() -> Config:
        norm = LayerNorm.HParams.config(epsilon=1e-6, scale_offset=0.0)
        return add_images(text.network(), norm, aligns_corners=True)

    renamed = ("model.", "model.language_model.")
    model_type, shared = text.model_type.removesuffix("_text"), ("tie_word_embeddings",)
    part = text_part(
        text, model_type, prefix="model.", renamed=renamed, others="(?!)", neutral=TOKENS
    )
    maps = {"up": "linear_fc1", "down": "linear_fc2"}
    return dataclasses.replace(
        part,
        architecture=architecture,
        text_of=None,
        network=network,
        entries=(),
        model_entries=(
            nested("text_config", "lm_tpl", *entries, shared=shared, neutral=text.neutral),
            *image_entries(
                *(1152, 4304, 27, 16),
                act="gelu_pytorch_tanh",
                patch_size=16,
                image_token=248_056,
                entries=(_GRID,),
            ),
        ),
        neutral=TOKENS,
        rows=(
            *part.rows,
            *image_rows("model.visual.", maps, norm="norm", maps=("linear_fc1", "linear_fc2")),
        ),
        counts=("text_config.num_hidden_layers", "vision_config.depth"),
    )


QWEN3_5 = _with_images(
    QWEN3_5_TEXT, "Qwen3_5ForConditionalGeneration", _dense_entries(positions=_POSITIONS)
)
QWEN3_5_MOE = _with_images(
    QWEN3_5_MOE_TEXT, "Qwen3_5MoeForConditionalGeneration", _mixture_entries(positions=_POSITIONS)
)
