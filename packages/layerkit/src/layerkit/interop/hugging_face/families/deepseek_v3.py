"""DeepSeek V3, R1 and Kimi K2 (DeepSeek-AI, 2024): latent attention, and a sigmoid router.

The router (arXiv:2412.19437) chooses among groups of experts by scores with a bias, which training
moves only with `score_bias_rate`. The loss of `aux_loss_alpha` is that of a batch here and that of
a row in DeepSeek's code (`seq_aux`).
"""

from __future__ import annotations

import dataclasses

from layerkit.interop.hugging_face.expert_layers import EXPERTS
from layerkit.interop.hugging_face.families.latent_attention import (
    LATENT_NEUTRAL,
    LATENT_ROWS,
    ROUTER,
    latent_entries,
    latent_network,
)
from layerkit.interop.hugging_face.families.llama import llama_family
from layerkit.interop.hugging_face.families.multi_token import (
    EXTRA_LAYERS,
    MULTI_TOKEN,
    add_module_rows,
)
from layerkit.interop.hugging_face.keys import Entry, fixed, key


def sigmoid_routing(
    *, hidden: int, experts: int, scale: float, groups: int, chosen: int
) -> tuple[Entry, ...]:
    """Return the keys of the experts of DeepSeek V3 and GLM; the arguments are the defaults."""
    return (
        key("moe_intermediate_size", "hidden_dims", hidden),
        key("n_routed_experts", EXPERTS + "num_experts", experts),
        key("n_shared_experts", EXPERTS + "num_shared_experts", 1),
        key("num_experts_per_tok", EXPERTS + "num_experts_per_token", 8),
        key("routed_scaling_factor", ROUTER + "weight_scale", scale),
        key("norm_topk_prob", ROUTER + "renormalize", default=True),
        key("n_group", ROUTER + "num_expert_groups", groups),
        key("topk_group", ROUTER + "num_chosen_groups", chosen),
    )


DEEPSEEK_V3 = llama_family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    network=lambda: latent_network(score="sigmoid", use_score_bias=True),
    entries=(
        fixed("scoring_func", "sigmoid"),
        fixed("topk_method", "noaux_tc"),
        *latent_entries(
            3,
            sigmoid_routing(hidden=2048, experts=256, scale=2.5, groups=8, chosen=4),
        ),
        MULTI_TOKEN,
    ),
    rows=add_module_rows(LATENT_ROWS),
    neutral=LATENT_NEUTRAL,
    extra_layers=EXTRA_LAYERS,
)

# The same, under another name. Transformers loads it as `deepseek_v3`.
KIMI_K2 = dataclasses.replace(DEEPSEEK_V3, model_type="kimi_k2")
