"""Qwen 3 (Qwen team, 2025): Llama with norms of queries and keys per head."""

from __future__ import annotations

from layerkit.interop.hugging_face.families.llama import llama_entries, llama_family, llama_network
from layerkit.interop.hugging_face.families.qwen2 import qwen_layers

QWEN3 = llama_family(
    "qwen3",
    "Qwen3ForCausalLM",
    network=lambda: llama_network(qk_norm=True),
    entries=(
        *llama_entries(kv_heads=32, head_dim=128, qk_norm=True, attention_bias=False),
        qwen_layers(),
    ),
)
