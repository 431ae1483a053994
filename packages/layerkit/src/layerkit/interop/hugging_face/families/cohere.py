"""Command R and Aya 23 (Cohere, 2024): parallel branches that share a norm, interleaved rotary.

Norms are LayerNorm without biases, and logits are multiplied by `logit_scale`. Queries and keys of
Command R+ have norms with weights for each head.
"""

from __future__ import annotations

from layerkit.config import Config
from layerkit.interop.hugging_face.families.llama import (
    ATTENTION_BIAS,
    BASIC_ENTRIES,
    llama_family,
    llama_network,
    llama_rows,
)
from layerkit.interop.hugging_face.keys import NORM_EPSILONS, Entry, key
from layerkit.interop.hugging_face.parts import activation, qk_norms, tied_embedding
from layerkit.interop.hugging_face.rotary import rotary
from layerkit.layers.basic.normalizations import LayerNorm


def cohere_network() -> Config:
    """Return the network of Command R and Command A."""
    network = llama_network(norm_class=LayerNorm, parallel=True, parallel_shares_norm=True)
    network.final_norm_tpl.use_bias = network.stack_tpl.layer_tpl.norm_tpl.use_bias = False
    return network


def cohere_entries(positions: Entry) -> tuple[Entry, ...]:
    """Return the keys of Command R and Command A, with the entry of their positions."""
    return (
        tied_embedding(default=True),
        key("vocab_size", "vocab_size", 256000),
        *BASIC_ENTRIES[1:],
        key("num_key_value_heads", "num_kv_heads", None, fallback=lambda lm: lm.num_heads),
        key("head_dim", "dim_per_head", None, fallback=lambda lm: lm.model_dims // lm.num_heads),
        key("layer_norm_eps", NORM_EPSILONS, 1e-5),
        key("logit_scale", "softmax_tpl.logit_scale", 0.0625, fallback=lambda lm: 1.0),
        ATTENTION_BIAS,
        positions,
        activation("hidden_act", "silu"),
    )


COHERE_TOKENS = {"bos_token_id": 5, "eos_token_id": 255001, "pad_token_id": 0}

COHERE = llama_family(
    "cohere",
    "CohereForCausalLM",
    network=cohere_network,
    entries=(
        *cohere_entries(rotary(500_000.0, pairing="neighbors")),
        qk_norms("use_qk_norm", per_head=True),
    ),
    rows=llama_rows(
        {f"attention/{name}_norm": f"self_attn.{name[0]}_norm" for name in ("query", "key")},
        layout="heads dims -> heads dims",
    ),
    neutral=frozenset({"model_max_length"}),  # A limit of the tokenizer.
    token_ids=COHERE_TOKENS,
)
