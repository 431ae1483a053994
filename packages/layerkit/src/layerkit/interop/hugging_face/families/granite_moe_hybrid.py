"""Granite 4 dense (Granite team, 2025): Granite 3 with joined projections of the feed-forward.

Models of this type with Mamba layers or experts are not supported.
"""

from __future__ import annotations

from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.families.granite import granite_entries
from layerkit.interop.hugging_face.families.llama import llama_family, llama_rows
from layerkit.interop.hugging_face.keys import ConfigFile, Entry, fixed, get_field, key, set_field
from layerkit.interop.hugging_face.rotary import rotary

# fmt: off
_NEUTRAL = frozenset({
    "init_method", "mamba_chunk_size", "mamba_conv_bias", "mamba_d_conv", "mamba_d_head",
    "mamba_d_state", "mamba_expand", "mamba_n_groups", "mamba_n_heads", "mamba_proj_bias",
    "num_experts_per_tok", "router_aux_loss_coef", "time_step_limit",
})
# fmt: on
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


def _read_layers(file: ConfigFile, network: Config) -> None:
    if file.get("num_local_experts", 8):
        raise file.invalid("num_local_experts", "0, for a dense model")
    types = file.get("layer_types", ["mamba"])
    # The second is the name of version 5 of Transformers.
    if set(types) - {"attention", "full_attention"} or len(types) != network.num_layers:
        raise file.invalid("layer_types", "'attention' for each layer")


def _write_layers(network: Config) -> dict[str, Any]:
    types = ["attention"] * network.num_layers
    # Transformers checks that the sizes of Mamba layers fit.
    mamba = {"mamba_expand": 2, "mamba_n_heads": 2, "mamba_d_head": network.model_dims}
    return {"num_local_experts": 0, "num_experts_per_tok": 0, "layer_types": types, **mamba}


GRANITE_MOE_HYBRID = llama_family(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    entries=(
        *granite_entries(Entry(_read_positions, _write_positions)),
        # Without experts, `intermediate_size` is not read.
        key("shared_intermediate_size", "hidden_dims", 1024),
        Entry(_read_layers, _write_layers),
        fixed("normalization_function", "rmsnorm"),
    ),
    rows=llama_rows(
        {
            "feed_forward/gate": "shared_mlp.input_linear",
            "feed_forward/up": "shared_mlp.input_linear",
            "feed_forward/down": "shared_mlp.output_linear",
        },
        joined_axis=0,
    ),
    neutral=_NEUTRAL,
)
