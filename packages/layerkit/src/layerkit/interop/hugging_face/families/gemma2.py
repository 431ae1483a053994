"""Gemma 2 (Gemma team, 2024): norms before and after branches, logit caps, alternating attention.

Layers with a window alternate with layers of full attention. Norms store scale − 1, and embeddings
are multiplied by √dims.
"""

from __future__ import annotations

from layerkit.config import Config
from layerkit.interop.hugging_face.families.llama import (
    ATTENTION_BIAS,
    llama_entries,
    llama_family,
    llama_network,
)
from layerkit.interop.hugging_face.keys import Entry, UnsupportedModelError, key
from layerkit.interop.hugging_face.layer_types import alternate, layer_types
from layerkit.interop.hugging_face.parts import activation


def gemma_network(*, qk_norm: bool = False) -> Config:
    """Return the network of Gemma 2 and 3."""
    return llama_network(scale_offset=1.0, norm_policy="pre_post", qk_norm=qk_norm)


def _scale_of(scalar: float) -> float:
    return scalar**-0.5


def _scalar_of(scale: float | None) -> float:
    if scale is None:
        raise UnsupportedModelError("logit_scale is not set")
    scalar = scale**-2.0
    # Integers are written as integers, so that they are read back as the same scale.
    return round(scalar) if abs(scalar - round(scalar)) < 1e-6 else scalar


def gemma_entries(
    *,
    attention_cap: float | None,
    final_cap: float | None,
    qk_norm: bool = False,
    positions: Entry | None = None,
) -> tuple[Entry, ...]:
    """Return the keys of Gemma 2 and 3, with the default caps; see `llama_entries`."""
    return (
        *llama_entries(
            tied=True,
            scale_by_sqrt_dims=True,
            kv_heads=4,
            head_dim=256,
            qk_norm=qk_norm,
            positions=positions,
            nonlinearity=activation("hidden_activation", "gelu_pytorch_tanh"),
        ),
        key(
            "query_pre_attn_scalar",
            "layer.attention_tpl.logit_scale",
            256,
            to_ours=_scale_of,
            to_theirs=_scalar_of,
        ),
        key("attn_logit_softcapping", "layer.attention_tpl.logit_cap", attention_cap),
        key("final_logit_softcapping", "softmax_tpl.logit_soft_cap", final_cap),
        ATTENTION_BIAS,
    )


GEMMA_NEUTRAL = frozenset({"hidden_act"})

GEMMA2 = llama_family(
    "gemma2",
    "Gemma2ForCausalLM",
    network=gemma_network,
    entries=(
        *gemma_entries(attention_cap=50.0, final_cap=30.0),
        layer_types(alternate(2), default_window=4096),
    ),
    # Some published folders have a second key of the window, which Transformers ignores.
    neutral=GEMMA_NEUTRAL | {"sliding_window_size"},
)
