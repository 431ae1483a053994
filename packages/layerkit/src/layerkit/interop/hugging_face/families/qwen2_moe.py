"""Qwen 1.5 and 2 MoE (Qwen team, 2024): Qwen 2 with routed experts and a gated shared expert.

Layers of `mlp_only_layers`, and all but every `decoder_sparse_step`-th one, have no experts but the
dense feed-forward of size `intermediate_size`.
"""

from __future__ import annotations

from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.expert_layers import (
    EXPERTS,
    balance_loss,
    count_experts,
    expert_layers,
    experts_key,
)
from layerkit.interop.hugging_face.families.llama import llama_entries, llama_family, llama_rows
from layerkit.interop.hugging_face.families.mixtral import mixture_network
from layerkit.interop.hugging_face.keys import ConfigFile, Entry, get_field, key, set_field
from layerkit.interop.hugging_face.layer_types import FAR, NEAR, layer_types
from layerkit.interop.hugging_face.parts import gated_names


def routing_entries(
    *, experts: int, choices: int, balance: float, renormalize: bool = False
) -> tuple[Entry, ...]:
    """Return the keys of the routed experts of Qwen and OLMoE, with their defaults."""
    return (
        experts_key(experts),
        key("num_experts_per_tok", EXPERTS + "num_experts_per_token", choices),
        key("norm_topk_prob", EXPERTS + "router_tpl.renormalize", renormalize),
        balance_loss(balance),
    )


def qwen_expert_layers(entries: tuple[Entry, ...], *, experts: int) -> Entry:
    """Return the entry of the layers of Qwen's mixtures; `experts` is the default number."""

    def is_dense(file: ConfigFile, layer: int) -> bool:
        num_experts = count_experts(file, experts)
        is_listed = layer in (file.get("mlp_only_layers", None) or ())
        is_between = (layer + 1) % file.get("decoder_sparse_step", 1) > 0
        return num_experts == 0 or is_listed or is_between

    return expert_layers(
        entries,
        is_dense=is_dense,
        write_dense=lambda layers: {"mlp_only_layers": layers, "decoder_sparse_step": 1},
    )


_OURS = "feed_forward/"

EXPERT_ROWS = llama_rows(
    {
        _OURS + "router": "mlp.gate",
        **gated_names(_OURS, "mlp.experts.{expert}."),
        **gated_names(_OURS + "shared/", "mlp.shared_expert."),
        _OURS + "shared_gate": "mlp.shared_expert_gate",
    }
)
"""Rows of Qwen's mixtures and OLMoE."""


def _near_at_first(file: ConfigFile, layer: int) -> str:
    is_near = layer % 2 == 0 and layer < file.get("max_window_layers", 28)
    return NEAR if is_near and file.get("use_sliding_window", default=False) else FAR


def shared_expert(default: int) -> Entry:
    """Return the entry of the size of the shared expert, with its default in Transformers."""

    def read(file: ConfigFile, network: Config) -> None:
        size = file.get("shared_expert_intermediate_size", default)
        count, rest = divmod(size, network.hidden_dims)
        if size == 0:
            raise file.invalid("shared_expert_intermediate_size", "1 or more")
        set_field(network, EXPERTS + "num_shared_experts", 1 if rest else count)
        if rest:
            set_field(network, EXPERTS + "shared_tpl.hidden_dims", size)

    def write(network: Config) -> dict[str, Any]:
        size = get_field(network, EXPERTS + "shared_tpl.hidden_dims")
        size = size or get_field(network, EXPERTS + "num_shared_experts") * network.hidden_dims
        return {"shared_expert_intermediate_size": size}

    return Entry(read, write)


def shared_expert_network(**fields: Any) -> Config:
    """Return the network of `mixture_network` with a gated shared expert."""
    network = mixture_network(**fields)
    set_field(network, EXPERTS + "use_shared_gate", value=True)
    return network


QWEN2_MOE = llama_family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    network=lambda: shared_expert_network(attention={"use_output_bias": False}),
    entries=(
        *llama_entries(kv_heads=16),
        key("qkv_bias", "layer.attention_tpl.use_bias", default=True),
        layer_types(_near_at_first, default_window=4096, has_switch=True),
        qwen_expert_layers(
            (
                key("moe_intermediate_size", "hidden_dims", 1408),
                shared_expert(5632),
                *routing_entries(experts=60, choices=4, balance=0.001),
            ),
            experts=60,
        ),
    ),
    rows=EXPERT_ROWS,
)
