"""GPT-NeoX and Pythia (Black et al., 2022; Biderman et al., 2023): LayerNorm, biases, rotary.

The branches of a layer are parallel, each with a norm. One tensor holds query, key and value, head
by head, which is the combined projection of layerkit.
"""

from __future__ import annotations

from layerkit.config import Config
from layerkit.interop.hugging_face.family import Family
from layerkit.interop.hugging_face.keys import key
from layerkit.interop.hugging_face.layouts import LINEAR, OUT_OF_HEADS
from layerkit.interop.hugging_face.parts import activation, embedding_rows, tied_embedding
from layerkit.interop.hugging_face.rotary import rotary
from layerkit.interop.hugging_face.tensors import Row
from layerkit.layers.basic.normalizations import LayerNorm
from layerkit.layers.basic.positions import RotaryPositionalEmbedding
from layerkit.layers.transformer.stacks import StackedTransformerRepeated
from layerkit.models.transformer_lm import TransformerLm


def _network() -> Config:
    norm = LayerNorm.HParams.config(scale_offset=0.0)
    stack = StackedTransformerRepeated.HParams.config()
    stack.layer_tpl.norm_tpl = norm.clone()
    stack.layer_tpl.attention_tpl.combined_qkv = True
    stack.layer_tpl.attention_tpl.rotary_tpl = RotaryPositionalEmbedding.HParams.config()
    stack.layer_tpl.feed_forward_tpl.has_bias = True
    network: Config = TransformerLm.HParams.config(final_norm_tpl=norm, stack_tpl=stack)
    return network


_THEIRS, _OURS = "gpt_neox.layers.{layer}.", "lm/stack/{layer}/"
_QKV = "attention.query_key_value."

GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    network=_network,
    entries=(
        tied_embedding(default=False),
        key("vocab_size", "vocab_size"),
        key("hidden_size", "model_dims"),
        key("intermediate_size", "hidden_dims"),
        key("num_hidden_layers", "num_layers"),
        key("num_attention_heads", "num_heads"),
        key("layer_norm_eps", ("final_norm_tpl.epsilon", "layer.norm_tpl.epsilon"), 1e-5),
        key("use_parallel_residual", "layer.parallel", default=True),
        key("attention_bias", "layer.attention_tpl.use_bias", default=True),
        key("attention_dropout", "layer.attention_tpl.dropout_rate", 0.0),
        key("hidden_dropout", ("dropout_rate", "layer.dropout_rate"), 0.0),
        rotary(
            has_fraction=True,
            default_fraction=0.25,
            theta="rotary_emb_base",
            fraction="rotary_pct",
        ),
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
        Row(
            f"{_THEIRS}{_QKV}weight",
            _OURS + "attention/qkv/w",
            "(heads kinds head_dim) embed -> embed heads kinds head_dim",
        ),
        Row(
            f"{_THEIRS}{_QKV}bias",
            _OURS + "attention/qkv/b",
            "(heads kinds head_dim) -> heads kinds head_dim",
        ),
        Row(_THEIRS + "attention.dense.weight", _OURS + "attention/output/w", OUT_OF_HEADS),
        Row(_THEIRS + "attention.dense.bias", _OURS + "attention/output/b"),
        *(
            Row(f"{_THEIRS}mlp.{theirs}.{kind}", f"{_OURS}feed_forward/{ours}", layout)
            for theirs, name in (("dense_h_to_4h", "up"), ("dense_4h_to_h", "down"))
            for kind, ours, layout in (
                ("weight", f"{name}/w", LINEAR),
                ("bias", f"{name}_bias/b", "dims -> dims"),
            )
        ),
        *(
            Row(f"{theirs}.{theirs_kind}", f"{ours}/{kind}")
            for theirs_kind, kind in (("weight", "scale"), ("bias", "bias"))
            for theirs, ours in (
                (_THEIRS + "input_layernorm", _OURS + "attention_norm"),
                (_THEIRS + "post_attention_layernorm", _OURS + "feed_forward_norm"),
                ("gpt_neox.final_layer_norm", "lm/final_norm"),
            )
        ),
    ),
)
