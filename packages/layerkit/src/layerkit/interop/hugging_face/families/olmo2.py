"""OLMo 2 (OLMo team, 2024): norms after each branch, and over all heads of queries and keys."""

from __future__ import annotations

from layerkit.interop.hugging_face.families.llama import llama_entries, llama_family, llama_network

OLMO2 = llama_family(
    "olmo2",
    "Olmo2ForCausalLM",
    network=lambda: llama_network(
        norm_policy="branch", qk_norm=True, attention={"qk_norm_over": "projection"}
    ),
    entries=llama_entries(epsilon=1e-5, qk_norm=True, attention_bias=False),
    token_ids={"eos_token_id": 50279, "pad_token_id": 1},
)
