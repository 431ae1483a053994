"""Whisper (Radford et al., 2022): an encoder of log-mel features and a decoder of texts.

A sound is padded with silence to the length that the positions of the encoder stand for.
"""

from __future__ import annotations

from layerkit.config import Config
from layerkit.interop.hugging_face.family import Family
from layerkit.interop.hugging_face.keys import Entry, fixed, key
from layerkit.interop.hugging_face.parts import activation, layer_rows
from layerkit.interop.hugging_face.tensors import Row
from layerkit.layers.attention.cross import CrossAttention
from layerkit.layers.basic.normalizations import LayerNorm
from layerkit.layers.basic.positions import TrainablePositionalEmbedding
from layerkit.layers.speech.log_mel import LogMel
from layerkit.layers.speech.transformer_encoder import SpeechTransformerEncoder
from layerkit.layers.transformer.stacks import StackedTransformerRepeated
from layerkit.layers.transformer.transformer import Transformer
from layerkit.models.attention_decoder_model import AttentionDecoderModel
from layerkit.models.encoder_decoder import TransformerEncoderDecoder

_ENCODER, _DECODER = "encoder_tpl.stack_tpl.layer_tpl", "decoder_stack_tpl.layer_tpl"
_LAYERS = (_ENCODER, _DECODER)
_ATTENTIONS = (*(f"{layer}.attention_tpl" for layer in _LAYERS), f"{_DECODER}.cross_attention_tpl")
_DROPOUTS = tuple(f"{layer}.dropout_rate" for layer in _LAYERS)
_HIDDEN_DROPOUTS = tuple(f"{layer}.feed_forward_tpl.dropout_rate" for layer in _LAYERS)
# Samples of a position: two frames of 160.
_SAMPLES = 320


def _network() -> Config:
    norm = LayerNorm.HParams.config(scale_offset=0.0, epsilon=1e-5)
    stacks = []
    for is_decoder in (False, True):
        layer: Config = Transformer.HParams.config(norm_tpl=norm.clone())
        layer.attention_tpl.set(use_bias=True, use_key_bias=False)
        layer.feed_forward_tpl.has_bias = True
        if is_decoder:
            layer.cross_attention_tpl = CrossAttention.HParams.config(
                use_bias=True, use_key_bias=False
            )
        stacks.append(StackedTransformerRepeated.HParams.config(layer_tpl=layer))
    positions = TrainablePositionalEmbedding.HParams.config()
    encoder = SpeechTransformerEncoder.HParams.config(
        stack_tpl=stacks[0],
        position_tpl=positions.clone().set(is_frozen=True),
        final_norm_tpl=norm.clone(),
    )
    network: Config = TransformerEncoderDecoder.HParams.config(
        encoder_tpl=encoder,
        decoder_stack_tpl=stacks[1],
        decoder_norm_tpl=norm.clone(),
        position_tpl=positions,
        output_dropout_rate=0.0,
    )
    return network


def _add_features(model: Config) -> None:
    model.augmenter_tpl = None
    model.frontend_tpl = LogMel.HParams.config(
        mel_scale="slaney", has_unit_area=True, normalization="whisper"
    )


def _side_rows(side: str, ours: str) -> tuple[Row, ...]:
    attentions = {"attention": "self_attn"}
    if side == "decoder":
        attentions["cross_attention"] = "encoder_attn"
    start = f"model.{side}.layers.{{layer}}."
    names = {"feed_forward/up": "fc1", "feed_forward/down": "fc2"}
    names["feed_forward_norm"] = "final_layer_norm"
    for name, branch in attentions.items():
        letters = {"query": "q", "key": "k", "value": "v", "output": "out"}
        names |= {f"{name}/{n}": f"{branch}.{letter}_proj" for n, letter in letters.items()}
        names[f"{name}_norm"] = f"{branch}_layer_norm"
    return layer_rows({f"{ours}/{{layer}}/{a}": start + b for a, b in names.items()})


_TABLE, _CONV = "rows embed -> rows embed", "out in frame -> frame in out"
_NORMS = {"model/encoder/final_norm": "model.encoder.layer_norm"}
_NORMS |= {"model/decoder_norm": "model.decoder.layer_norm"}
_CONVS = [(f"model.encoder.conv{n + 1}", f"model/encoder/conv_{n}") for n in range(2)]

WHISPER = Family(
    model_type="whisper",
    architecture="WhisperForConditionalGeneration",
    network=_network,
    model_class=AttentionDecoderModel,
    network_field="model_tpl",
    entries=(
        fixed("tie_word_embeddings", value=True),
        fixed("scale_embedding", value=False),
        key("vocab_size", "vocab_size", 51865),
        key("d_model", ("model_dims", "encoder_tpl.model_dims"), 384),
        key("encoder_ffn_dim", "encoder_tpl.hidden_dims", 1536),
        key("decoder_ffn_dim", "hidden_dims", 1536),
        key("encoder_attention_heads", "encoder_tpl.num_heads", 6),
        key("decoder_attention_heads", "num_heads", 6),
        key("encoder_layers", "encoder_tpl.num_layers", 4),
        key("decoder_layers", "num_decoder_layers", 4),
        key("num_mel_bins", "encoder_tpl.num_bins", 80),
        key("max_source_positions", "encoder_tpl.position_tpl.max_length", 1500),
        key("max_target_positions", "position_tpl.max_length", 448),
        *(
            activation("activation_function", "gelu", f"{layer}.feed_forward_tpl.activation_tpl")
            for layer in _LAYERS
        ),
        key("dropout", ("dropout_rate", "encoder_tpl.dropout_rate", *_DROPOUTS), 0.0),
        key("attention_dropout", tuple(f"{path}.dropout_rate" for path in _ATTENTIONS), 0.0),
        key("activation_dropout", _HIDDEN_DROPOUTS, 0.0),
        fixed("is_encoder_decoder", value=True),
    ),
    model_entries=(
        Entry(lambda _, model: _add_features(model)),
        key("num_mel_bins", "frontend_tpl.num_bins", 80),
        key(
            "max_source_positions",
            "frontend_tpl.num_samples",
            1500,
            to_ours=lambda positions: positions * _SAMPLES,
            to_theirs=lambda samples: samples // _SAMPLES,
        ),
        key("decoder_start_token_id", "start_id", 50257, fallback=lambda model: 0),
    ),
    # Those of a classifier, of timestamps of words, of masks in training, and an older size.
    neutral=frozenset({"classifier_proj_size", "median_filter_width", "init_std"})
    | {f"mask_{axis}_{name}" for axis in ("time", "feature") for name in ("prob", "length")}
    | {"mask_time_min_masks", "mask_feature_min_masks", "num_hidden_layers"}
    | {"alignment_heads", "forced_decoder_ids"},
    prefix="model.",
    copies={"proj_out.weight": "model.decoder.embed_tokens.weight"},
    token_ids={"bos_token_id": 50256, "pad_token_id": 50256, "eos_token_id": 50256},
    rows=(
        Row("model.decoder.embed_tokens.weight", "model/softmax/w", _TABLE),
        Row("model.decoder.embed_positions.weight", "model/target_position/w", _TABLE),
        Row("model.encoder.embed_positions.weight", "model/encoder/position/w", _TABLE),
        *(Row(f"{theirs}.weight", f"{ours}/w", _CONV) for theirs, ours in _CONVS),
        *(Row(f"{theirs}.bias", f"{ours}/b") for theirs, ours in _CONVS),
        *layer_rows(_NORMS),
        *_side_rows("encoder", "model/encoder/stack"),
        *_side_rows("decoder", "model/decoder"),
    ),
    counts=("encoder_layers", "decoder_layers"),
)
