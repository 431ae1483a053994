"""Mixtral (Jiang et al., 2024): Mistral with a mixture of experts as feed-forward.

`router_jitter_noise` adds noise to the router's inputs here, and also to the experts' in
Transformers.
"""

from __future__ import annotations

from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.expert_layers import EXPERTS, balance_loss
from layerkit.interop.hugging_face.families.llama import (
    llama_entries,
    llama_family,
    llama_network,
    llama_rows,
)
from layerkit.interop.hugging_face.keys import key
from layerkit.interop.hugging_face.rotary import rotary
from layerkit.layers.moe.token_choice import MoeFeedForward


def mixture_network(**fields: Any) -> Config:
    """Return the network of `llama_network` with experts; `fields` are those of that function."""
    # The loss of Transformers balances all choices of a token. It has no z-loss.
    experts: Config = MoeFeedForward.HParams.config(balance_all_choices=True, router_z_weight=0.0)
    return llama_network(feed_forward_tpl=experts, **fields)


_MOE, _OURS = "block_sparse_moe.", "feed_forward/"

MIXTRAL = llama_family(
    "mixtral",
    "MixtralForCausalLM",
    network=mixture_network,
    entries=(
        *llama_entries(kv_heads=8, epsilon=1e-5, positions=rotary(1_000_000.0)),
        key("sliding_window", "layer.attention_tpl.window", None),
        key("num_local_experts", EXPERTS + "num_experts", 8),
        key("num_experts_per_tok", EXPERTS + "num_experts_per_token", 2),
        balance_loss(0.001),
        key("router_jitter_noise", EXPERTS + "router_tpl.jitter", 0.0),
    ),
    rows=llama_rows(
        {
            _OURS + "router": _MOE + "gate",
            _OURS + "gate": _MOE + "experts.{expert}.w1",
            _OURS + "down": _MOE + "experts.{expert}.w2",
            _OURS + "up": _MOE + "experts.{expert}.w3",
        }
    ),
)
