"""Experts of Gemma 4 26B-A4B: beside a dense feed-forward, with norms of their own.

Transformers has no load-balancing loss for them. `load_balance_weight` is 0 here, too.
"""

from __future__ import annotations

from typing import Any

from layerkit.config import Config, target_of
from layerkit.interop.hugging_face.expert_layers import EXPERTS
from layerkit.interop.hugging_face.families.llama import LAYER, THEIR_LAYER
from layerkit.interop.hugging_face.keys import ConfigFile, Entry, get_field, set_field
from layerkit.interop.hugging_face.parts import gated_names, layer_rows
from layerkit.interop.hugging_face.tensors import Row
from layerkit.layers.basic.normalizations import IdentityNorm
from layerkit.layers.moe.normalized import NormalizedMoeFeedForward, NormalizedRouter

_SWITCH = "enable_moe_block"
_SIZES = ("num_experts", "top_k_experts", "moe_intermediate_size")


def _read(file: ConfigFile, network: Config) -> None:
    sizes = {name: file.get(name, None) for name in _SIZES}
    if not file.get(_SWITCH, default=False):
        return
    for name, size in sizes.items():
        if not size:
            raise file.invalid(name, f"1 or more, since {_SWITCH} is true")
    num_experts, chosen, hidden_dims = sizes.values()
    norm = get_field(network, "layer.norm_tpl")
    experts: Config = NormalizedMoeFeedForward.HParams.config(
        num_experts=num_experts,
        num_experts_per_token=chosen,
        num_shared_experts=1,
        activation_tpl=get_field(network, EXPERTS + "activation_tpl"),
        router_tpl=NormalizedRouter.HParams.config(norm_tpl=norm.clone()),
        norm_tpl=norm.clone(),
        load_balance_weight=0.0,
        router_z_weight=0.0,
    )
    # That of the network is the size of an expert.
    experts.shared_tpl.hidden_dims, network.hidden_dims = network.hidden_dims, hidden_dims
    set_field(network, "layer.feed_forward_tpl", experts)
    set_field(network, "layer.feed_forward_norm_tpl", IdentityNorm.HParams.config())


def _write(network: Config) -> dict[str, Any]:
    experts = get_field(network, "layer.feed_forward_tpl")
    if not issubclass(target_of(experts), NormalizedMoeFeedForward):
        return {_SWITCH: False}
    sizes = (experts.num_experts, experts.num_experts_per_token, network.hidden_dims)
    dense = {"intermediate_size": experts.shared_tpl.hidden_dims or network.hidden_dims}
    return {_SWITCH: True, **dict(zip(_SIZES, sizes, strict=True)), **dense}


# It is read after the norms and the activation of dense layers, which experts take over.
MIXTURE = Entry(_read, _write)

_OURS, _EXPERTS = LAYER + "feed_forward/", THEIR_LAYER + "experts."
_NORMS = {
    "shared_norm": "pre_feedforward_layernorm",
    "shared_post_norm": "post_feedforward_layernorm_1",
    "experts_norm": "pre_feedforward_layernorm_2",
    "experts_post_norm": "post_feedforward_layernorm_2",
    "post_norm": "post_feedforward_layernorm",
}
_TRANSPOSED = "experts in out -> experts out in"
MIXTURE_ROWS = (
    *layer_rows(
        {
            **gated_names(_OURS + "shared/", THEIR_LAYER + "mlp."),
            **{_OURS + ours: THEIR_LAYER + theirs for ours, theirs in _NORMS.items()},
            _OURS + "router": THEIR_LAYER + "router.proj",
        }
    ),
    Row(THEIR_LAYER + "router.scale", _OURS + "router/norm/scale"),
    Row(THEIR_LAYER + "router.per_expert_scale", _OURS + "router/expert_scale"),
    *(
        Row(_EXPERTS + "gate_up_proj", _OURS + name, _TRANSPOSED, joined_axis=1)
        for name in ("gate", "up")
    ),
    Row(_EXPERTS + "down_proj", _OURS + "down", _TRANSPOSED),
)
