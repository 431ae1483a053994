"""Gemma 1 (Gemma team, 2024): Llama with a tanh-approximated GELU and embeddings times √dims.

Norms store scale − 1. Early folders have `hidden_act: "gelu"` although the models were trained with
the approximation, which later versions of Transformers name in `hidden_activation` or apply anyway.
"""

from __future__ import annotations

from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.families.llama import (
    ATTENTION_BIAS,
    llama_entries,
    llama_family,
    llama_network,
)
from layerkit.interop.hugging_face.keys import ConfigFile, Entry, set_field
from layerkit.interop.hugging_face.parts import ACTIVATIONS, activation

_TANH = "gelu_pytorch_tanh"
_ACTIVATION = activation("hidden_act", _TANH)


def _read_activation(file: ConfigFile, network: Config) -> None:
    _ACTIVATION.read(file, network)
    spelling = file.get("hidden_act", _TANH)
    if spelling == "gelu":
        spelling = _TANH
        set_field(network, "layer.feed_forward_tpl.activation_tpl", ACTIVATIONS[_TANH].clone())
    # Versions of Transformers differ in which of two unequal activations they apply.
    if file.get("hidden_activation", None) not in (None, spelling):
        raise file.invalid("hidden_activation", f"the activation of hidden_act, {spelling!r}")


def _write_activation(network: Config) -> dict[str, Any]:
    (spelling,) = _ACTIVATION.write(network).values()
    return {"hidden_act": spelling, "hidden_activation": spelling}


GEMMA = llama_family(
    "gemma",
    "GemmaForCausalLM",
    network=lambda: llama_network(scale_offset=1.0),
    entries=(
        *llama_entries(
            tied=True,
            scale_by_sqrt_dims=True,
            kv_heads=16,
            head_dim=256,
            nonlinearity=Entry(_read_activation, _write_activation),
        ),
        ATTENTION_BIAS,
    ),
)
