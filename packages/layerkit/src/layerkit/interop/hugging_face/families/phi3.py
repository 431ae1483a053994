"""Phi 3 and 3.5 (Abdin et al., 2024): Llama with joined projections, and LongRoPE.

Rows up to the trained length have the short factors of LongRoPE, longer ones the long factors.
"""

from __future__ import annotations

from layerkit.interop.hugging_face.families.llama import (
    llama_entries,
    llama_family,
    outer_rows,
    pre_norm_rows,
)
from layerkit.interop.hugging_face.keys import Key
from layerkit.interop.hugging_face.parts import Activation, head_dim
from layerkit.interop.hugging_face.rotary import Rotary
from layerkit.interop.hugging_face.tensors import Row

_OURS = "lm/stack/{layer}/"
_THEIRS = "model.layers.{layer}."
_INTO_HEADS = "(heads head_dim) embed -> embed heads head_dim"
_LINEAR = "out in -> in out"

PHI3 = llama_family(
    "phi3",
    "Phi3ForCausalLM",
    entries=(
        *llama_entries(epsilon=1e-5),
        head_dim(),
        Rotary(has_fraction=True),
        Activation("hidden_act", "silu"),
        Key("sliding_window", "layer.attention_tpl.window", None),
        Key("embd_pdrop", "dropout_rate", 0.0),
        Key("resid_pdrop", "layer.dropout_rate", 0.0),
    ),
    rows=(
        *outer_rows(),
        *pre_norm_rows(),
        *(
            Row(
                _THEIRS + "self_attn.qkv_proj.weight",
                f"{_OURS}attention/{name}/w",
                _INTO_HEADS,
                joined_axis=0,
            )
            for name in ("query", "key", "value")
        ),
        Row(
            _THEIRS + "self_attn.o_proj.weight",
            _OURS + "attention/output/w",
            "embed (heads head_dim) -> heads head_dim embed",
        ),
        *(
            Row(
                _THEIRS + "mlp.gate_up_proj.weight",
                f"{_OURS}feed_forward/{name}/w",
                _LINEAR,
                joined_axis=0,
            )
            for name in ("gate", "up")
        ),
        Row(_THEIRS + "mlp.down_proj.weight", _OURS + "feed_forward/down/w", _LINEAR),
    ),
    neutral=frozenset({"original_max_position_embeddings"}),
    token_ids={"eos_token_id": 32000, "pad_token_id": 32000},
)
