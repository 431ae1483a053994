"""Granite 4 (Granite team, 2025): Granite 3 with Mamba-2 layers, or with experts, or with both.

Every layer has a feed-forward: dense in a model without experts, and otherwise experts beside a
shared one. Projections of the feed-forward are joined in one tensor.
"""

from __future__ import annotations

from typing import Any

from layerkit.config import Config, target_of
from layerkit.interop.hugging_face.expert_layers import EXPERTS, balance_loss
from layerkit.interop.hugging_face.families.granite import granite_entries
from layerkit.interop.hugging_face.families.llama import (
    LAYER,
    THEIR_LAYER,
    llama_family,
    llama_rows,
)
from layerkit.interop.hugging_face.families.mamba2 import (
    BAMBA_KEYS,
    MIXER,
    MIXER_NEUTRAL,
    TIME_STEP_LIMIT,
    head_size,
    mixer_rows,
)
from layerkit.interop.hugging_face.families.mixtral import mixture_network
from layerkit.interop.hugging_face.keys import (
    ConfigFile,
    Entry,
    fixed,
    get_field,
    key,
    set_field,
)
from layerkit.interop.hugging_face.layer_types import FAR
from layerkit.interop.hugging_face.layouts import LINEAR
from layerkit.interop.hugging_face.mixed_layers import (
    ATTENDING,
    RECURRENT,
    Kind,
    has_mixer,
    mixed_layers,
)
from layerkit.interop.hugging_face.parts import activation
from layerkit.interop.hugging_face.rotary import rotary
from layerkit.interop.hugging_face.tensors import Row
from layerkit.layers.moe.token_choice import MoeFeedForward
from layerkit.layers.recurrent.linear_attention import Mamba2

_ROTARY, _ROTARY_TPL = rotary(), "layer.attention_tpl.rotary_tpl"


def _read_positions(file: ConfigFile, network: Config) -> None:
    _ROTARY.read(file, network)
    kind = file.get("position_embedding_type", None)
    if kind not in ("rope", "nope", None):
        raise file.invalid("position_embedding_type", choices=("rope", "nope"))
    if kind != "rope":
        set_field(network, _ROTARY_TPL, None)


def _write_positions(network: Config) -> dict[str, Any]:
    if get_field(network, _ROTARY_TPL) is None:
        return {"position_embedding_type": "nope"}
    return {"position_embedding_type": "rope", **_ROTARY.write(network)}


_MAMBA = Kind(
    has_mixer(Mamba2),
    lambda layer: layer.set(attention_tpl=Mamba2.HParams.config()),
    (
        *BAMBA_KEYS,
        head_size("mamba_d_head", "auto", expand="mamba_expand"),
        activation("hidden_act", "silu", MIXER + "activation_tpl"),
        key("rms_norm_eps", MIXER + "norm_tpl.epsilon", 1e-6),
        TIME_STEP_LIMIT,
    ),
)


_EXPERT_ENTRIES = (
    key("num_local_experts", EXPERTS + "num_experts", 8),
    key("num_experts_per_tok", EXPERTS + "num_experts_per_token", 2),
    key("shared_intermediate_size", EXPERTS + "shared_tpl.hidden_dims", 1024),
    balance_loss(0.001),
)
_SHARED_SIZE = key("shared_intermediate_size", "hidden_dims", 1024)


def _read_feed_forward(file: ConfigFile, network: Config) -> None:
    if not file.get("num_local_experts", 8):
        _SHARED_SIZE.read(file, network)  # `intermediate_size` is not read.
        return
    experts = get_field(mixture_network(), "layer.feed_forward_tpl")
    experts.set(num_shared_experts=1, activation_tpl=get_field(network, EXPERTS + "activation_tpl"))
    set_field(network, "layer.feed_forward_tpl", experts)
    for entry in _EXPERT_ENTRIES:
        entry.read(file, network)


def _write_feed_forward(network: Config) -> dict[str, Any]:
    # Transformers checks the sizes of Mamba layers in a model without them, too.
    content = {"mamba_expand": 2, "mamba_n_heads": 2, "mamba_d_head": network.model_dims}
    if target_of(get_field(network, "layer.feed_forward_tpl")) is not MoeFeedForward:
        content |= {"num_local_experts": 0, "num_experts_per_tok": 0}
        return content | _SHARED_SIZE.write(network)
    for entry in _EXPERT_ENTRIES:
        content |= entry.write(network)
    return content


def _write_types(types: list[str]) -> dict[str, Any]:
    # All versions of Transformers read these names.
    return {"layer_types": ["attention" if kind == FAR else "mamba" for kind in types]}


_MLP, _SHARED = "feed_forward/", "feed_forward/shared/"
_MOE, _OURS = THEIR_LAYER + "block_sparse_moe.", LAYER + "feed_forward/"
_AS_IT_IS = "experts out in -> experts in out"

GRANITE_MOE_HYBRID = llama_family(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    entries=(
        mixed_layers(
            (
                *granite_entries(Entry(_read_positions, _write_positions)),
                Entry(_read_feed_forward, _write_feed_forward),
            ),
            {FAR: ATTENDING, RECURRENT: _MAMBA},
            read_types=lambda file, network: file.get(
                "layer_types", [RECURRENT] * network.num_layers
            ),
            write_types=_write_types,
        ),
        fixed("normalization_function", "rmsnorm"),
    ),
    rows=(
        *llama_rows(
            {
                f"{ours}{name}": f"shared_mlp.{theirs}_linear"
                for ours in (_MLP, _SHARED)
                for name, theirs in (("gate", "input"), ("up", "input"), ("down", "output"))
            },
            joined_axis=0,
        ),
        *(
            Row(_MOE + "input_linear.weight", _OURS + name, _AS_IT_IS, joined_axis=1)
            for name in ("gate", "up")
        ),
        Row(_MOE + "output_linear.weight", _OURS + "down", _AS_IT_IS),
        Row(_MOE + "router.layer.weight", _OURS + "router/w", LINEAR),
        *mixer_rows(THEIR_LAYER + "mamba."),
    ),
    # The last two are of experts, and read if there are any.
    neutral=MIXER_NEUTRAL
    | {"init_method", "mamba_chunk_size", "num_experts_per_tok", "router_aux_loss_coef"},
)
