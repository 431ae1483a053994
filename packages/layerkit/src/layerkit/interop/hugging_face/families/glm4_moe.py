"""GLM-4.5 to 4.7 and GLM-4.5-Air (GLM-4.5 team, 2025): the experts of DeepSeek V3, partial rotary.

Half of each head is rotated, and queries and keys may have norms (arXiv:2508.06471). The published
folders also have a layer for multi-token prediction.
"""

from __future__ import annotations

from layerkit.config import Config
from layerkit.interop.hugging_face.expert_layers import expert_layers
from layerkit.interop.hugging_face.families.deepseek_v3 import sigmoid_routing
from layerkit.interop.hugging_face.families.latent_attention import DEEPSEEK_EXPERT_ROWS
from layerkit.interop.hugging_face.families.llama import llama_entries, llama_family
from layerkit.interop.hugging_face.families.mixtral import mixture_network
from layerkit.interop.hugging_face.families.multi_token import (
    EXTRA_LAYERS,
    MULTI_TOKEN,
    add_module_rows,
)
from layerkit.interop.hugging_face.keys import get_field
from layerkit.interop.hugging_face.parts import qk_norms
from layerkit.interop.hugging_face.rotary import rotary


def _network() -> Config:
    network = mixture_network(attention={"use_output_bias": False})
    experts = get_field(network, "layer.feed_forward_tpl")
    # The bias of the choice balances the experts.
    experts.load_balance_weight = 0.0
    experts.router_tpl.set(score="sigmoid", use_score_bias=True)
    return network


GLM4_MOE = llama_family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    network=_network,
    entries=(
        *llama_entries(
            kv_heads=8,
            epsilon=1e-5,
            attention_bias=False,
            positions=rotary(default_fraction=0.5),
        ),
        qk_norms("use_qk_norm"),
        MULTI_TOKEN,
        expert_layers(
            sigmoid_routing(hidden=1408, experts=128, scale=1.0, groups=1, chosen=1),
            is_dense=lambda file, layer: layer < file.get("first_k_dense_replace", 1),
            write_dense=lambda layers: {"first_k_dense_replace": len(layers)},
        ),
    ),
    rows=add_module_rows(DEEPSEEK_EXPERT_ROWS),
    extra_layers=EXTRA_LAYERS,
)
