"""OLMoE (Muennighoff et al., 2024): experts, and norms over all heads of queries and keys."""

from __future__ import annotations

from layerkit.interop.hugging_face.families.llama import EQUAL_HEADS, llama_entries, llama_family
from layerkit.interop.hugging_face.families.mixtral import mixture_network
from layerkit.interop.hugging_face.families.qwen2_moe import EXPERT_ROWS, routing_entries

OLMOE = llama_family(
    "olmoe",
    "OlmoeForCausalLM",
    network=lambda: mixture_network(qk_norm=True, attention={"qk_norm_over": "projection"}),
    entries=(
        *llama_entries(epsilon=1e-5, qk_norm=True, attention_bias=False),
        EQUAL_HEADS,  # The norms of Transformers have no other size.
        *routing_entries(experts=64, choices=8, balance=0.01),
    ),
    rows=EXPERT_ROWS,
    token_ids={"eos_token_id": 50279, "pad_token_id": 1},
)
