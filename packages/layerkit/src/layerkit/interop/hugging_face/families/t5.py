"""T5 (Raffel et al., 2020) and T5 1.1: an encoder and a decoder with relative biases.

Attention logits are not scaled. Each side has one table of biases, which folders store in the first
layer. The first version ties the head to the embedding and divides logits by √dims. Version 1.1 has
a separate head and a gated feed-forward.
"""

from __future__ import annotations

from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.family import Family
from layerkit.interop.hugging_face.keys import (
    ConfigFile,
    Fixed,
    Key,
    get_field,
    set_field,
)
from layerkit.interop.hugging_face.parts import ACTIVATIONS, put_embedding, spelling_of
from layerkit.interop.hugging_face.tensors import Row
from layerkit.layers.attention.biases import RelativeBias
from layerkit.layers.attention.cross import CrossAttention
from layerkit.layers.basic.normalizations import RmsNorm
from layerkit.layers.transformer.stacks import StackedTransformerRepeated
from layerkit.layers.transformer.transformer import Transformer
from layerkit.models.encoder_decoder import TransformerEncoderDecoder
from layerkit.models.sequence_model import SequenceModel

_CROSS = "decoder_stack_tpl.layer_tpl.cross_attention_tpl"
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


class _FeedForward:
    """Entry of `feed_forward_proj`: an activation, with the prefix `gated-` if gated.

    Transformers prefers `dense_act_fn` and `is_gated_act` where a file has them.
    """

    def read(self, file: ConfigFile, network: Config) -> None:
        """Set fields from the file."""
        name = file.get("feed_forward_proj", "relu")
        is_gated = name.startswith("gated-")
        # T5 1.1 uses the approximate GELU, despite the name.
        activation = "gelu_new" if name == "gated-gelu" else name.removeprefix("gated-")
        override = file.get("dense_act_fn", None)
        activation = override or activation
        if activation not in ACTIVATIONS:
            key = "dense_act_fn" if override else "feed_forward_proj"
            raise file.invalid(key, "an activation", choices=ACTIVATIONS)
        set_field(network, _GATE, bool(file.get("is_gated_act", is_gated)))
        set_field(network, _ACTIVATION, ACTIVATIONS[activation].clone())

    def write(self, network: Config) -> dict[str, Any]:
        """Return keys from fields."""
        activation = spelling_of(get_field(network, _ACTIVATION), preferred="relu")
        is_gated = get_field(network, _GATE)
        name = "gated-" + activation.removesuffix("_new") if is_gated else activation
        return {"feed_forward_proj": name, "dense_act_fn": activation, "is_gated_act": is_gated}


class _Head:
    """Entry of the tied head, whose logits are divided by √dims."""

    def read(self, file: ConfigFile, network: Config) -> None:
        """Set fields from the file."""
        tied = file.get("tie_word_embeddings", default=True)
        # Newer versions of Transformers mark each T5 as tied and distinguish versions by this key.
        tied = file.get("scale_decoder_outputs", tied)
        put_embedding(network, tied=tied)
        network.softmax_tpl.logit_scale = network.model_dims**-0.5 if tied else None

    def write(self, network: Config) -> dict[str, Any]:
        """Return keys from fields."""
        tied = network.embedding_tpl is None
        return {"tie_word_embeddings": tied, "scale_decoder_outputs": tied}


def _side_rows(side: str) -> tuple[Row, ...]:
    theirs, ours = f"{side}.block.{{layer}}.layer.", f"model/{side}/{{layer}}/"
    branches = {"attention": "0.SelfAttention", "cross_attention": "1.EncDecAttention"}
    norms = {"attention_norm": "0", "cross_attention_norm": "1", "feed_forward_norm": "2"}
    last = "2.DenseReluDense."
    if side == "encoder":
        del branches["cross_attention"], norms["cross_attention_norm"]
        norms["feed_forward_norm"], last = "1", "1.DenseReluDense."
    linear, gate = "out in -> in out", ours + "feed_forward/gate/w"
    return (
        *(
            Row(
                f"{theirs}{branch}.{letter}.weight",
                f"{ours}{name}/{projection}/w",
                "(heads head_dim) embed -> embed heads head_dim",
            )
            for name, branch in branches.items()
            for letter, projection in (("q", "query"), ("k", "key"), ("v", "value"))
        ),
        *(
            Row(
                f"{theirs}{branch}.o.weight",
                f"{ours}{name}/output/w",
                "embed (heads head_dim) -> heads head_dim embed",
            )
            for name, branch in branches.items()
        ),
        *(
            Row(f"{theirs}{number}.layer_norm.weight", f"{ours}{name}/scale")
            for name, number in norms.items()
        ),
        Row(theirs + last + "wi.weight", ours + "feed_forward/up/w", linear, instead_of=gate),
        Row(theirs + last + "wi_0.weight", gate, linear),
        Row(theirs + last + "wi_1.weight", ours + "feed_forward/up/w", linear, beside=gate),
        Row(theirs + last + "wo.weight", ours + "feed_forward/down/w", linear),
        Row(
            f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            f"model/{side}/relative_bias/w",
            "buckets heads -> buckets heads",
        ),
        Row(f"{side}.final_layer_norm.weight", f"model/{side}_norm/scale"),
    )


_AS_IT_IS = "vocab embed -> vocab embed"
_SEPARATE = "model/embedding/w"

T5 = Family(
    model_type="t5",
    architecture="T5ForConditionalGeneration",
    network=_network,
    model_class=SequenceModel,
    network_field="model_tpl",
    model_entries=(Key("decoder_start_token_id", "start_id", 0, to_ours=lambda start: start or 0),),
    entries=(
        Key("vocab_size", "vocab_size", 32128),
        Key("d_model", "model_dims", 512),
        Key("d_ff", "hidden_dims", 2048),
        Key("d_kv", "dim_per_head", 64),
        Key("num_heads", "num_heads", 8),
        Key("num_layers", "num_encoder_layers", 6),
        Key(
            "num_decoder_layers",
            "num_decoder_layers",
            None,
            fallback=lambda network: network.num_encoder_layers,
        ),
        _Head(),
        _FeedForward(),
        Key(
            "relative_attention_num_buckets",
            tuple(f"{bias}.num_buckets" for bias in _BIASES),
            32,
        ),
        Key(
            "relative_attention_max_distance",
            tuple(f"{bias}.max_distance" for bias in _BIASES),
            128,
        ),
        Key(
            "layer_norm_epsilon",
            ("encoder_norm_tpl.epsilon", "decoder_norm_tpl.epsilon", "layer.norm_tpl.epsilon"),
            1e-6,
        ),
        Key(
            "dropout_rate",
            (
                "dropout_rate",
                "layer.dropout_rate",
                "layer.attention_tpl.dropout_rate",
                "layer.feed_forward_tpl.dropout_rate",
                f"{_CROSS}.dropout_rate",
            ),
            0.1,
        ),
        Fixed("is_encoder_decoder", value=True),
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
        Row("shared.weight", _SEPARATE, _AS_IT_IS),
        Row("shared.weight", "model/softmax/w", _AS_IT_IS, instead_of=_SEPARATE),
        Row("lm_head.weight", "model/softmax/w", "vocab embed -> embed vocab", beside=_SEPARATE),
        *_side_rows("encoder"),
        *_side_rows("decoder"),
    ),
    counts=(("num_layers",), ("num_decoder_layers",)),
)
