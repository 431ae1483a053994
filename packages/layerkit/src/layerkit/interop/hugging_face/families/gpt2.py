"""GPT-2 (Radford et al., 2019): learned positions, LayerNorm, biases, tied embedding.

Linear weights are stored as `[in, out]`, unlike in all other families. One tensor holds query, key
and value.
"""

from __future__ import annotations

from layerkit.config import Config
from layerkit.interop.hugging_face.families.llama import llama_network
from layerkit.interop.hugging_face.family import Family
from layerkit.interop.hugging_face.keys import NORM_EPSILONS, Entry, fixed, key
from layerkit.interop.hugging_face.layouts import BIAS_OF_HEADS
from layerkit.interop.hugging_face.parts import (
    activation,
    embedding_rows,
    layer_rows,
    tied_embedding,
)
from layerkit.interop.hugging_face.tensors import Row
from layerkit.layers.basic.normalizations import LayerNorm
from layerkit.layers.basic.positions import TrainablePositionalEmbedding


def _network() -> Config:
    network = llama_network(norm_class=LayerNorm, is_gated=False)
    network.position_tpl = TrainablePositionalEmbedding.HParams.config()
    network.stack_tpl.layer_tpl.attention_tpl.set(use_bias=True, rotary_tpl=None)
    network.stack_tpl.layer_tpl.feed_forward_tpl.has_bias = True
    return network


def gpt_entries(
    *, vocab_size: int, dims: int, layers: int, heads: int, dropout: float
) -> tuple[Entry, ...]:
    """Return the keys that GPT-2 and GPT-J share; the arguments are the defaults."""
    return (
        key("vocab_size", "vocab_size", vocab_size),
        key("n_embd", "model_dims", dims),
        key("n_inner", "hidden_dims", None, fallback=lambda network: 4 * network.model_dims),
        key("n_layer", "num_layers", layers),
        key("n_head", "num_heads", heads),
        key("layer_norm_epsilon", NORM_EPSILONS, 1e-5),
        activation("activation_function", "gelu_new"),
        key("embd_pdrop", "dropout_rate", dropout),
        key("resid_pdrop", "layer.dropout_rate", dropout),
        key("attn_pdrop", "layer.attention_tpl.dropout_rate", dropout),
        fixed("scale_attn_weights", value=True),
    )


_THEIRS, _OURS = "transformer.h.{layer}.", "lm/stack/{layer}/"
_FUSED = "embed (heads head_dim) -> embed heads head_dim"
_LINEAR = "in out -> in out"

# Attention logits are always computed in float32 here. The summary keys belong to a head that
# language models do not have, the special tokens to the first version of the code. Transformers
# keeps GGUF's name of n_inner without reading it.
# fmt: off
_NEUTRAL = frozenset({
    "feed_forward_length", "predict_special_tokens", "reorder_and_upcast_attn",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
    "summary_use_proj",
})
# fmt: on

GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    network=_network,
    entries=(
        tied_embedding(default=True),
        *gpt_entries(vocab_size=50257, dims=768, layers=12, heads=12, dropout=0.1),
        key("n_positions", "position_tpl.max_length", 1024),
        fixed("scale_attn_by_inverse_layer_idx", value=False),
        fixed("add_cross_attention", value=False),
    ),
    neutral=_NEUTRAL,
    prefix="transformer.",
    copies={"lm_head.weight": "transformer.wte.weight"},
    buffers=r"\battn\.(masked_)?bias$",
    rows=(
        *embedding_rows("transformer.wte.weight"),
        Row("transformer.wpe.weight", "lm/position/w", "length embed -> length embed"),
        *(
            Row(_THEIRS + f"attn.c_attn.{theirs}", _OURS + f"attention/{name}/{ours}", layout, axis)
            for theirs, ours, layout, axis in (
                ("weight", "w", _FUSED, 1),
                ("bias", "b", BIAS_OF_HEADS, 0),
            )
            for name in ("query", "key", "value")
        ),
        Row(
            _THEIRS + "attn.c_proj.weight",
            _OURS + "attention/output/w",
            "(heads head_dim) embed -> heads head_dim embed",
        ),
        Row(_THEIRS + "attn.c_proj.bias", _OURS + "attention/output/b"),
        Row(_THEIRS + "mlp.c_fc.weight", _OURS + "feed_forward/up/w", _LINEAR),
        Row(_THEIRS + "mlp.c_fc.bias", _OURS + "feed_forward/up_bias/b"),
        Row(_THEIRS + "mlp.c_proj.weight", _OURS + "feed_forward/down/w", _LINEAR),
        Row(_THEIRS + "mlp.c_proj.bias", _OURS + "feed_forward/down_bias/b"),
        *layer_rows(
            {
                _OURS + "attention_norm": _THEIRS + "ln_1",
                _OURS + "feed_forward_norm": _THEIRS + "ln_2",
                "lm/final_norm": "transformer.ln_f",
            }
        ),
    ),
    token_ids={"bos_token_id": 50256, "eos_token_id": 50256},
    counts=("n_layer",),
)
