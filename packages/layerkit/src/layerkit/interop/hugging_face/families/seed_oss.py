"""Seed-OSS (ByteDance Seed team, 2025): Llama with biases of queries, keys and values."""

from __future__ import annotations

from layerkit.interop.hugging_face.families.llama import MLP_BIAS, llama_entries, llama_family
from layerkit.interop.hugging_face.keys import key

SEED_OSS = llama_family(
    "seed_oss",
    "SeedOssForCausalLM",
    entries=(
        *llama_entries(kv_heads=8, head_dim=128, attention_bias=True),
        key("attention_out_bias", "layer.attention_tpl.use_output_bias", default=False),
        MLP_BIAS,
        key("attention_dropout", "layer.attention_tpl.dropout_rate", 0.1),
        key("residual_dropout", "layer.dropout_rate", 0.1),
    ),
)
