"""Granite 3 dense (Granite team, 2024): Llama with four multipliers.

They multiply embeddings, attention logits and the outputs of branches, and divide logits.
"""

from __future__ import annotations

from layerkit.config import Config
from layerkit.interop.hugging_face.families.llama import MLP_BIAS, llama_entries, llama_family
from layerkit.interop.hugging_face.keys import Entry, key


def _default_scale(network: Config) -> float:
    head_dim = network.dim_per_head or network.model_dims // network.num_heads
    return float(head_dim**-0.5)


def _scale_of(scaling: float) -> float | None:
    return None if scaling == 1 else 1 / scaling


def _scaling_of(scale: float | None) -> float:
    scaling = 1 / (scale or 1.0)
    # The original number, if it is read back as the same scale.
    rounded = float(f"{scaling:.12g}")
    return rounded if 1 / rounded == scale else scaling


def granite_entries(positions: Entry | None = None) -> tuple[Entry, ...]:
    """Return the keys of Granite 3 and 4, with the entry of their positions."""
    return (
        *llama_entries(attention_bias=False, positions=positions),
        key("embedding_multiplier", "embedding_multiplier", 1.0),
        key(
            "attention_multiplier",
            "layer.attention_tpl.logit_scale",
            1.0,
            fallback=_default_scale,
        ),
        key("residual_multiplier", "layer.residual_weight", 1.0),
        key(
            "logits_scaling",
            "softmax_tpl.logit_scale",
            1.0,
            to_ours=_scale_of,
            to_theirs=_scaling_of,
        ),
    )


GRANITE = llama_family("granite", "GraniteForCausalLM", entries=(*granite_entries(), MLP_BIAS))
