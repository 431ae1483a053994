"""Gemma 3 text (Gemma team, 2025): five layers with a window for each layer of full attention.

Both kinds have separate rotary positions. Unlike in Gemma 2, queries and keys have norms instead of
a logit cap.
"""

from __future__ import annotations

from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.families.gemma2 import (
    GEMMA_NEUTRAL,
    gemma_entries,
    gemma_network,
)
from layerkit.interop.hugging_face.families.llama import llama_family
from layerkit.interop.hugging_face.layer_types import FAR, NEAR, alternate, layer_types
from layerkit.interop.hugging_face.rotary import rotary_keys, rotary_of_kinds

_THETAS = {FAR: ("rope_theta", 1_000_000.0), NEAR: ("rope_local_base_freq", 10_000.0)}
_FAR_ROTARY, _make_near = rotary_of_kinds(_THETAS)


def _thetas(near: Config | None, far: Config | None) -> dict[str, Any]:
    content: dict[str, Any] = dict(_THETAS.values())
    if far is not None:
        content |= rotary_keys(far.attention_tpl.rotary_tpl)
    if near is not None:
        content["rope_local_base_freq"] = near.attention_tpl.rotary_tpl.max_timescale
    return content


GEMMA3 = llama_family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    network=lambda: gemma_network(qk_norm=True),
    entries=(
        *gemma_entries(
            attention_cap=None,
            final_cap=None,
            qk_norm=True,
            positions=_FAR_ROTARY,
        ),
        layer_types(
            alternate(6, key="sliding_window_pattern"),
            default_window=4096,
            make_near=_make_near,
            write_more=_thetas,
        ),
    ),
    neutral=GEMMA_NEUTRAL | {"rope_local_base_freq"},
)
