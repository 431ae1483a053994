"""Mistral (Jiang et al., 2023): Llama with sliding-window attention."""

from __future__ import annotations

from layerkit.config import Config
from layerkit.interop.hugging_face.families.llama import (
    LLAMA_BUFFERS,
    LLAMA_COPIES,
    LLAMA_NEUTRAL,
    LLAMA_ROWS,
    llama_entries,
    llama_network,
)
from layerkit.interop.hugging_face.family import Family
from layerkit.interop.hugging_face.keys import ConfigFile, Key
from layerkit.interop.hugging_face.parts import Activation, HeadDim
from layerkit.interop.hugging_face.rotary import Rotary


def _skeleton(file: ConfigFile) -> Config:
    del file
    return llama_network()


MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    skeleton=_skeleton,
    entries=(
        *llama_entries(kv_heads=8),
        HeadDim(),
        Rotary(),
        Activation("hidden_act", "silu"),
        Key("sliding_window", "layer.attention_tpl.window", 4096),
    ),
    rows=LLAMA_ROWS,
    neutral=LLAMA_NEUTRAL,
    prefix="model.",
    copies=LLAMA_COPIES,
    buffers=LLAMA_BUFFERS,
)
