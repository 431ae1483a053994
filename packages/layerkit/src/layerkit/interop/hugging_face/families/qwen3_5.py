"""Qwen 3.5 and 3.6 text (Qwen team, 2026): Qwen3-Next with other joined projections.

The projections of delta nets are joined by kinds instead of heads. The feed-forward is dense, or
experts in all layers, which published folders join in one tensor. The text of `qwen3_5` and
`qwen3_5_moe`, which also read images, is exported as `qwen3_5_text` and `qwen3_5_moe_text`.
"""

from __future__ import annotations

from typing import Any

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
from layerkit.interop.hugging_face.family import text_part
from layerkit.interop.hugging_face.keys import fixed, key
from layerkit.interop.hugging_face.tensors import Row

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

QWEN3_5_TEXT = llama_family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    network=lambda: llama_network(**GATED_LAYERS),
    entries=(delta_net_layers(kv_heads=4), _GATE),
    rows=delta_net_rows(LLAMA_ROWS, _PROJECTIONS),
    neutral=_NEUTRAL,
    buffers=MTP,
)

_EXPERTS, _MLP = THEIR_LAYER + "mlp.experts.", LAYER + "feed_forward/"

QWEN3_5_MOE_TEXT = llama_family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    network=lambda: shared_expert_network(**GATED_LAYERS),
    entries=(
        delta_net_layers(kv_heads=2, hidden_size=key("moe_intermediate_size", "hidden_dims", 512)),
        _GATE,
        shared_expert(512),
        experts_key(256),
        key("num_experts_per_tok", EXPERTS + "num_experts_per_token", 8),
        fixed("norm_topk_prob", value=True),
        balance_loss(0.001),
    ),
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

_IMAGES: dict[str, Any] = {
    "prefix": "model.",
    "renamed": ("model.", "model.language_model."),
    "others": r"^model\.visual\.",
    "neutral": frozenset(
        {f"{name}_token_id" for name in ("image", "video", "vision_start", "vision_end")}
    ),
}
QWEN3_5 = text_part(QWEN3_5_TEXT, "qwen3_5", **_IMAGES)
QWEN3_5_MOE = text_part(QWEN3_5_MOE_TEXT, "qwen3_5_moe", **_IMAGES)
