"""ModernBERT (Warner et al., 2024): an encoder with windows, rotary positions and gated layers.

By default, every third layer has full attention. The others see half the window on both sides of a
token. Both kinds have separate rotary positions. The first layer has no norm before its attention.
"""

from __future__ import annotations

from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.families.bert import encoder_network, masked_lm_head
from layerkit.interop.hugging_face.family import Family
from layerkit.interop.hugging_face.keys import ConfigFile, Entry, all_layers, fixed, key
from layerkit.interop.hugging_face.layer_types import FAR, NEAR, layer_types, stack_layers
from layerkit.interop.hugging_face.layouts import LINEAR
from layerkit.interop.hugging_face.parts import (
    activation,
    embedding_rows,
    layer_rows,
    tied_embedding,
)
from layerkit.interop.hugging_face.rotary import read_scaling, rotary_by_kind, rotary_config
from layerkit.interop.hugging_face.tensors import Row
from layerkit.layers.basic.normalizations import IdentityNorm
from layerkit.layers.transformer.transformer import TransformerFeedForward
from layerkit.models.bert import BertModel

# Older keys and defaults of the bases of the rotary positions.
_THETAS = {FAR: ("global_rope_theta", 160_000.0), NEAR: ("local_rope_theta", 10_000.0)}
_GATED_FEED_FORWARD = TransformerFeedForward.HParams.config(use_gate=True)
_NORMS = ("embedding_norm_tpl", "final_norm_tpl", "layer.norm_tpl")


def _set_rotary(file: ConfigFile, template: Config, kind: str) -> None:
    older = {"rope_theta": file.get(*_THETAS[kind]), **(file.get("rope_scaling", None) or {})}
    parameters = {**older, **read_scaling(file, kind)}
    template.attention_tpl.rotary_tpl = rotary_config(file, parameters)


def _write_rotary(near: Config | None, far: Config | None) -> dict[str, Any]:
    parameters = rotary_by_kind(near, far)
    older = {_THETAS[kind][0]: one["rope_theta"] for kind, one in parameters.items()}
    return {"rope_parameters": parameters, **older}


def _every_third(file: ConfigFile, layer: int) -> str:
    return NEAR if layer % file.get("global_attn_every_n_layers", 3) else FAR


def _drop_first_norm(_: ConfigFile, network: Config) -> None:
    layers = [layer.clone() for layer in all_layers(network)]
    norm = layers[0].norm_tpl
    layers[0].set(norm_tpl=IdentityNorm.HParams.config(), feed_forward_norm_tpl=norm)
    network.stack_tpl = stack_layers(layers)


def _write_period(network: Config) -> dict[str, Any]:
    """Return the key that versions read which ignore `layer_types`."""
    windows = [layer.attention_tpl.window for layer in all_layers(network)]
    far = (layer for layer, window in enumerate(windows) if layer and window is None)
    return {"global_attn_every_n_layers": next(far, network.num_layers)}


_OURS, _THEIRS = "lm/stack/{layer}/", "model.layers.{layer}."
_JOINED = {f"{_OURS}attention/{name}": _THEIRS + "attn.Wqkv" for name in ("query", "key", "value")}
_JOINED |= {f"{_OURS}feed_forward/{name}": _THEIRS + "mlp.Wi" for name in ("gate", "up")}
_WORDS = "model.embeddings.tok_embeddings.weight"
# Those of a classifier, of the head, of the implementation, and two that Transformers ignores.
# fmt: off
_NEUTRAL = frozenset({
    "classifier_activation", "classifier_bias", "classifier_dropout", "classifier_pooling",
    "decoder_bias", "deterministic_flash_attn", "initializer_cutoff_factor", "layer_norm_eps",
    "max_position_embeddings", "position_embedding_type", "reference_compile",
    "repad_logits_with_grad", "sparse_pred_ignore_index", "sparse_prediction",
})
# fmt: on

MODERNBERT = Family(
    model_type="modernbert",
    architecture="ModernBertForMaskedLM",
    network=lambda: encoder_network(feed_forward_tpl=_GATED_FEED_FORWARD.clone()),
    model_class=BertModel,
    entries=(
        tied_embedding(default=True),
        key("vocab_size", "vocab_size", 50368),
        key("hidden_size", "model_dims", 768),
        key("intermediate_size", "hidden_dims", 1152),
        key("num_hidden_layers", "num_layers", 22),
        key("num_attention_heads", "num_heads", 12),
        key("norm_eps", tuple(f"{norm}.epsilon" for norm in _NORMS), 1e-5),
        key("norm_bias", tuple(f"{norm}.use_bias" for norm in _NORMS), default=False),
        key("attention_bias", "layer.attention_tpl.use_bias", default=False),
        key("mlp_bias", "layer.feed_forward_tpl.has_bias", default=False),
        key("embedding_dropout", "dropout_rate", 0.0),
        key("mlp_dropout", "layer.feed_forward_tpl.dropout_rate", 0.0),
        fixed("attention_dropout", 0.0),
        activation("hidden_activation", "gelu"),
        masked_lm_head(
            "ModernBert",
            key("decoder_bias", "softmax_tpl.use_bias", default=True),
            key("classifier_bias", "head_tpl.has_bias", default=False),
            activation("classifier_activation", "gelu", "head_tpl.activation_tpl"),
        ),
        # `_write_rotary` writes it.
        Entry(lambda file, network: _set_rotary(file, network.stack_tpl.layer_tpl, FAR)),
        layer_types(
            _every_third,
            default_window=128,
            window="local_attention",
            to_ours=lambda whole: whole // 2 + 1,
            to_theirs=lambda half: 2 * (half - 1),
            make_near=lambda file, template: _set_rotary(file, template, NEAR),
            write_more=_write_rotary,
        ),
        Entry(_drop_first_norm, _write_period),
    ),
    neutral=_NEUTRAL,
    prefix="model.",
    copies={"decoder.weight": _WORDS},
    token_ids={"bos_token_id": 50281, "eos_token_id": 50282, "pad_token_id": 50283},
    rows=(
        *embedding_rows(_WORDS, head="decoder.weight"),
        Row("decoder.bias", "lm/softmax/b"),
        Row("head.dense.weight", "lm/head/linear/w", LINEAR),
        Row("head.dense.bias", "lm/head/bias/b"),
        *layer_rows(_JOINED, joined_axis=0),
        *layer_rows(
            {
                _OURS + "attention/output": _THEIRS + "attn.Wo",
                _OURS + "feed_forward/down": _THEIRS + "mlp.Wo",
                "lm/embedding_norm": "model.embeddings.norm",
                _OURS + "attention_norm": _THEIRS + "attn_norm",
                _OURS + "feed_forward_norm": _THEIRS + "mlp_norm",
                "lm/final_norm": "model.final_norm",
                "lm/head/norm": "head.norm",
            }
        ),
    ),
)
