"""Llama 4 text (Meta, 2025): chunked attention, layers without positions, one expert per token.

Layers with rotary positions see their chunk, and their queries and keys have a norm without
weights. The queries of the others grow with the position. The weight of an expert multiplies its
input. The text of `llama4`, which also reads images, is exported as `llama4_text`. Transformers has
no loss for `router_aux_loss_coef` and no noise for `router_jitter_noise`; they apply here.
"""

from __future__ import annotations

from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.expert_layers import EXPERTS, balance_loss, expert_layers
from layerkit.interop.hugging_face.families.llama import (
    LAYER,
    THEIR_LAYER,
    llama_entries,
    llama_family,
    llama_rows,
)
from layerkit.interop.hugging_face.families.mixtral import mixture_network
from layerkit.interop.hugging_face.family import text_part
from layerkit.interop.hugging_face.keys import ConfigFile, Entry, all_layers, get_field, key
from layerkit.interop.hugging_face.layer_types import FAR, stack_layers
from layerkit.interop.hugging_face.parts import gated_names
from layerkit.interop.hugging_face.rotary import rotary, rotary_keys
from layerkit.interop.hugging_face.tensors import Row
from layerkit.layers.basic.normalizations import RmsNormNoScale

_CHUNKED, _COUNT = "chunked_attention", "num_experts"
_POSITIONS = Entry(rotary(500_000.0).read)


def _network() -> Config:
    network = mixture_network()
    experts = get_field(network, "layer.feed_forward_tpl")
    experts.set(weigh_inputs=True, num_shared_experts=1)
    experts.router_tpl.set(score="sigmoid", renormalize=False)
    return network


def _read_layers(file: ConfigFile, network: Config) -> None:
    layers, interval = range(network.num_layers), file.get("no_rope_layer_interval", 4)
    rotated = file.get("no_rope_layers", None) or [(i + 1) % interval for i in layers]
    types = file.get("layer_types", None) or [_CHUNKED if one else FAR for one in rotated]
    kinds = [(bool(one), kind) for one, kind in zip(rotated, types, strict=False)]
    if len(kinds) < len(layers) or not set(types) <= {_CHUNKED, FAR}:
        expected = f"{_CHUNKED!r} or {FAR!r}, and no_rope_layers 0 or 1, for each layer"
        raise file.invalid("layer_types", expected)
    size = file.get("attention_chunk_size", 8192)
    if _CHUNKED in types and size is None:
        raise file.invalid("attention_chunk_size", f"a size, since layer_types has {_CHUNKED!r}")
    growth = {"query_growth": file.get("attn_scale", 0.1)}
    growth["query_growth_step"] = file.get("floor_scale", 8192)
    grows = file.get("attn_temperature_tuning", default=True) and growth["query_growth"]
    norm = RmsNormNoScale.HParams.config(epsilon=network.final_norm_tpl.epsilon)
    has_norm = file.get("use_qk_norm", default=True)
    templates = []
    for is_rotated, kind in kinds[: len(layers)]:
        template = network.stack_tpl.layer_tpl.clone()
        attention = template.attention_tpl.set(chunk=size if kind == _CHUNKED else None)
        if is_rotated:
            attention.rotary_tpl.pairing = "neighbors"
            attention.qk_norm_tpl = norm.clone() if has_norm else None
        else:
            attention.set(rotary_tpl=None, **(growth if grows else {}))
        templates.append(template)
    network.stack_tpl = stack_layers(templates)


def _write_layers(network: Config) -> dict[str, Any]:
    layers = all_layers(network)
    attention = [layer.attention_tpl for layer in layers]
    growing = [one for one in attention if one.query_growth]
    content: dict[str, Any] = {
        "no_rope_layers": [int(one.rotary_tpl is not None) for one in attention],
        "layer_types": [FAR if one.chunk is None else _CHUNKED for one in attention],
        "moe_layers": [i for i, one in enumerate(layers) if hasattr(one.feed_forward_tpl, _COUNT)],
        "use_qk_norm": any(one.qk_norm_tpl is not None for one in attention),
        "attention_chunk_size": max(one.chunk or 0 for one in attention) or None,
        "attn_temperature_tuning": bool(growing),
    }
    for one in growing[:1]:
        content |= {"attn_scale": one.query_growth, "floor_scale": one.query_growth_step}
    rotated = [one.rotary_tpl for one in attention if one.rotary_tpl is not None]
    return content | (rotary_keys(rotated[0]) if rotated else {})


def _is_dense(file: ConfigFile, layer: int) -> bool:
    step, listed = file.get("interleave_moe_layer_step", 1), file.get("moe_layers", None)
    return layer not in listed if listed is not None else (layer + 1) % step > 0


_MLP, _OURS = THEIR_LAYER + "feed_forward.", LAYER + "feed_forward/"
_AS_IT_IS = "experts in out -> experts in out"
_ROWS = llama_rows(
    {
        **gated_names("feed_forward/", "feed_forward."),
        **gated_names("feed_forward/shared/", "feed_forward.shared_expert."),
        "feed_forward/router": "feed_forward.router",
    },
    *(
        Row(_MLP + "experts.gate_up_proj", _OURS + name, _AS_IT_IS, joined_axis=2)
        for name in ("gate", "up")
    ),
    Row(_MLP + "experts.down_proj", _OURS + "down", _AS_IT_IS),
)

LLAMA4_TEXT = llama_family(
    "llama4_text",
    "Llama4ForCausalLM",
    network=_network,
    entries=(
        # `_write_layers` writes the positions.
        *llama_entries(
            kv_heads=8, head_dim=128, epsilon=1e-5, attention_bias=False, positions=_POSITIONS
        ),
        key("intermediate_size_mlp", "hidden_dims", 16384),
        Entry(_read_layers, _write_layers),
        expert_layers(
            (
                key("intermediate_size", "hidden_dims", 8192),
                key("num_local_experts", EXPERTS + "num_experts", 16),
                key("num_experts_per_tok", EXPERTS + "num_experts_per_token", 1),
                balance_loss(0.001),
                key("router_jitter_noise", EXPERTS + "router_tpl.jitter", 0.0),
            ),
            is_dense=_is_dense,
            write_dense=lambda layers: {},
            dense_size="intermediate_size_mlp",
        ),
    ),
    rows=_ROWS,
)

LLAMA4 = text_part(
    LLAMA4_TEXT,
    "llama4",
    prefix="language_model.",
    renamed=("", "language_model."),
    others=r"^(vision_model|multi_modal_projector)\.",
    neutral=frozenset({"boi_token_index", "eoi_token_index", "image_token_index"}),
)
