"""Qwen 3, dense (Qwen team, 2025): Llama with norms of queries and keys per head."""

from __future__ import annotations

from layerkit.config import Config
from layerkit.interop.hugging_face.families.llama import (
    LLAMA_ROWS,
    llama_entries,
    llama_family,
    llama_network,
    qk_norm_rows,
)
from layerkit.interop.hugging_face.families.qwen2 import near_at_the_end
from layerkit.interop.hugging_face.keys import Key
from layerkit.interop.hugging_face.layer_types import LayerTypes
from layerkit.interop.hugging_face.parts import Activation, head_dim
from layerkit.interop.hugging_face.rotary import Rotary
from layerkit.layers.basic.normalizations import RmsNorm


def _network() -> Config:
    network = llama_network()
    network.stack_tpl.layer_tpl.attention_tpl.set(
        qk_norm_tpl=RmsNorm.HParams.config(), qk_norm_before_rotary=True
    )
    return network


QWEN3 = llama_family(
    "qwen3",
    "Qwen3ForCausalLM",
    network=_network,
    entries=(
        *llama_entries(kv_heads=32, more_norms=("layer.attention_tpl.qk_norm_tpl",)),
        head_dim(128),
        Rotary(),
        Activation("hidden_act", "silu"),
        Key("attention_bias", "layer.attention_tpl.use_bias", default=False),
        LayerTypes(near_at_the_end, default_window=4096, has_switch=True),
    ),
    rows=(*LLAMA_ROWS, *qk_norm_rows()),
)
