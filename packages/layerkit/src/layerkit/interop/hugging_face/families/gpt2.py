"""GPT-2 (Radford et al., 2019): learned positions, LayerNorm, biases, tied embedding.

Linear weights are stored as `[in, out]`, unlike in all other families. One tensor holds query, key
and value.
"""

from __future__ import annotations

from layerkit.config import Config
from layerkit.interop.hugging_face.family import Family
from layerkit.interop.hugging_face.keys import Fixed, Key
from layerkit.interop.hugging_face.parts import Activation, TiedEmbedding, embedding_rows
from layerkit.interop.hugging_face.tensors import Row
from layerkit.layers.basic.normalizations import LayerNorm
from layerkit.layers.basic.positions import TrainablePositionalEmbedding
from layerkit.layers.transformer.stacks import StackedTransformerRepeated
from layerkit.models.transformer_lm import TransformerLm


def _network() -> Config:
    network: Config = TransformerLm.HParams.config(
        position_tpl=TrainablePositionalEmbedding.HParams.config(),
        final_norm_tpl=LayerNorm.HParams.config(scale_offset=0.0),
        stack_tpl=StackedTransformerRepeated.HParams.config(),
    )
    layer = network.stack_tpl.layer_tpl
    layer.norm_tpl = LayerNorm.HParams.config(scale_offset=0.0)
    layer.attention_tpl.use_bias = True
    layer.feed_forward_tpl.has_bias = True
    return network


_LAYER = "lm/stack/{layer}/"
_FUSED = "embed (heads head_dim) -> embed heads head_dim"
_FUSED_BIAS = "(heads head_dim) -> heads head_dim"
_LINEAR = "in out -> in out"

GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    network=_network,
    entries=(
        TiedEmbedding(default=True),
        Key("vocab_size", "vocab_size", 50257),
        Key("n_embd", "model_dims", 768),
        Key("n_inner", "hidden_dims", None, fallback=lambda network: 4 * network.model_dims),
        Key("n_layer", "num_layers", 12),
        Key("n_head", "num_heads", 12),
        Key("n_positions", "position_tpl.max_length", 1024),
        Key("layer_norm_epsilon", ("final_norm_tpl.epsilon", "layer.norm_tpl.epsilon"), 1e-5),
        Activation("activation_function", "gelu_new"),
        Key("embd_pdrop", "dropout_rate", 0.1),
        Key("resid_pdrop", "layer.dropout_rate", 0.1),
        Key("attn_pdrop", "layer.attention_tpl.dropout_rate", 0.1),
        Fixed("scale_attn_weights", value=True),
        Fixed("scale_attn_by_inverse_layer_idx", value=False),
        Fixed("add_cross_attention", value=False),
    ),
    # Attention logits are always computed in float32 here. The summary keys belong to a head that
    # language models do not have, the special tokens to the first version of the code. Transformers
    # keeps GGUF's name of n_inner without reading it.
    neutral=frozenset(
        {
            "feed_forward_length",
            "predict_special_tokens",
            "reorder_and_upcast_attn",
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
        }
    ),
    prefix="transformer.",
    copies={"lm_head.weight": "transformer.wte.weight"},
    buffers=r"\battn\.(masked_)?bias$",
    rows=(
        *embedding_rows("transformer.wte.weight"),
        Row("transformer.wpe.weight", "lm/position/w", "length embed -> length embed"),
        Row("transformer.h.{layer}.ln_1.weight", _LAYER + "attention_norm/scale"),
        Row("transformer.h.{layer}.ln_1.bias", _LAYER + "attention_norm/bias"),
        Row("transformer.h.{layer}.attn.c_attn.weight", _LAYER + "attention/query/w", _FUSED, 1),
        Row("transformer.h.{layer}.attn.c_attn.weight", _LAYER + "attention/key/w", _FUSED, 1),
        Row("transformer.h.{layer}.attn.c_attn.weight", _LAYER + "attention/value/w", _FUSED, 1),
        Row("transformer.h.{layer}.attn.c_attn.bias", _LAYER + "attention/query/b", _FUSED_BIAS, 0),
        Row("transformer.h.{layer}.attn.c_attn.bias", _LAYER + "attention/key/b", _FUSED_BIAS, 0),
        Row("transformer.h.{layer}.attn.c_attn.bias", _LAYER + "attention/value/b", _FUSED_BIAS, 0),
        Row(
            "transformer.h.{layer}.attn.c_proj.weight",
            _LAYER + "attention/output/w",
            "(heads head_dim) embed -> heads head_dim embed",
        ),
        Row("transformer.h.{layer}.attn.c_proj.bias", _LAYER + "attention/output/b"),
        Row("transformer.h.{layer}.ln_2.weight", _LAYER + "feed_forward_norm/scale"),
        Row("transformer.h.{layer}.ln_2.bias", _LAYER + "feed_forward_norm/bias"),
        Row("transformer.h.{layer}.mlp.c_fc.weight", _LAYER + "feed_forward/up/w", _LINEAR),
        Row("transformer.h.{layer}.mlp.c_fc.bias", _LAYER + "feed_forward/up_bias/b"),
        Row("transformer.h.{layer}.mlp.c_proj.weight", _LAYER + "feed_forward/down/w", _LINEAR),
        Row("transformer.h.{layer}.mlp.c_proj.bias", _LAYER + "feed_forward/down_bias/b"),
        Row("transformer.ln_f.weight", "lm/final_norm/scale"),
        Row("transformer.ln_f.bias", "lm/final_norm/bias"),
    ),
    token_ids={"bos_token_id": 50256, "eos_token_id": 50256},
    counts=(("n_layer",),),
)
