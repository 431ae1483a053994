"""MiniCPM 1, 2 and 4 (Hu et al., 2024): Llama with factors of embeddings, branches and logits.

The factors are those of Granite, from `scale_emb`, `scale_depth` and `dim_model_base`. The code is
OpenBMB's, in the published folders, of which the older ones have no `model_type`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.families.llama import EQUAL_HEADS, llama_entries, llama_family
from layerkit.interop.hugging_face.keys import ConfigFile, Entry, get_field, key, set_field


def _ratio(name: str, path: str, divisor: Callable[[Config], float]) -> Entry:
    """Return the entry of a key whose field is its value divided by a number of the network."""

    def read(file: ConfigFile, network: Config) -> None:
        set_field(network, path, file.get(name, 1) / divisor(network))

    def write(network: Config) -> dict[str, Any]:
        field, number = get_field(network, path), divisor(network)
        value = (1.0 if field is None else field) * number
        # The original number, if it is read back as the same field.
        rounded = float(f"{value:.12g}")
        return {name: rounded if rounded / number == field else value}

    return Entry(read, write)


MINICPM = llama_family(
    "minicpm",
    "MiniCPMForCausalLM",
    entries=(
        *llama_entries(tied=True, attention_bias=False),
        EQUAL_HEADS,
        key("scale_emb", "embedding_multiplier", 1),
        _ratio("scale_depth", "layer.residual_weight", lambda lm: math.sqrt(lm.num_layers)),
        _ratio("dim_model_base", "softmax_tpl.logit_scale", lambda lm: lm.model_dims),
    ),
    # It belongs to heads for speculative decoding.
    neutral=frozenset({"mup_denominator"}),
)
