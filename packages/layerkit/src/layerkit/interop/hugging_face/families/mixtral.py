"""Mixtral (Jiang et al., 2024): Mistral with a mixture of experts as feed-forward.

Transformers adds one load-balancing loss over the choices of all layers to the training loss:
coefficient · E · Σ_e (choices of e per token) · (mean probability of e). Imbalances of different
layers may cancel there. Here each layer has a loss, and the coefficient is divided among the
layers. The sum is equal for one layer and for balanced experts, and at least as large otherwise.
Transformers adds the loss only with `output_router_logits`. Here training always adds it, unless
`load_balance_weight` is 0.

`router_jitter_noise` adds noise to the router's inputs here, and also to the experts' in
Transformers.
"""

from __future__ import annotations

from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.families.llama import (
    LAYER,
    LLAMA_ROWS,
    THEIR_LAYER,
    llama_entries,
    llama_family,
    llama_network,
)
from layerkit.interop.hugging_face.keys import ConfigFile, Entry, get_field, key, set_field
from layerkit.interop.hugging_face.layouts import LINEAR
from layerkit.interop.hugging_face.rotary import rotary
from layerkit.interop.hugging_face.tensors import Row
from layerkit.layers.moe.token_choice import MoeFeedForward


def _network() -> Config:
    # Mixtral's loss balances all choices of a token. It has no z-loss.
    experts: Config = MoeFeedForward.HParams.config(balance_all_choices=True, router_z_weight=0.0)
    return llama_network(feed_forward_tpl=experts)


# `router_aux_loss_coef` is read after the depth and the number of choices. The losses of layerkit
# are means over the choices of a token; those of Transformers are sums.
_WEIGHT = "layer.feed_forward_tpl.load_balance_weight"


def _choices_per_layer(network: Config) -> float:
    choices = get_field(network, "layer.feed_forward_tpl.num_experts_per_token")
    return choices / network.num_layers


def _read_balance(file: ConfigFile, network: Config) -> None:
    coefficient = file.get("router_aux_loss_coef", 0.001)
    set_field(network, _WEIGHT, coefficient * _choices_per_layer(network))


def _write_balance(network: Config) -> dict[str, Any]:
    coefficient = get_field(network, _WEIGHT) / _choices_per_layer(network)
    # Rounded to the original coefficient.
    return {"router_aux_loss_coef": float(f"{coefficient:.12g}")}


_MOE, _OURS = THEIR_LAYER + "block_sparse_moe.", LAYER + "feed_forward/"

MIXTRAL = llama_family(
    "mixtral",
    "MixtralForCausalLM",
    network=_network,
    entries=(
        *llama_entries(kv_heads=8, epsilon=1e-5, positions=rotary(1_000_000.0)),
        key("sliding_window", "layer.attention_tpl.window", None),
        key("num_local_experts", "layer.feed_forward_tpl.num_experts", 8),
        key("num_experts_per_tok", "layer.feed_forward_tpl.num_experts_per_token", 2),
        Entry(_read_balance, _write_balance),
        key("router_jitter_noise", "layer.feed_forward_tpl.router_tpl.jitter", 0.0),
    ),
    rows=(
        *LLAMA_ROWS,
        Row(_MOE + "gate.weight", _OURS + "router/w", "experts embed -> embed experts"),
        Row(_MOE + "experts.{expert}.w1.weight", _OURS + "gate", LINEAR),
        Row(_MOE + "experts.{expert}.w2.weight", _OURS + "down", LINEAR),
        Row(_MOE + "experts.{expert}.w3.weight", _OURS + "up", LINEAR),
    ),
    neutral=frozenset({"output_router_logits"}),
    counts=(("num_hidden_layers", "num_local_experts"),),
)
