"""Gemma 2 (Gemma team, 2024): norms before and after branches, logit caps, alternating attention.

Layers with a window alternate with layers of full attention. Norms store scale − 1, and embeddings
are multiplied by √dims.
"""

from __future__ import annotations

from layerkit.config import Config
from layerkit.interop.hugging_face.families.llama import (
    attention_rows,
    feed_forward_rows,
    llama_entries,
    llama_family,
    llama_network,
    outer_rows,
)
from layerkit.interop.hugging_face.keys import ConfigFile, Entry, Key, UnsupportedModelError
from layerkit.interop.hugging_face.layer_types import FAR, NEAR, LayerTypes
from layerkit.interop.hugging_face.parts import Activation, head_dim
from layerkit.interop.hugging_face.rotary import Rotary
from layerkit.interop.hugging_face.tensors import Row


def gemma_network() -> Config:
    """Return the network of Gemma 2 and 3."""
    return llama_network(scale_offset=1.0, norm_policy="pre_post")


def _every_other(file: ConfigFile, layer: int) -> str:
    del file
    return FAR if layer % 2 else NEAR


def _scale_of(scalar: float) -> float:
    return scalar**-0.5


def _scalar_of(scale: float | None) -> float:
    if scale is None:
        raise UnsupportedModelError("logit_scale is not set")
    scalar = scale**-2.0
    # Integers are written as integers, so that they are read back as the same scale.
    return round(scalar) if abs(scalar - round(scalar)) < 1e-6 else scalar


def gemma_entries(*, attention_cap: float | None, final_cap: float | None) -> tuple[Entry, ...]:
    """Return the keys of Gemma 2 and 3 beyond those of Llama, with the default caps."""
    return (
        Key("query_pre_attn_scalar", "layer.attention_tpl.logit_scale", 256, _scale_of, _scalar_of),
        Key("attn_logit_softcapping", "layer.attention_tpl.logit_cap", attention_cap),
        Key("final_logit_softcapping", "softmax_tpl.logit_soft_cap", final_cap),
        Key("attention_bias", "layer.attention_tpl.use_bias", default=False),
        Activation("hidden_activation", "gelu_pytorch_tanh"),
    )


GEMMA_NEUTRAL = frozenset({"hidden_act"})

_NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "attention_post_norm",
    "pre_feedforward_layernorm": "feed_forward_norm",
    "post_feedforward_layernorm": "feed_forward_post_norm",
}
GEMMA_ROWS = (
    *outer_rows(),
    *attention_rows(),
    *feed_forward_rows(),
    *(
        Row(f"model.layers.{{layer}}.{theirs}.weight", f"lm/stack/{{layer}}/{ours}/scale")
        for theirs, ours in _NORMS.items()
    ),
)

GEMMA2 = llama_family(
    "gemma2",
    "Gemma2ForCausalLM",
    network=gemma_network,
    entries=(
        *llama_entries(tied=True, scale_by_sqrt_dims=True, kv_heads=4),
        head_dim(256),
        Rotary(),
        *gemma_entries(attention_cap=50.0, final_cap=30.0),
        LayerTypes(_every_other, default_window=4096),
    ),
    rows=GEMMA_ROWS,
    # Some published folders have a second key of the window, which Transformers ignores.
    neutral=GEMMA_NEUTRAL | {"sliding_window_size"},
)
