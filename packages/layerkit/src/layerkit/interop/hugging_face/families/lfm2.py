"""LFM2 (Liquid AI, 2025): gated convolutions over three tokens, and layers with attention."""

from __future__ import annotations

import dataclasses
from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.families.llama import (
    LAYER,
    THEIR_LAYER,
    llama_entries,
    llama_family,
    llama_network,
    llama_rows,
)
from layerkit.interop.hugging_face.families.qwen3_next import CHANNELS
from layerkit.interop.hugging_face.keys import ConfigFile, Entry, fixed, key
from layerkit.interop.hugging_face.layer_types import FAR
from layerkit.interop.hugging_face.layouts import INTO_HEADS
from layerkit.interop.hugging_face.mixed_layers import ATTENDING, Kind, has_mixer, mixed_layers
from layerkit.interop.hugging_face.parts import layer_rows, put_embedding
from layerkit.interop.hugging_face.rotary import rotary
from layerkit.layers.recurrent.short_convolution import ShortConvolution

_CONV = Kind(
    has_mixer(ShortConvolution),
    lambda layer: layer.set(attention_tpl=ShortConvolution.HParams.config()),
    (
        key("conv_L_cache", "layer.attention_tpl.width", 3),
        key("conv_bias", "layer.attention_tpl.use_bias", default=False),
    ),
)


def _read_hidden_size(file: ConfigFile, network: Config) -> None:
    size = file.get("intermediate_size", 12288)
    size = file.get("block_ff_dim", None) or size
    multiple, factor = file.get("block_multiple_of", 256), file.get("block_ffn_dim_multiplier", 1)
    if file.get("block_auto_adjust_ff_dim", default=True):
        size = int(2 * size / 3)
        size = size if factor is None else -(-int(factor * size) // multiple) * multiple
    network.hidden_dims = size


def _write_hidden_size(network: Config) -> dict[str, Any]:
    return {"intermediate_size": network.hidden_dims, "block_auto_adjust_ff_dim": False}


def _read_tied(file: ConfigFile, network: Config) -> None:
    # Another key of `tie_word_embeddings`, which takes precedence in Transformers.
    put_embedding(network, tied=file.get("tie_embedding", network.embedding_tpl is None))


def _read_types(file: ConfigFile, network: Config) -> list[str]:
    attending = file.get("full_attn_idxs", None)
    numbers = range(network.num_layers)
    types = [FAR if attending is None or n in attending else "conv" for n in numbers]
    listed: list[str] | None = file.get("layer_types", None)
    return types if listed is None else listed


_MATRICES = {"gate": 1, "up": 3, "down": 2}
_OURS, _THEIRS = LAYER + "attention/", THEIR_LAYER + "conv."
_PROJECTIONS = dict.fromkeys(
    (_OURS + name for name in ("input_gate", "output_gate", "input")), _THEIRS + "in_proj"
)
_CONV_ROWS = (
    *layer_rows(_PROJECTIONS, INTO_HEADS, joined_axis=0),
    *layer_rows({_OURS + "conv": _THEIRS + "conv"}, CHANNELS),
    *layer_rows({_OURS + "output": _THEIRS + "out_proj"}),
)
_NAMES = {
    **{f"attention/{name}": f"self_attn.{name[0]}_proj" for name in ("query", "key", "value")},
    **{f"attention/{name}_norm": f"self_attn.{name[0]}_layernorm" for name in ("query", "key")},
    "attention_norm": "operator_norm",
    "feed_forward_norm": "ffn_norm",
    **{f"feed_forward/{name}": f"feed_forward.w{n}" for name, n in _MATRICES.items()},
}

LFM2 = llama_family(
    "lfm2",
    "Lfm2ForCausalLM",
    network=lambda: llama_network(qk_norm=True),
    entries=(
        mixed_layers(
            (
                *llama_entries(
                    tied=True,
                    kv_heads=8,
                    epsilon=1e-5,
                    epsilon_key="norm_eps",
                    qk_norm=True,
                    positions=rotary(1e6),
                    hidden_size=Entry(_read_hidden_size, _write_hidden_size),
                ),
                fixed("hidden_act", "silu"),
                Entry(_read_tied),
            ),
            {FAR: ATTENDING, "conv": _CONV},
            read_types=_read_types,
            write_types=lambda types: {"layer_types": types},
        ),
    ),
    rows=(
        *llama_rows(
            _NAMES,
            *layer_rows({"lm/final_norm": "model.embedding_norm"}),
            *layer_rows(
                {_OURS + "output": THEIR_LAYER + "self_attn.out_proj"},
                instead_of=_OURS + "conv/w",
            ),
        ),
        *(dataclasses.replace(row, beside=_OURS + "conv/w") for row in _CONV_ROWS),
    ),
    # Published files have these, which Transformers does not read.
    neutral=frozenset({f"block_{name}" for name in ("dim", "norm_eps", "use_swiglu")})
    | {"block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init"}
    | {"conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "use_pos_enc"}
    | {"rms_norm_eps"},  # Transformers gives it to folders of GGUF files, and reads `norm_eps`.
)
