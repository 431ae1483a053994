"""Phi 3 to 4 (Abdin et al., 2024): Llama with joined projections, and LongRoPE.

Rows up to the trained length have the short factors of LongRoPE, longer ones the long factors.
"""

from __future__ import annotations

from layerkit.interop.hugging_face.families.llama import (
    LAYER,
    LLAMA_ROWS,
    THEIR_LAYER,
    llama_entries,
    llama_family,
)
from layerkit.interop.hugging_face.keys import key
from layerkit.interop.hugging_face.layouts import INTO_HEADS, LINEAR
from layerkit.interop.hugging_face.rotary import rotary
from layerkit.interop.hugging_face.tensors import Row

_JOINED = tuple(
    Row(f"{THEIR_LAYER}{tensor}.weight", f"{LAYER}{block}/{name}/w", layout, joined_axis=0)
    for tensor, block, names, layout in (
        ("self_attn.qkv_proj", "attention", ("query", "key", "value"), INTO_HEADS),
        ("mlp.gate_up_proj", "feed_forward", ("gate", "up"), LINEAR),
    )
    for name in names
)
_JOINED_PATHS = {row.path for row in _JOINED}

PHI3 = llama_family(
    "phi3",
    "Phi3ForCausalLM",
    entries=(
        *llama_entries(epsilon=1e-5, positions=rotary(has_fraction=True)),
        key("sliding_window", "layer.attention_tpl.window", None),
        key("embd_pdrop", "dropout_rate", 0.0),
        key("resid_pdrop", "layer.dropout_rate", 0.0),
    ),
    rows=(*_JOINED, *(row for row in LLAMA_ROWS if row.path not in _JOINED_PATHS)),
    neutral=frozenset({"original_max_position_embeddings"}),
    token_ids={"eos_token_id": 32000, "pad_token_id": 32000},
)
