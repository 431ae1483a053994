"""T5, T5 1.1 and Flan-T5 (Raffel et al., 2020): an encoder and a decoder with relative biases.

Attention logits are not scaled. Each side has one table of biases, which folders store in the first
layer. The first version ties the head to the embedding and divides logits by √dims. Version 1.1 has
a separate head and a gated feed-forward.
"""

from __future__ import annotations

from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.family import Family
from layerkit.interop.hugging_face.keys import ConfigFile, Entry, fixed, get_field, key, set_field
from layerkit.interop.hugging_face.parts import (
    ACTIVATIONS,
    embedding_rows,
    layer_rows,
    put_embedding,
    spelling_of,
)
from layerkit.interop.hugging_face.tensors import Row
from layerkit.layers.attention.biases import RelativeBias
from layerkit.layers.attention.cross import CrossAttention
from layerkit.layers.basic.normalizations import RmsNorm
from layerkit.layers.transformer.stacks import StackedTransformerRepeated
from layerkit.layers.transformer.transformer import Transformer
from layerkit.models.encoder_decoder import TransformerEncoderDecoder
from layerkit.models.sequence_model import SequenceModel

_DECODER = "num_decoder_layers"
_CROSS = "decoder_stack_tpl.layer_tpl.cross_attention_tpl"
_NORMS = ("encoder_norm_tpl", "decoder_norm_tpl", "layer.norm_tpl")
_DROPPED = ("layer", "layer.attention_tpl", "layer.feed_forward_tpl", _CROSS)
_BIASES = ("encoder_stack_tpl.relative_bias_tpl", "decoder_stack_tpl.relative_bias_tpl")
_GATE = "layer.feed_forward_tpl.use_gate"
_ACTIVATION = "layer.feed_forward_tpl.activation_tpl"


def _network() -> Config:
    network: Config = TransformerEncoderDecoder.HParams.config(
        encoder_norm_tpl=RmsNorm.HParams.config(), decoder_norm_tpl=RmsNorm.HParams.config()
    )
    for side in ("encoder", "decoder"):
        layer: Config = Transformer.HParams.config(norm_tpl=RmsNorm.HParams.config())
        layer.attention_tpl.logit_scale = 1.0
        if side == "decoder":
            layer.cross_attention_tpl = CrossAttention.HParams.config(logit_scale=1.0)
        bias = RelativeBias.HParams.config(bidirectional=side == "encoder")
        stack = StackedTransformerRepeated.HParams.config(layer_tpl=layer, relative_bias_tpl=bias)
        setattr(network, f"{side}_stack_tpl", stack)
    return network


def _read_feed_forward(file: ConfigFile, network: Config) -> None:
    """Read `feed_forward_proj`: an activation, with the prefix `gated-` if gated.

    Transformers prefers `dense_act_fn` and `is_gated_act` where a file has them.
    """
    name = file.get("feed_forward_proj", "relu")
    is_gated = name.startswith("gated-")
    # T5 1.1 uses the approximate GELU, despite the name.
    activation = "gelu_new" if name == "gated-gelu" else name.removeprefix("gated-")
    override = file.get("dense_act_fn", None)
    activation = override or activation
    if activation not in ACTIVATIONS:
        stated = "dense_act_fn" if override else "feed_forward_proj"
        raise file.invalid(stated, "an activation", choices=ACTIVATIONS)
    set_field(network, _GATE, bool(file.get("is_gated_act", is_gated)))
    set_field(network, _ACTIVATION, ACTIVATIONS[activation].clone())


def _write_feed_forward(network: Config) -> dict[str, Any]:
    activation = spelling_of(get_field(network, _ACTIVATION), preferred="relu")
    is_gated = get_field(network, _GATE)
    name = "gated-" + activation.removesuffix("_new") if is_gated else activation
    return {"feed_forward_proj": name, "dense_act_fn": activation, "is_gated_act": is_gated}


def _read_head(file: ConfigFile, network: Config) -> None:
    """Read the tied head, whose logits are divided by √dims."""
    tied = file.get("tie_word_embeddings", default=True)
    # Newer versions of Transformers mark each T5 as tied and distinguish versions by this key.
    tied = file.get("scale_decoder_outputs", tied)
    put_embedding(network, tied=tied)
    network.softmax_tpl.logit_scale = network.model_dims**-0.5 if tied else None


def _write_head(network: Config) -> dict[str, Any]:
    tied = network.embedding_tpl is None
    return {"tie_word_embeddings": tied, "scale_decoder_outputs": tied}


def _side_rows(side: str) -> tuple[Row, ...]:
    theirs, ours = f"{side}.block.{{layer}}.layer.", f"model/{side}/{{layer}}/"
    branches = {"attention": "0.SelfAttention", "cross_attention": "1.EncDecAttention"}
    if side == "encoder":
        del branches["cross_attention"]
    last, gate = f"{theirs}{len(branches)}.", ours + "feed_forward/gate"
    wide, up = last + "DenseReluDense.wi", ours + "feed_forward/up"
    names = {gate: wide + "_0", ours + "feed_forward/down": last + "DenseReluDense.wo"}
    names[ours + "feed_forward_norm"] = last + "layer_norm"
    names[f"model/{side}_norm"] = f"{side}.final_layer_norm"
    for name, branch in branches.items():
        for one in ("query", "key", "value", "output"):
            names[f"{ours}{name}/{one}"] = f"{theirs}{branch}.{one[0]}"
        names[f"{ours}{name}_norm"] = f"{theirs}{branch[0]}.layer_norm"
    return (
        *layer_rows(names),
        *layer_rows({up: wide}, instead_of=gate + "/w"),
        *layer_rows({up: wide + "_1"}, beside=gate + "/w"),
        Row(
            f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            f"model/{side}/relative_bias/w",
            "buckets heads -> buckets heads",
        ),
    )


T5 = Family(
    model_type="t5",
    architecture="T5ForConditionalGeneration",
    network=_network,
    model_class=SequenceModel,
    network_field="model_tpl",
    model_entries=(key("decoder_start_token_id", "start_id", 0, to_ours=lambda start: start or 0),),
    entries=(
        key("vocab_size", "vocab_size", 32128),
        key("d_model", "model_dims", 512),
        key("d_ff", "hidden_dims", 2048),
        key("d_kv", "dim_per_head", 64),
        key("num_heads", "num_heads", 8),
        key("num_layers", "num_encoder_layers", 6),
        key(_DECODER, _DECODER, None, fallback=lambda network: network.num_encoder_layers),
        Entry(_read_head, _write_head),
        Entry(_read_feed_forward, _write_feed_forward),
        key("relative_attention_num_buckets", tuple(f"{x}.num_buckets" for x in _BIASES), 32),
        key("relative_attention_max_distance", tuple(f"{x}.max_distance" for x in _BIASES), 128),
        key("layer_norm_epsilon", tuple(f"{norm}.epsilon" for norm in _NORMS), 1e-6),
        key("dropout_rate", ("dropout_rate", *(f"{x}.dropout_rate" for x in _DROPPED)), 0.1),
        fixed("is_encoder_decoder", value=True),
    ),
    # The first belongs to a classification head, and the second is the length of training rows.
    # Transformers keeps the third from GGUF files without reading it.
    neutral=frozenset({"classifier_dropout", "n_positions", "num_key_value_heads"}),
    copies={
        "lm_head.weight": "shared.weight",
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
    },
    # Newer versions of Transformers tie the head of each T5 whose folder has none, scaled or not.
    stand_ins={"lm_head.weight": "shared.weight"},
    # A bias table of cross-attention in the first checkpoints, which is not used.
    buffers=r"EncDecAttention\.relative_attention_bias\.weight$",
    rows=(
        *embedding_rows("shared.weight", "model"),
        *_side_rows("encoder"),
        *_side_rows("decoder"),
    ),
    counts=("num_layers", "num_decoder_layers"),
)
