"""Mistral (Jiang et al., 2023): Llama with sliding-window attention."""

from __future__ import annotations

from layerkit.interop.hugging_face.families.llama import llama_entries, llama_family
from layerkit.interop.hugging_face.keys import key

MISTRAL = llama_family(
    "mistral",
    "MistralForCausalLM",
    entries=(
        *llama_entries(kv_heads=8),
        key("sliding_window", "layer.attention_tpl.window", 4096),
    ),
)
