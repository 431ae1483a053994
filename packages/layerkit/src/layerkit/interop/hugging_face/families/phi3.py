"""Phi 3 to 4 (Abdin et al., 2024): Llama with joined projections, and LongRoPE.

Rows up to the trained length have the short factors of LongRoPE, longer ones the long factors.
"""

from __future__ import annotations

from layerkit.interop.hugging_face.families.llama import llama_entries, llama_family, llama_rows
from layerkit.interop.hugging_face.keys import key
from layerkit.interop.hugging_face.rotary import rotary

_JOINED = {f"attention/{name}": "self_attn.qkv_proj" for name in ("query", "key", "value")}
_JOINED |= {f"feed_forward/{name}": "mlp.gate_up_proj" for name in ("gate", "up")}

PHI3 = llama_family(
    "phi3",
    "Phi3ForCausalLM",
    entries=(
        *llama_entries(epsilon=1e-5, positions=rotary(default_fraction=1.0)),
        key("sliding_window", "layer.attention_tpl.window", None),
        key("embd_pdrop", "dropout_rate", 0.0),
        key("resid_pdrop", "layer.dropout_rate", 0.0),
    ),
    rows=llama_rows(_JOINED, joined_axis=0),
    neutral=frozenset({"original_max_position_embeddings"}),
    token_ids={"eos_token_id": 32000, "pad_token_id": 32000},
)
