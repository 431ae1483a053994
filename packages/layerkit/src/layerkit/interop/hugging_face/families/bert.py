"""BERT (Devlin et al., 2018): an encoder with norms after its branches and two types of tokens.

The head of a masked language model is a dense layer with a norm, the embedding and a bias for each
token. A model for embeddings (`BertModel`) is saved without it. The pooler and the head of next
sentences, which masked language models lack, are not read.
"""

from __future__ import annotations

from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.family import Family
from layerkit.interop.hugging_face.keys import ConfigFile, Entry, fixed, get_field, key
from layerkit.interop.hugging_face.layouts import LINEAR
from layerkit.interop.hugging_face.parts import activation, layer_rows
from layerkit.interop.hugging_face.tensors import Row
from layerkit.layers.basic.embeddings import Embedding
from layerkit.layers.basic.linears import NormalizedFeedForward
from layerkit.layers.basic.normalizations import LayerNorm
from layerkit.layers.basic.positions import TrainablePositionalEmbedding
from layerkit.layers.transformer.stacks import StackedTransformerRepeated
from layerkit.layers.transformer.transformer import Transformer
from layerkit.models.bert import BertModel
from layerkit.models.transformer_lm import TransformerLm


def encoder_network(**layer: Any) -> Config:
    """Return a network that all encoders share; `layer` are fields of its layers."""
    norm = LayerNorm.HParams.config(scale_offset=0.0)
    template: Config = Transformer.HParams.config(norm_tpl=norm, **layer)
    network: Config = TransformerLm.HParams.config(
        is_causal=False,
        embedding_norm_tpl=norm.clone(),
        stack_tpl=StackedTransformerRepeated.HParams.config(layer_tpl=template),
        final_norm_tpl=norm.clone(),
    )
    return network


def _network() -> Config:
    network = encoder_network(norm_policy="post")
    network.stack_tpl.layer_tpl.attention_tpl.use_bias = True
    network.stack_tpl.layer_tpl.feed_forward_tpl.has_bias = True
    network.position_tpl = TrainablePositionalEmbedding.HParams.config()
    network.token_type_tpl = Embedding.HParams.config()
    network.final_norm_tpl = None
    return network


def masked_lm_head(stem: str, *entries: Entry, activation: Config | None = None) -> Entry:
    """Return the entry of the head, which a model has unless it is saved as the bare encoder.

    Args:
      stem: Start of the names of the family's classes in Transformers.
      *entries: Entries of fields of the head.
      activation: Activation of the head; None for that of the layers.
    """
    bare = [f"{stem}Model"]

    def read(file: ConfigFile, network: Config) -> None:
        if file.get("architectures", None) == bare:
            return
        hidden_activation = get_field(network, "layer.feed_forward_tpl.activation_tpl")
        network.softmax_tpl.use_bias = True
        network.head_tpl = NormalizedFeedForward.HParams.config(
            norm_tpl=network.embedding_norm_tpl.clone(),
            activation_tpl=(activation or hidden_activation).clone(),
        )
        for entry in entries:
            entry.read(file, network)

    def write(network: Config) -> dict[str, Any]:
        if network.head_tpl is None:
            return {"architectures": bare}
        return {key: value for entry in entries for key, value in entry.write(network).items()}

    return Entry(read, write)


def bert_entries(stem: str, *positions: Entry, head_activation: Config | None = None) -> Any:
    """Return the keys that BERT and RoBERTa share; see `masked_lm_head`."""
    return (
        key("hidden_size", "model_dims", 768),
        key("intermediate_size", "hidden_dims", 3072),
        key("num_hidden_layers", "num_layers", 12),
        key("num_attention_heads", "num_heads", 12),
        key("type_vocab_size", "token_type_tpl.num_classes", 2),
        key("layer_norm_eps", ("embedding_norm_tpl.epsilon", "layer.norm_tpl.epsilon"), 1e-12),
        key("hidden_dropout_prob", ("dropout_rate", "layer.dropout_rate"), 0.1),
        key("attention_probs_dropout_prob", "layer.attention_tpl.dropout_rate", 0.1),
        activation("hidden_act", "gelu"),
        *positions,
        masked_lm_head(stem, activation=head_activation),
        fixed("tie_word_embeddings", value=True),
        fixed("position_embedding_type", "absolute"),
    )


_THEIRS, _OURS = "bert.encoder.layer.{layer}.", "lm/stack/{layer}/"
_ATTENTION = _THEIRS + "attention."
_INTO = ("query", "key", "value")
_EMBEDDINGS, _HEAD = "bert.embeddings.", "cls.predictions."
_WORDS = _EMBEDDINGS + "word_embeddings.weight"
_TABLE = "rows embed -> rows embed"

BERT = Family(
    model_type="bert",
    architecture="BertForMaskedLM",
    network=_network,
    model_class=BertModel,
    entries=(
        key("vocab_size", "vocab_size", 30522),
        *bert_entries("Bert", key("max_position_embeddings", "position_tpl.max_length", 512)),
    ),
    # Those of the pooler are of the first version of the code.
    neutral=frozenset(
        {
            *("classifier_dropout", "directionality", "pooler_fc_size", "pooler_type"),
            *("pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head"),
        }
    ),
    prefix="bert.",
    copies={_HEAD + "decoder.weight": _WORDS, _HEAD + "decoder.bias": _HEAD + "bias"},
    other_names={r"LayerNorm\.weight$": "LayerNorm.gamma", r"LayerNorm\.bias$": "LayerNorm.beta"},
    buffers=r"\bposition_ids$|\bpooler\.dense\.|^cls\.seq_relationship\.",
    rows=(
        Row(_WORDS, "lm/softmax/w", _TABLE),
        Row(_EMBEDDINGS + "position_embeddings.weight", "lm/position/w", _TABLE),
        Row(_EMBEDDINGS + "token_type_embeddings.weight", "lm/token_type/w", _TABLE),
        *layer_rows(
            {
                **{f"{_OURS}attention/{n}": f"{_ATTENTION}self.{n}" for n in _INTO},
                _OURS + "attention/output": _ATTENTION + "output.dense",
                _OURS + "feed_forward/up": _THEIRS + "intermediate.dense",
                _OURS + "feed_forward/down": _THEIRS + "output.dense",
                "lm/embedding_norm": _EMBEDDINGS + "LayerNorm",
                _OURS + "attention_norm": _ATTENTION + "output.LayerNorm",
                _OURS + "feed_forward_norm": _THEIRS + "output.LayerNorm",
                "lm/head/norm": _HEAD + "transform.LayerNorm",
            }
        ),
        Row(_HEAD + "transform.dense.weight", "lm/head/linear/w", LINEAR),
        Row(_HEAD + "transform.dense.bias", "lm/head/bias/b"),
        Row(_HEAD + "bias", "lm/softmax/b"),
    ),
)
