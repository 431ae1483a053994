"""OLMo Hybrid (OLMo team, 2026): OLMo 2 in which three of four layers have a gated delta net.

These layers have norms before their branches, and the others after them. A `rope_theta` of null
leaves out the rotary positions, as in the published model.
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
    llama_rows,
)
from layerkit.interop.hugging_face.families.olmo2 import OLMO2
from layerkit.interop.hugging_face.families.qwen3_next import (
    CHANNELS,
    DELTA_NET,
    add_delta_net,
)
from layerkit.interop.hugging_face.keys import ConfigFile, Entry, get_field, key, set_field
from layerkit.interop.hugging_face.layer_types import FAR
from layerkit.interop.hugging_face.layouts import INTO_HEADS
from layerkit.interop.hugging_face.mixed_layers import ATTENDING, RECURRENT, Kind, mixed_layers
from layerkit.interop.hugging_face.parts import layer_rows
from layerkit.interop.hugging_face.rotary import rotary
from layerkit.interop.hugging_face.tensors import Row

_MIXER, _ROTARY, _ROTARY_TPL = "layer.attention_tpl.", rotary(), "layer.attention_tpl.rotary_tpl"


def _read_positions(file: ConfigFile, network: Config) -> None:
    older, newer = file.get("rope_theta", 1e4), file.get("rope_parameters", None) or {}
    if newer.get("rope_theta", older) is None:
        set_field(network, _ROTARY_TPL, None)
        set_field(network, _MIXER + "qk_norm_before_rotary", value=False)
    else:
        _ROTARY.read(file, network)


def _write_positions(network: Config) -> dict[str, Any]:
    if get_field(network, _ROTARY_TPL) is None:
        return {"rope_theta": None}
    return _ROTARY.write(network)


def _add_delta_net(template: Config) -> None:
    add_delta_net(template)
    template.norm_policy = "pre"
    template.attention_tpl.norm_tpl.epsilon = 1e-5


def _key_dims(network: Config) -> int:
    return int(0.75 * network.model_dims / get_field(network, _MIXER + "num_key_heads"))


def _value_dims(network: Config) -> int:
    return 2 * int(get_field(network, _MIXER + "key_dim_per_head"))


_HEADS: dict[str, Any] = {"default": None, "fallback": lambda network: network.num_heads}
_DELTA_NET = Kind(
    DELTA_NET.matches,
    _add_delta_net,
    (
        key("linear_num_key_heads", _MIXER + "num_key_heads", **_HEADS),
        key("linear_num_value_heads", _MIXER + "num_value_heads", **_HEADS),
        key("linear_key_head_dim", _MIXER + "key_dim_per_head", None, fallback=_key_dims),
        key("linear_value_head_dim", _MIXER + "value_dim_per_head", None, fallback=_value_dims),
        key("linear_conv_kernel_dim", _MIXER + "conv_width", 4),
        key("linear_allow_neg_eigval", _MIXER + "allow_negative_eigenvalues", default=True),
    ),
)


def _read_types(file: ConfigFile, network: Config) -> list[str]:
    types = [RECURRENT if (n + 1) % 4 else FAR for n in range(network.num_layers)]
    types[-1:] = types[-1:] if FAR in types else [FAR]
    listed: list[str] | None = file.get("layer_types", None)
    return types if listed is None else listed


_OURS, _THEIRS = LAYER + "attention/", THEIR_LAYER + "linear_attn."
_LETTERS = {"query": "q", "key": "k", "value": "v", "gate": "g", "step": "a", "beta": "b"}
_PROJECTIONS = {_OURS + name: f"{_THEIRS}{letter}_proj" for name, letter in _LETTERS.items()}
_MIXER_ROWS = (
    *layer_rows(_PROJECTIONS, INTO_HEADS),
    *(
        Row(f"{_THEIRS}{name[0]}_conv1d.weight", f"{_OURS}{name}_conv/w", CHANNELS)
        for name in ("query", "key", "value")
    ),
    *layer_rows({_OURS + "output": _THEIRS + "o_proj", _OURS + "norm": _THEIRS + "o_norm"}),
    Row(_THEIRS + "A_log", _OURS + "time_step/log_rate"),
    Row(_THEIRS + "dt_bias", RECURRENT_WEIGHT, "(heads channels) -> heads channels"),
)

OLMO_HYBRID = llama_family(
    "olmo_hybrid",
    "OlmoHybridForCausalLM",
    network=OLMO2.network,
    entries=(
        mixed_layers(
            llama_entries(
                qk_norm=True,
                attention_bias=False,
                positions=Entry(_read_positions, _write_positions),
            ),
            {FAR: ATTENDING, RECURRENT: _DELTA_NET},
            read_types=_read_types,
            write_types=lambda types: {"layer_types": types},
        ),
    ),
    rows=(
        *llama_rows(
            {
                "attention_norm": "attention_layer_norm",
                "feed_forward_norm": "feedforward_layer_norm",
                # Transformers saves it under the name of the other kind of layers.
                "attention_post_norm": "feedforward_layer_norm",
            }
        ),
        *(dataclasses.replace(row, beside=RECURRENT_WEIGHT) for row in _MIXER_ROWS),
    ),
    other_names={"feedforward_layer_norm": "post_attention_layernorm"},
    neutral=frozenset({f"linear_{name}" for name in ("a_log_min", "a_log_max", "dt_min", "dt_max")})
    | {"linear_dt_init_floor"},
    token_ids={"eos_token_id": 100257, "pad_token_id": 100277},
)
