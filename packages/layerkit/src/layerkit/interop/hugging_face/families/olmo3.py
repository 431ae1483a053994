"""OLMo 3 (OLMo team, 2025): OLMo 2 with three layers with a window for each of full attention.

A scaling of rotary positions applies to full attention only. `rope_theta` applies to both kinds of
layers, as in the version of Transformers that wrote the published folders; version 5 reads it for
full attention only. Export writes `rope_parameters` too, which is unambiguous.
"""

from __future__ import annotations

from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.families.llama import llama_entries, llama_family
from layerkit.interop.hugging_face.families.olmo2 import OLMO2
from layerkit.interop.hugging_face.layer_types import FAR, NEAR, alternate, layer_types
from layerkit.interop.hugging_face.rotary import rotary_by_kind, rotary_keys, rotary_of_kinds

_FAR_ROTARY, _make_near = rotary_of_kinds(dict.fromkeys((NEAR, FAR), ("rope_theta", 500_000.0)))


def _write_both(near: Config | None, far: Config | None) -> dict[str, Any]:
    template: Any = near if far is None else far
    older = rotary_keys(template.attention_tpl.rotary_tpl)
    if far is None:
        older["rope_scaling"] = None
    return {**older, "rope_parameters": rotary_by_kind(near, far)}


OLMO3 = llama_family(
    "olmo3",
    "Olmo3ForCausalLM",
    network=OLMO2.network,
    entries=(
        *llama_entries(
            epsilon=1e-5,
            qk_norm=True,
            attention_bias=False,
            positions=_FAR_ROTARY,
        ),
        layer_types(
            alternate(4), default_window=4096, make_near=_make_near, write_more=_write_both
        ),
    ),
    token_ids={"eos_token_id": 50279, "pad_token_id": 1},
)
