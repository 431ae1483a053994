"""BART (Lewis et al., 2019): an encoder and a decoder with norms after branches and embeddings.

Positions are learned, and the first two rows of their tables are not used.
"""

from __future__ import annotations

from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.family import Family
from layerkit.interop.hugging_face.keys import ConfigFile, Entry, fixed, get_field, key, set_field
from layerkit.interop.hugging_face.parts import activation, layer_rows
from layerkit.interop.hugging_face.tensors import Row
from layerkit.layers.attention.cross import CrossAttention
from layerkit.layers.basic.normalizations import LayerNorm
from layerkit.layers.basic.positions import TrainablePositionalEmbedding
from layerkit.layers.transformer.stacks import StackedTransformerRepeated
from layerkit.layers.transformer.transformer import Transformer
from layerkit.models.encoder_decoder import TransformerEncoderDecoder
from layerkit.models.sequence_model import SequenceModel

_SIDES = ("encoder", "decoder")


def _network() -> Config:
    norm = LayerNorm.HParams.config(scale_offset=0.0, epsilon=1e-5)
    network: Config = TransformerEncoderDecoder.HParams.config(
        position_tpl=TrainablePositionalEmbedding.HParams.config(offset=2),
        embedding_norm_tpl=norm,
        encoder_norm_tpl=None,
        decoder_norm_tpl=None,
        output_dropout_rate=0.0,
    )
    for side in _SIDES:
        layer: Config = Transformer.HParams.config(norm_policy="post", norm_tpl=norm.clone())
        layer.attention_tpl.use_bias = True
        layer.feed_forward_tpl.has_bias = True
        if side == "decoder":
            layer.cross_attention_tpl = CrossAttention.HParams.config(use_bias=True)
        stack = StackedTransformerRepeated.HParams.config(layer_tpl=layer)
        setattr(network, f"{side}_stack_tpl", stack)
    return network


def _size(name: str, field: str, default: int) -> Entry:
    """Return the entry of a size of both sides, which is a field of the network if it is equal."""
    keys = {side: f"{side}_{name}" for side in _SIDES}

    def read(file: ConfigFile, network: Config) -> None:
        sizes = {side: file.get(keys[side], default) for side in _SIDES}
        if len(set(sizes.values())) == 1:
            set_field(network, field, sizes["encoder"])
        else:
            for side, size in sizes.items():
                set_field(network, f"{side}_stack_tpl.layer_tpl.{field}", size)

    def write(network: Config) -> dict[str, Any]:
        whole = get_field(network, field)
        return {
            name: whole or get_field(network, f"{side}_stack_tpl.layer_tpl.{field}")
            for side, name in keys.items()
        }

    return Entry(read, write)


def _side_rows(side: str, inputs: str) -> tuple[Row, ...]:
    theirs, ours = f"model.{side}.layers.{{layer}}.", f"model/{side}/{{layer}}/"
    attentions = {"attention": "self_attn"}
    if side == "decoder":
        attentions["cross_attention"] = "encoder_attn"
    names: dict[str, str] = {}
    for name, branch in attentions.items():
        letters = {"query": "q", "key": "k", "value": "v", "output": "out"}
        names |= {f"{ours}{name}/{n}": f"{theirs}{branch}.{x}_proj" for n, x in letters.items()}
        names[f"{ours}{name}_norm"] = f"{theirs}{branch}_layer_norm"
    names |= {ours + "feed_forward/up": theirs + "fc1", ours + "feed_forward/down": theirs + "fc2"}
    names[ours + "feed_forward_norm"] = theirs + "final_layer_norm"
    names[f"model/{inputs}_embedding_norm"] = f"model.{side}.layernorm_embedding"
    positions = f"model.{side}.embed_positions.weight"
    return (Row(positions, f"model/{inputs}_position/w", _TABLE), *layer_rows(names))


_TABLE = "rows embed -> rows embed"
_CROSS = "decoder_stack_tpl.layer_tpl.cross_attention_tpl.dropout_rate"

BART = Family(
    model_type="bart",
    architecture="BartForConditionalGeneration",
    network=_network,
    model_class=SequenceModel,
    network_field="model_tpl",
    model_entries=(key("decoder_start_token_id", "start_id", 2, fallback=lambda model: 0),),
    entries=(
        key("scale_embedding", "softmax_tpl.scale_by_sqrt_dims", default=False),
        # Without ties, both sides and the head have separate embeddings.
        fixed("tie_word_embeddings", value=True),
        key("vocab_size", "vocab_size", 50265),
        key("d_model", "model_dims", 1024),
        _size("ffn_dim", "hidden_dims", 4096),
        _size("attention_heads", "num_heads", 16),
        key("encoder_layers", "num_encoder_layers", 12),
        key("decoder_layers", "num_decoder_layers", 12),
        key("max_position_embeddings", "position_tpl.max_length", 1024),
        activation("activation_function", "gelu"),
        key("dropout", ("dropout_rate", "layer.dropout_rate"), 0.1),
        key("attention_dropout", ("layer.attention_tpl.dropout_rate", _CROSS), 0.0),
        key("activation_dropout", "layer.feed_forward_tpl.dropout_rate", 0.0),
        fixed("is_encoder_decoder", value=True),
    ),
    # Those of a classifier, another name of `encoder_layers`, and an older option of generation.
    neutral=frozenset(["classif_dropout", "classifier_dropout", "init_std", "num_hidden_layers"])
    | {"force_bos_token_to_be_generated"},
    prefix="model.",
    copies={
        "lm_head.weight": "model.shared.weight",
        "model.encoder.embed_tokens.weight": "model.shared.weight",
        "model.decoder.embed_tokens.weight": "model.shared.weight",
    },
    buffers=r"\b(encoder|decoder)\.version$",
    # A bias of the logits, which is not trained.
    zeros=r"^final_logits_bias$",
    token_ids={"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2},
    rows=(
        Row("model.shared.weight", "model/softmax/w", _TABLE),
        *_side_rows("encoder", "source"),
        *_side_rows("decoder", "target"),
    ),
    counts=("encoder_layers", "decoder_layers"),
)
