"""Entries and rows of DeepSeek V2 and V3: latent attention, and the layers of experts."""

from __future__ import annotations

from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.expert_layers import EXPERTS, expert_layers
from layerkit.interop.hugging_face.families.llama import (
    ATTENTION_BIAS,
    BASIC_ENTRIES,
    LAYER,
    THEIR_LAYER,
)
from layerkit.interop.hugging_face.families.mixtral import mixture_network
from layerkit.interop.hugging_face.families.qwen2_moe import EXPERT_ROWS
from layerkit.interop.hugging_face.keys import (
    NORM_EPSILONS,
    ConfigFile,
    Entry,
    fixed,
    get_field,
    key,
    set_field,
)
from layerkit.interop.hugging_face.parts import activation, gated_names, layer_rows, tied_embedding
from layerkit.interop.hugging_face.rotary import rotary
from layerkit.interop.hugging_face.tensors import Row, replace_rows
from layerkit.layers.attention.latent import MultiHeadLatentAttention
from layerkit.ops.rotary_scaling import yarn_magnitude

_ATTENTION, ROUTER = "layer.attention_tpl.", EXPERTS + "router_tpl."
_ROTARY_TPL, _ROTARY = _ATTENTION + "rotary_tpl", rotary()
_SIZES = {
    "q_lora_rank": ("query_latent_dims", 1536),
    "kv_lora_rank": ("latent_dims", 512),
    "qk_nope_head_dim": ("plain_dim_per_head", 128),
    "qk_rope_head_dim": ("rotary_dim_per_head", 64),
    "v_head_dim": ("value_dim_per_head", 128),
}


def latent_network(**router: Any) -> Config:
    """Return a network with latent attention and experts; `router` has fields of the router."""
    network = mixture_network(attention_tpl=MultiHeadLatentAttention.HParams.config())
    get_field(network, EXPERTS + "router_tpl").set(**router)
    return network


def _read_heads(file: ConfigFile, network: Config) -> None:
    # Each head has keys of its own, so that another number cannot be meant.
    if file.get("num_key_value_heads", None) not in (None, network.num_heads):
        raise file.invalid("num_key_value_heads", f"num_attention_heads={network.num_heads}")


def _read_rotary(file: ConfigFile, network: Config) -> None:
    size = get_field(network, _ATTENTION + "rotary_dim_per_head")
    heads = network.clone().set(dim_per_head=size)
    _ROTARY.read(file, heads)
    rotary_tpl = get_field(heads, _ROTARY_TPL)
    rotary_tpl.pairing = "neighbors" if file.get("rope_interleave", default=True) else "halves"
    set_field(network, _ROTARY_TPL, rotary_tpl)
    scaling = rotary_tpl.scaling
    if mscale := getattr(scaling, "mscale_all_dim", None):
        size += get_field(network, _ATTENTION + "plain_dim_per_head")
        scale = size**-0.5 * yarn_magnitude(scaling.factor, mscale) ** 2
        set_field(network, _ATTENTION + "logit_scale", scale)


def _write_rotary(network: Config) -> dict[str, Any]:
    is_interleaved = get_field(network, _ROTARY_TPL).pairing == "neighbors"
    return {**_ROTARY.write(network), "rope_interleave": is_interleaved}


def latent_entries(first_dense: int, experts: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """Return the keys that DeepSeek V2 and V3 share.

    Args:
      first_dense: Default of `first_k_dense_replace`.
      experts: Entries of the layers with experts, beyond the shared ones.
    """
    return (
        tied_embedding(default=False),
        *BASIC_ENTRIES,
        Entry(_read_heads, lambda network: {"num_key_value_heads": network.num_heads}),
        *(key(name, _ATTENTION + field, default) for name, (field, default) in _SIZES.items()),
        key("rms_norm_eps", NORM_EPSILONS, 1e-6),
        ATTENTION_BIAS,
        Entry(_read_rotary, _write_rotary),
        activation("hidden_act", "silu"),
        fixed("moe_layer_freq", 1),
        expert_layers(
            (*experts, key("aux_loss_alpha", EXPERTS + "load_balance_weight", 0.0)),
            is_dense=lambda file, layer: layer < file.get("first_k_dense_replace", first_dense),
            # Dense layers elsewhere are read back as others, which export refuses.
            write_dense=lambda layers: {"first_k_dense_replace": len(layers)},
        ),
    )


_THEIRS, _OURS = THEIR_LAYER + "self_attn.", LAYER + "attention/"
_MLP, _EXPERTS = THEIR_LAYER + "mlp.", LAYER + "feed_forward/"
_SHARED = (
    Row(_MLP + "gate.e_score_correction_bias", _EXPERTS + "router/score_bias"),
    *layer_rows(gated_names(_EXPERTS + "shared/", _MLP + "shared_experts.")),
)
_DOWN = _OURS + "query_down/w"
_ROWS = (
    *layer_rows({_OURS + "query": _THEIRS + "q_proj"}, instead_of=_DOWN),
    *layer_rows({_OURS + "query": _THEIRS + "q_b_proj"}, beside=_DOWN),
    *layer_rows(
        {
            _OURS + "query_down": _THEIRS + "q_a_proj",
            _OURS + "query_norm": _THEIRS + "q_a_layernorm",
            _OURS + "latent_norm": _THEIRS + "kv_a_layernorm",
        }
    ),
    *layer_rows(
        {_OURS + n: _THEIRS + "kv_a_proj_with_mqa" for n in ("latent_down", "rotary_key")},
        joined_axis=0,
    ),
    *layer_rows(
        {_OURS + n: _THEIRS + "kv_b_proj" for n in ("key", "value")},
        joined_axis=0,
        joined_per="heads",
    ),
)

DEEPSEEK_EXPERT_ROWS = replace_rows(EXPERT_ROWS, _SHARED)
"""Rows of Llama's attention and the experts of DeepSeek."""

LATENT_ROWS = replace_rows(DEEPSEEK_EXPERT_ROWS, _ROWS)
"""Rows of DeepSeek V2 and V3."""

# Transformers derives both sizes of heads itself.
LATENT_NEUTRAL = frozenset({"ep_size", "head_dim", "qk_head_dim", "seq_aux"})
