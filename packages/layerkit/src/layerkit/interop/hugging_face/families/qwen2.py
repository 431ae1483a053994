"""Qwen 2 and 2.5 (Qwen team, 2024): Llama with biases of queries, keys and values."""

from __future__ import annotations

from layerkit.config import Config
from layerkit.interop.hugging_face.families.llama import (
    llama_entries,
    llama_family,
    llama_network,
)
from layerkit.interop.hugging_face.keys import ConfigFile
from layerkit.interop.hugging_face.layer_types import FAR, NEAR, LayerTypes
from layerkit.interop.hugging_face.parts import Activation, head_dim
from layerkit.interop.hugging_face.rotary import Rotary


def _network() -> Config:
    network = llama_network()
    network.stack_tpl.layer_tpl.attention_tpl.set(use_bias=True, use_output_bias=False)
    return network


def near_at_the_end(file: ConfigFile, layer: int) -> str:
    """Return the type of a layer; Qwen's layers have a window from `max_window_layers` on."""
    is_near = layer >= file.get("max_window_layers", 28)
    return NEAR if is_near and file.get("use_sliding_window", default=False) else FAR


QWEN2 = llama_family(
    "qwen2",
    "Qwen2ForCausalLM",
    network=_network,
    entries=(
        *llama_entries(kv_heads=32),
        head_dim(),
        Rotary(),
        Activation("hidden_act", "silu"),
        LayerTypes(near_at_the_end, default_window=4096, has_switch=True),
    ),
    # Attention in chunks beyond 262,144 tokens (Qwen2.5-1M), which Transformers does not have.
    neutral=frozenset({"dual_chunk_attention_config"}),
)
