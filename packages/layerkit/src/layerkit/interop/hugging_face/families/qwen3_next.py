"""Qwen3-Next (Qwen team, 2025): three gated delta nets to one gated attention, and experts.

The sigmoid of a gate multiplies what attention reads. A quarter of each head is rotated. Norms
store scale - 1, except for those of delta nets. The tensors `mtp.*` of published folders, which
predict further tokens, are not read, as in Transformers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.families.llama import (
    LAYER,
    RECURRENT_WEIGHT,
    THEIR_LAYER,
    llama_entries,
    llama_family,
)
from layerkit.interop.hugging_face.families.qwen2_moe import (
    EXPERT_ROWS,
    qwen_expert_layers,
    routing_entries,
    shared_expert,
    shared_expert_network,
)
from layerkit.interop.hugging_face.keys import ConfigFile, Entry, key
from layerkit.interop.hugging_face.layer_types import FAR
from layerkit.interop.hugging_face.layouts import INTO_HEADS, OUT_OF_HEADS
from layerkit.interop.hugging_face.mixed_layers import (
    ATTENDING,
    RECURRENT,
    Kind,
    has_mixer,
    mixed_layers,
)
from layerkit.interop.hugging_face.parts import layer_rows
from layerkit.interop.hugging_face.rotary import rotary
from layerkit.interop.hugging_face.tensors import Row, replace_rows
from layerkit.layers.attention.base_attention import HeadProjection
from layerkit.layers.recurrent.linear_attention import GatedDeltaNet

MTP = r"^mtp\."
"""Tensors of the prediction of further tokens."""
GATED_LAYERS: dict[str, Any] = {
    "scale_offset": 1.0,
    "qk_norm": True,
    "attention": {"output_gate_tpl": HeadProjection.HParams.config()},
}
"""Arguments of `llama_network` for layers with attention."""
_MIXER = "layer.attention_tpl."


def add_delta_net(template: Config) -> None:
    """Replace the attention of a layer by a gated delta net."""
    mixer = GatedDeltaNet.HParams.config()
    mixer.norm_tpl.epsilon = template.norm_tpl.epsilon
    mixer.activation_tpl = template.feed_forward_tpl.activation_tpl.clone()
    template.attention_tpl = mixer


DELTA_NET = Kind(
    has_mixer(GatedDeltaNet),
    add_delta_net,
    (
        key("linear_num_key_heads", _MIXER + "num_key_heads", 16),
        key("linear_num_value_heads", _MIXER + "num_value_heads", 32),
        key("linear_key_head_dim", _MIXER + "key_dim_per_head", 128),
        key("linear_value_head_dim", _MIXER + "value_dim_per_head", 128),
        key("linear_conv_kernel_dim", _MIXER + "conv_width", 4),
    ),
)
"""Layers with a gated delta net."""


def _read_types(file: ConfigFile, network: Config) -> list[str]:
    interval = file.get("full_attention_interval", 4)
    types = [RECURRENT if (n + 1) % interval else FAR for n in range(network.num_layers)]
    listed: list[str] | None = file.get("layer_types", None)
    return types if listed is None else listed


def delta_net_layers(**attention: Any) -> Entry:
    """Return the entry of Qwen's hybrids; arguments are those of `llama_entries`."""
    options: dict[str, Any] = {"head_dim": 256, "qk_norm": True, "attention_bias": False}
    options["positions"] = rotary(default_fraction=0.25)
    return mixed_layers(
        llama_entries(**options | attention),
        {FAR: ATTENDING, RECURRENT: DELTA_NET},
        read_types=_read_types,
        write_types=lambda types: {"layer_types": types},
    )


_OURS, _THEIRS = LAYER + "attention/", THEIR_LAYER + "linear_attn."
CHANNELS = "(heads head_dim) () width -> width heads head_dim"
"""Layout of the weights of a convolution."""
_GATED_QUERIES = dict.fromkeys((_OURS + "query", _OURS + "gate"), THEIR_LAYER + "self_attn.q_proj")
_DELTA_ROWS = (
    *(
        Row(_THEIRS + "conv1d.weight", f"{_OURS}{name}_conv/w", CHANNELS, joined_axis=0)
        for name in ("query", "key", "value")
    ),
    Row(_THEIRS + "A_log", _OURS + "time_step/log_rate"),
    Row(_THEIRS + "dt_bias", RECURRENT_WEIGHT, "(heads channels) -> heads channels"),
    Row(_THEIRS + "norm.weight", _OURS + "norm/scale"),
    Row(_THEIRS + "out_proj.weight", _OURS + "output/w", OUT_OF_HEADS),
)


def delta_net_rows(rows: tuple[Row, ...], projections: tuple[Row, ...]) -> tuple[Row, ...]:
    """Return the rows of a hybrid by Qwen, with those of the projections of its delta nets."""
    queries = layer_rows(
        _GATED_QUERIES,
        INTO_HEADS,
        joined_axis=0,
        joined_per="heads",
        instead_of=RECURRENT_WEIGHT,
    )
    mixers = (*projections, *_DELTA_ROWS)
    recurrent_rows = (dataclasses.replace(row, beside=RECURRENT_WEIGHT) for row in mixers)
    return (*replace_rows(rows, queries), *recurrent_rows)


def delta_net_projections(tensors: dict[str, tuple[str, ...]], **joined: Any) -> tuple[Row, ...]:
    """Return rows of tensors of `linear_attn`, which join projections of a delta net."""
    return tuple(
        Row(f"{_THEIRS}{tensor}.weight", f"{_OURS}{name}/w", INTO_HEADS, 0, **joined)
        for tensor, names in tensors.items()
        for name in names
    )


QWEN3_NEXT = llama_family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    network=lambda: shared_expert_network(**GATED_LAYERS),
    entries=(
        delta_net_layers(kv_heads=2),
        qwen_expert_layers(
            (
                key("moe_intermediate_size", "hidden_dims", 512),
                shared_expert(512),
                *routing_entries(experts=512, choices=10, balance=0.001, renormalize=True),
            ),
            experts=512,
        ),
    ),
    rows=delta_net_rows(
        EXPERT_ROWS,
        delta_net_projections(
            {"in_proj_qkvz": ("query", "key", "value", "gate"), "in_proj_ba": ("beta", "step")},
            joined_per="heads",
            joined_like=_OURS + "query/w",
        ),
    ),
    buffers=MTP,
)
