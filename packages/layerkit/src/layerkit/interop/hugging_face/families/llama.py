"""Llama 2 and 3 (Touvron et al., 2023; Llama team, 2024), and parts shared with related families.

Pre-norm RmsNorm, rotary positions, groups of query heads, a SiLU-gated feed-forward, no biases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.family import Family
from layerkit.interop.hugging_face.keys import Entry, Key
from layerkit.interop.hugging_face.parts import (
    Activation,
    TiedEmbedding,
    embedding_rows,
    head_dim,
    key_value_heads,
)
from layerkit.interop.hugging_face.rotary import Rotary
from layerkit.interop.hugging_face.tensors import Row
from layerkit.layers.basic.normalizations import RmsNorm
from layerkit.layers.basic.positions import RotaryPositionalEmbedding
from layerkit.layers.transformer.stacks import StackedTransformerRepeated
from layerkit.layers.transformer.transformer import Transformer
from layerkit.models.transformer_lm import TransformerLm

_LAYER = "lm/stack/{layer}/"
_INTO_HEADS = "(heads head_dim) embed -> embed heads head_dim"
_BIAS_OF_HEADS = "(heads head_dim) -> heads head_dim"
_LINEAR = "out in -> in out"


def llama_network(*, scale_offset: float = 0.0, **layer: Any) -> Config:
    """Return the network that the families share.

    Args:
      scale_offset: Offset of the scales of all norms; 1 in Gemma.
      **layer: Fields of the layers.
    """
    norm = RmsNorm.HParams.config(scale_offset=scale_offset)
    network: Config = TransformerLm.HParams.config(final_norm_tpl=norm)
    template = Transformer.HParams.config(norm_tpl=norm.clone(), **layer)
    template.attention_tpl.rotary_tpl = RotaryPositionalEmbedding.HParams.config()
    if "feed_forward_tpl" not in layer:
        template.feed_forward_tpl.use_gate = True
    network.stack_tpl = StackedTransformerRepeated.HParams.config(layer_tpl=template)
    return network


def llama_entries(
    *,
    tied: bool = False,
    scale_by_sqrt_dims: bool = False,
    kv_heads: int | None = None,
    epsilon: float = 1e-6,
    more_norms: tuple[str, ...] = (),
) -> tuple[Entry, ...]:
    """Return the keys that the families share.

    Args:
      tied: Default of `tie_word_embeddings`.
      scale_by_sqrt_dims: Multiply embeddings by √dims.
      kv_heads: Default of `num_key_value_heads`.
      epsilon: Default of `rms_norm_eps`.
      more_norms: Paths of norms in addition to those of branches and the final one.
    """
    norms = ("final_norm_tpl", "layer.norm_tpl", *more_norms)
    return (
        TiedEmbedding(default=tied, scale_by_sqrt_dims=scale_by_sqrt_dims),
        Key("vocab_size", "vocab_size"),
        Key("hidden_size", "model_dims"),
        Key("intermediate_size", "hidden_dims"),
        Key("num_hidden_layers", "num_layers"),
        Key("num_attention_heads", "num_heads"),
        key_value_heads(kv_heads),
        Key("rms_norm_eps", tuple(f"{norm}.epsilon" for norm in norms), epsilon),
        Key("attention_dropout", "layer.attention_tpl.dropout_rate", 0.0),
    )


def attention_rows() -> tuple[Row, ...]:
    """Return the rows of attention projections, with the biases that some families have."""
    attention = "model.layers.{layer}.self_attn."
    return (
        Row(attention + "q_proj.weight", _LAYER + "attention/query/w", _INTO_HEADS),
        Row(attention + "k_proj.weight", _LAYER + "attention/key/w", _INTO_HEADS),
        Row(attention + "v_proj.weight", _LAYER + "attention/value/w", _INTO_HEADS),
        Row(attention + "q_proj.bias", _LAYER + "attention/query/b", _BIAS_OF_HEADS),
        Row(attention + "k_proj.bias", _LAYER + "attention/key/b", _BIAS_OF_HEADS),
        Row(attention + "v_proj.bias", _LAYER + "attention/value/b", _BIAS_OF_HEADS),
        Row(
            attention + "o_proj.weight",
            _LAYER + "attention/output/w",
            "embed (heads head_dim) -> heads head_dim embed",
        ),
        Row(attention + "o_proj.bias", _LAYER + "attention/output/b"),
    )


def feed_forward_rows() -> tuple[Row, ...]:
    """Return the rows of the gated feed-forward."""
    mlp = "model.layers.{layer}.mlp."
    return (
        Row(mlp + "gate_proj.weight", _LAYER + "feed_forward/gate/w", _LINEAR),
        Row(mlp + "up_proj.weight", _LAYER + "feed_forward/up/w", _LINEAR),
        Row(mlp + "down_proj.weight", _LAYER + "feed_forward/down/w", _LINEAR),
        Row(mlp + "gate_proj.bias", _LAYER + "feed_forward/gate_bias/b"),
        Row(mlp + "up_proj.bias", _LAYER + "feed_forward/up_bias/b"),
        Row(mlp + "down_proj.bias", _LAYER + "feed_forward/down_bias/b"),
    )


def outer_rows() -> tuple[Row, ...]:
    """Return the rows of the embedding, the head and the final norm."""
    return (
        *embedding_rows("model.embed_tokens.weight"),
        Row("model.norm.weight", "lm/final_norm/scale"),
    )


def pre_norm_rows() -> tuple[Row, ...]:
    """Return the rows of the two norms of a pre-norm layer."""
    return (
        Row("model.layers.{layer}.input_layernorm.weight", _LAYER + "attention_norm/scale"),
        Row(
            "model.layers.{layer}.post_attention_layernorm.weight",
            _LAYER + "feed_forward_norm/scale",
        ),
    )


def qk_norm_rows() -> tuple[Row, ...]:
    """Return the rows of the norms of queries and keys."""
    return (
        Row("model.layers.{layer}.self_attn.q_norm.weight", _LAYER + "attention/query_norm/scale"),
        Row("model.layers.{layer}.self_attn.k_norm.weight", _LAYER + "attention/key_norm/scale"),
    )


LLAMA_ROWS = (*outer_rows(), *pre_norm_rows(), *attention_rows(), *feed_forward_rows())


def llama_family(
    model_type: str,
    architecture: str,
    *,
    entries: tuple[Entry, ...],
    rows: tuple[Row, ...] = LLAMA_ROWS,
    network: Callable[[], Config] = llama_network,
    neutral: frozenset[str] = frozenset(),
    **fields: Any,
) -> Family:
    """Return a family whose tensors have the names of Llama.

    Args:
      model_type: See `Family`, as for the other arguments.
      architecture: Class of Transformers.
      entries: Table of keys.
      rows: Table of tensors.
      network: Function that returns the network with the family's templates.
      neutral: Keys that do not change the computation, in addition to those of Llama.
      **fields: Other fields of `Family`.
    """
    return Family(
        model_type=model_type,
        architecture=architecture,
        network=network,
        entries=entries,
        rows=rows,
        # It has no effect on rotary positions, except for some scalings, which read it.
        neutral=neutral | {"max_position_embeddings"},
        prefix="model.",
        copies={"lm_head.weight": "model.embed_tokens.weight"},
        buffers=r"\brotary_emb\.inv_freq$",
        **fields,
    )


LLAMA = llama_family(
    "llama",
    "LlamaForCausalLM",
    entries=(
        *llama_entries(),
        head_dim(),
        Rotary(),
        Activation("hidden_act", "silu"),
        Key("attention_bias", "layer.attention_tpl.use_bias", default=False),
        Key("mlp_bias", "layer.feed_forward_tpl.has_bias", default=False),
    ),
)
