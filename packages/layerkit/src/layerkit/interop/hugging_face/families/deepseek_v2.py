"""DeepSeek V2 and V2-Lite (DeepSeek-AI, 2024): DeepSeek V3 with a softmax router.

The router (arXiv:2405.04434) has no bias, and its weights are not renormalized. It chooses groups
of experts by their best score with `group_limited_greedy`, and has no groups with `greedy`.
"""

from __future__ import annotations

from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.expert_layers import EXPERTS
from layerkit.interop.hugging_face.families.latent_attention import (
    LATENT_NEUTRAL,
    LATENT_ROWS,
    ROUTER,
    latent_entries,
    latent_network,
)
from layerkit.interop.hugging_face.families.llama import llama_family
from layerkit.interop.hugging_face.keys import ConfigFile, Entry, fixed, get_field, key

_GREEDY, _LIMITED = "greedy", "group_limited_greedy"


def _read_groups(file: ConfigFile, network: Config) -> None:
    method = file.get("topk_method", _GREEDY)
    if method not in (_GREEDY, _LIMITED):
        raise file.invalid("topk_method", choices=(_GREEDY, _LIMITED))
    groups, chosen = file.get("n_group", None), file.get("topk_group", None)
    if method == _LIMITED:
        router = get_field(network, EXPERTS + "router_tpl")
        router.set(num_expert_groups=groups, num_chosen_groups=chosen, num_group_scores=1)


def _write_groups(network: Config) -> dict[str, Any]:
    router = get_field(network, EXPERTS + "router_tpl")
    is_limited = router.num_chosen_groups is not None
    return {
        "topk_method": _LIMITED if is_limited else _GREEDY,
        "n_group": router.num_expert_groups,
        "topk_group": router.num_chosen_groups if is_limited else 1,
    }


DEEPSEEK_V2 = llama_family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    network=lambda: latent_network(renormalize=False),
    entries=(
        fixed("scoring_func", "softmax"),
        # Transformers ignores it. DeepSeek's code has either renormalized or scaled weights.
        fixed("norm_topk_prob", value=False),
        *latent_entries(
            0,
            (
                key("moe_intermediate_size", "hidden_dims", 1407),
                key("n_routed_experts", EXPERTS + "num_experts", 64),
                key("n_shared_experts", EXPERTS + "num_shared_experts", 2),
                key("num_experts_per_tok", EXPERTS + "num_experts_per_token"),
                key("routed_scaling_factor", ROUTER + "weight_scale", 1.0),
                Entry(_read_groups, _write_groups),
            ),
        ),
        fixed("rope_interleave", value=True),
    ),
    rows=LATENT_ROWS,
    neutral=LATENT_NEUTRAL,
)
