"""Llama 1 to 3.3 (Touvron et al., 2023; Llama team, 2024): the base of most other families.

Pre-norm RmsNorm, rotary positions, groups of query heads, a SiLU-gated feed-forward, no biases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from layerkit.config import Config, fields_of
from layerkit.interop.hugging_face.family import Family
from layerkit.interop.hugging_face.keys import ConfigFile, Entry, key
from layerkit.interop.hugging_face.parts import (
    activation,
    embedding_rows,
    gated_names,
    layer_rows,
    tied_embedding,
)
from layerkit.interop.hugging_face.rotary import rotary
from layerkit.interop.hugging_face.tensors import Row, replace_rows
from layerkit.layers.basic.normalizations import RmsNorm
from layerkit.layers.basic.positions import RotaryPositionalEmbedding
from layerkit.layers.transformer.stacks import StackedTransformerRepeated
from layerkit.layers.transformer.transformer import Transformer
from layerkit.models.transformer_lm import TransformerLm

_HIDDEN_SIZE = key("intermediate_size", "hidden_dims")
BASIC_ENTRIES = (
    key("vocab_size", "vocab_size"),
    key("hidden_size", "model_dims"),
    _HIDDEN_SIZE,
    key("num_hidden_layers", "num_layers"),
    key("num_attention_heads", "num_heads"),
    key("attention_dropout", "layer.attention_tpl.dropout_rate", 0.0),
)
"""Sizes without a default, and a dropout rate, that most families share."""


def llama_network(
    *,
    norm_class: Any = RmsNorm,
    scale_offset: float = 0.0,
    qk_norm: bool = False,
    is_gated: bool = True,
    attention: Mapping[str, Any] | None = None,
    **layer: Any,
) -> Config:
    """Return the network that the families share.

    Args:
      norm_class: Class of all norms.
      scale_offset: Offset of the scales of all norms; 1 in Gemma.
      qk_norm: Normalize queries and keys before the rotation.
      is_gated: The feed-forward has a gate.
      attention: Fields of the attention.
      **layer: Fields of the layers.
    """
    norm = norm_class.HParams.config(scale_offset=scale_offset)
    network: Config = TransformerLm.HParams.config(final_norm_tpl=norm)
    template = Transformer.HParams.config(norm_tpl=norm.clone(), **layer)
    rotary_tpl = RotaryPositionalEmbedding.HParams.config()
    mixer = template.attention_tpl
    mixer.set(**fields_of(mixer, rotary_tpl=rotary_tpl), **(attention or {}))
    if qk_norm:
        template.attention_tpl.set(qk_norm_tpl=norm.clone(), qk_norm_before_rotary=True)
    if "feed_forward_tpl" not in layer:
        template.feed_forward_tpl.use_gate = is_gated
    network.stack_tpl = StackedTransformerRepeated.HParams.config(layer_tpl=template)
    return network


def llama_entries(
    *,
    tied: bool = False,
    scale_by_sqrt_dims: bool = False,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    epsilon: float = 1e-6,
    epsilon_key: str = "rms_norm_eps",
    qk_norm: bool = False,
    attention_bias: bool | None = None,
    positions: Entry | None = None,
    nonlinearity: Entry | None = None,
    hidden_size: Entry = _HIDDEN_SIZE,
) -> tuple[Entry, ...]:
    """Return the keys that the families share.

    Args:
      tied: Default of `tie_word_embeddings`.
      scale_by_sqrt_dims: Multiply embeddings by √dims.
      kv_heads: Default of `num_key_value_heads`; None for the number of query heads.
      head_dim: Default of `head_dim`; None divides the model dimension among the heads.
      epsilon: Default of the ε of all norms.
      epsilon_key: Key of this ε.
      qk_norm: The network has norms of queries and keys.
      attention_bias: Default of `attention_bias`; None if the family has no such key.
      positions: Entry of the positions; None for `rotary()`.
      nonlinearity: Entry of the activation; None for `hidden_act`, by default SiLU.
      hidden_size: Entry of the hidden size of the feed-forward.
    """
    norms = ["final_norm_tpl", "layer.norm_tpl"] + ["layer.attention_tpl.qk_norm_tpl"] * qk_norm
    return (
        tied_embedding(default=tied, scale_by_sqrt_dims=scale_by_sqrt_dims),
        *(hidden_size if entry is _HIDDEN_SIZE else entry for entry in BASIC_ENTRIES),
        key("num_key_value_heads", "num_kv_heads", kv_heads, fallback=lambda lm: lm.num_heads),
        key(
            "head_dim",
            "dim_per_head",
            head_dim,
            fallback=lambda lm: lm.model_dims // lm.num_heads,
        ),
        key(epsilon_key, tuple(f"{norm}.epsilon" for norm in norms), epsilon),
        *(() if attention_bias is None else [key("attention_bias", _BIAS, attention_bias)]),
        positions or rotary(),
        nonlinearity or activation("hidden_act", "silu"),
    )


_BIAS = "layer.attention_tpl.use_bias"
ATTENTION_BIAS = key("attention_bias", _BIAS, default=False)


def _check_heads(file: ConfigFile, network: Config) -> None:
    if network.dim_per_head * network.num_heads != network.model_dims:
        raise file.invalid("head_dim", "hidden_size / num_attention_heads")


# For families without another size of heads.
EQUAL_HEADS = Entry(_check_heads)
MLP_BIAS = key("mlp_bias", "layer.feed_forward_tpl.has_bias", default=False)

LAYER = "lm/stack/{layer}/"
THEIR_LAYER = "model.layers.{layer}."
_ATTENTION = THEIR_LAYER + "self_attn."
_NORM, _POST_NORM = LAYER + "feed_forward_norm", LAYER + "attention_post_norm/scale"

RECURRENT_WEIGHT = LAYER + "attention/time_step/bias"
"""Path of a weight of layers with a recurrent mixer, whose projections have other tensors."""

# A family uses the rows of the weights that it has.
LLAMA_ROWS = (
    *embedding_rows("model.embed_tokens.weight"),
    *layer_rows(
        {
            f"{LAYER}attention/{name}": f"{_ATTENTION}{name[0]}_proj"
            for name in ("query", "key", "value", "output")
        },
        instead_of=RECURRENT_WEIGHT,
    ),
    *layer_rows(
        {
            "lm/final_norm": "model.norm",
            LAYER + "attention/query_norm": _ATTENTION + "q_norm",
            LAYER + "attention/key_norm": _ATTENTION + "k_norm",
            **gated_names(LAYER + "feed_forward/", THEIR_LAYER + "mlp."),
            LAYER + "attention_norm": THEIR_LAYER + "input_layernorm",
            LAYER + "attention_post_norm": THEIR_LAYER + "post_attention_layernorm",
            LAYER + "feed_forward_post_norm": THEIR_LAYER + "post_feedforward_layernorm",
        }
    ),
    # Its place depends on whether layers have norms after their branches.
    *layer_rows({_NORM: THEIR_LAYER + "post_attention_layernorm"}, instead_of=_POST_NORM),
    *layer_rows({_NORM: THEIR_LAYER + "pre_feedforward_layernorm"}, beside=_POST_NORM),
)


def llama_rows(names: Mapping[str, str], *rows: Row, **options: Any) -> tuple[Row, ...]:
    """Return Llama's rows with others in place of those of the same weights.

    Args:
      names: Names for `layer_rows`, within a layer.
      *rows: Further rows.
      **options: Other arguments of `layer_rows`.
    """
    within = {LAYER + ours: THEIR_LAYER + theirs for ours, theirs in names.items()}
    return replace_rows(LLAMA_ROWS, (*layer_rows(within, **options), *rows))


def llama_family(
    model_type: str,
    architecture: str,
    *,
    entries: tuple[Entry, ...],
    rows: tuple[Row, ...] = LLAMA_ROWS,
    network: Callable[[], Config] = llama_network,
    neutral: frozenset[str] = frozenset(),
    buffers: str = "(?!)",
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
      buffers: Names of tensors that are not weights, in addition to those of Llama.
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
        buffers=rf"\brotary_emb\.inv_freq$|{buffers}",
        **fields,
    )


LLAMA = llama_family(
    "llama",
    "LlamaForCausalLM",
    entries=(*llama_entries(attention_bias=False), MLP_BIAS),
)
