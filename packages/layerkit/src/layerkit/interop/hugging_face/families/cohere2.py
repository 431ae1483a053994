"""Command R7B and Command A (Cohere, 2024): Command R with windows in three of four layers.

Those layers have rotary positions, the layers with full attention none.
"""

from __future__ import annotations

from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.families.cohere import (
    COHERE_TOKENS,
    cohere_entries,
    cohere_network,
)
from layerkit.interop.hugging_face.families.llama import llama_family
from layerkit.interop.hugging_face.keys import ConfigFile, Entry, layer_templates
from layerkit.interop.hugging_face.layer_types import alternate, layer_types
from layerkit.interop.hugging_face.rotary import rotary, rotary_keys

_ROTARY = rotary(pairing="neighbors")
# Keys of Cohere's own code in published folders, which Transformers does not read.
# fmt: off
_NEUTRAL = frozenset({
    "layer_switch", "order_of_interleaved_layers", "position_embedding_type", "rotary_pct",
    "use_embedding_sharing", "use_gated_activation", "use_parallel_block", "use_parallel_embedding",
})
# fmt: on


def _remove_far_rotary(file: ConfigFile, network: Config) -> None:
    del file
    for template in layer_templates(network):
        if template.attention_tpl.window is None:
            template.attention_tpl.rotary_tpl = None


def _write_rotary(near: Config | None, far: Config | None) -> dict[str, Any]:
    del far
    return {} if near is None else rotary_keys(near.attention_tpl.rotary_tpl)


COHERE2 = llama_family(
    "cohere2",
    "Cohere2ForCausalLM",
    network=cohere_network,
    entries=(
        *cohere_entries(Entry(_ROTARY.read)),  # `_write_rotary` writes it.
        layer_types(
            alternate(4, key="sliding_window_pattern"),
            default_window=4096,
            write_more=_write_rotary,
        ),
        Entry(_remove_far_rotary),
    ),
    neutral=_NEUTRAL,
    token_ids=COHERE_TOKENS,
)
