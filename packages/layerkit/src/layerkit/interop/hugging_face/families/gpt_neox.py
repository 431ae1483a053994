"""GPT-NeoX and Pythia (Black et al., 2022; Biderman et al., 2023): LayerNorm, biases, rotary.

The branches of a layer are parallel, each with a norm. One tensor holds query, key and value, head
by head, which is the combined projection of layerkit.
"""

from __future__ import annotations

from layerkit.config import Config
from layerkit.interop.hugging_face.families.llama import BASIC_ENTRIES, llama_network
from layerkit.interop.hugging_face.family import Family
from layerkit.interop.hugging_face.keys import NORM_EPSILONS, key
from layerkit.interop.hugging_face.parts import (
    activation,
    embedding_rows,
    layer_rows,
    tied_embedding,
)
from layerkit.interop.hugging_face.rotary import rotary
from layerkit.layers.basic.normalizations import LayerNorm


def _network() -> Config:
    network = llama_network(norm_class=LayerNorm, is_gated=False, attention={"combined_qkv": True})
    network.stack_tpl.layer_tpl.feed_forward_tpl.has_bias = True
    return network


_THEIRS, _OURS = "gpt_neox.layers.{layer}.", "lm/stack/{layer}/"
_QKV = "(heads kinds head_dim) embed -> embed heads kinds head_dim"

GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    network=_network,
    entries=(
        tied_embedding(default=False),
        *BASIC_ENTRIES,
        key("layer_norm_eps", NORM_EPSILONS, 1e-5),
        key("use_parallel_residual", "layer.parallel", default=True),
        key("attention_bias", "layer.attention_tpl.use_bias", default=True),
        key("hidden_dropout", ("dropout_rate", "layer.dropout_rate"), 0.0),
        rotary(default_fraction=0.25, theta="rotary_emb_base", fraction="rotary_pct"),
        activation("hidden_act", "gelu"),
    ),
    # The dropout is that of a classifier.
    neutral=frozenset({"classifier_dropout", "is_decoder", "max_position_embeddings"}),
    prefix="gpt_neox.",
    copies={"lm_head.weight": "gpt_neox.embed_in.weight"},
    # Version 5 of Transformers has another name for the head, which it renames in files.
    stand_ins={"embed_out.weight": "lm_head.weight"},
    buffers=r"\battention\.((masked_)?bias|rotary_emb\.inv_freq)$",
    rows=(
        *embedding_rows("gpt_neox.embed_in.weight", head="embed_out.weight"),
        *layer_rows({_OURS + "attention/qkv": _THEIRS + "attention.query_key_value"}, _QKV),
        *layer_rows(
            {
                _OURS + "attention/output": _THEIRS + "attention.dense",
                _OURS + "feed_forward/up": _THEIRS + "mlp.dense_h_to_4h",
                _OURS + "feed_forward/down": _THEIRS + "mlp.dense_4h_to_h",
                _OURS + "attention_norm": _THEIRS + "input_layernorm",
                _OURS + "feed_forward_norm": _THEIRS + "post_attention_layernorm",
                "lm/final_norm": "gpt_neox.final_layer_norm",
            }
        ),
    ),
)
