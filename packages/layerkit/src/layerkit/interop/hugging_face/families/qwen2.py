"""Qwen 2 and 2.5 (Qwen team, 2024): Llama with biases of queries, keys and values."""

from __future__ import annotations

from layerkit.interop.hugging_face.families.llama import llama_entries, llama_family, llama_network
from layerkit.interop.hugging_face.keys import ConfigFile, Entry
from layerkit.interop.hugging_face.layer_types import FAR, NEAR, layer_types


def qwen_layers(*, first_near: int = 28) -> Entry:
    """Return the entry of Qwen's layers, which have a window from `max_window_layers` on.

    Args:
      first_near: Default of `max_window_layers`.
    """

    def kind(file: ConfigFile, layer: int) -> str:
        is_near = layer >= file.get("max_window_layers", first_near)
        return NEAR if is_near and file.get("use_sliding_window", default=False) else FAR

    return layer_types(kind, default_window=4096, has_switch=True)


QWEN2 = llama_family(
    "qwen2",
    "Qwen2ForCausalLM",
    network=lambda: llama_network(attention={"use_bias": True, "use_output_bias": False}),
    entries=(*llama_entries(kv_heads=32), qwen_layers()),
    # Attention in chunks beyond 262,144 tokens (Qwen2.5-1M), which Transformers does not have.
    neutral=frozenset({"dual_chunk_attention_config"}),
)
