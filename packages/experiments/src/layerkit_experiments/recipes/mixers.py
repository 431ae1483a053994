"""Hybrids: patterns of layers with attention and with mixers that carry a state."""

from __future__ import annotations

from typing import Any

from layerkit import layers
from layerkit.config import Config, fields_of
from layerkit.config.checks import require
from layerkit_experiments.recipes.language_model import decoder, repeat_layers
from layerkit_runner.config.experiment import refuse_unread

_MIXERS = {
    "gated_delta_net": "GatedDeltaNet",
    "kimi_delta_attention": "KimiDeltaAttention",
    "lstm": "Frnn",
    "mamba2": "Mamba2",
}

_OF_ATTENTION = (
    *(
        "QK_CLIP",
        "QK_NORM",
        "ATTENTION_BIAS",
        "COMBINE_QKV",
        "NUM_KV_HEADS",
        "WINDOW",
        "PER_DIM_SCALE",
    ),
    *("ATTENTION_BACKEND", "ATTENTION_LOGIT_CAP"),
)


def hybrid_decoder(fields: Any) -> Config:
    """Return the config of a `decoder` whose layers repeat the mixers of MIXERS.

    Mixers have NUM_HEADS states of the size of a head of attention; `lstm` has one of MODEL_DIMS.
    """
    is_known = fields.MIXERS and {*fields.MIXERS} <= {"attention", *_MIXERS}
    expected = f"one or more of attention, {', '.join(_MIXERS)}"
    require(bool(is_known), None, "MIXERS", fields.MIXERS, expected)
    if "attention" not in fields.MIXERS:
        refuse_unread(fields, _OF_ATTENTION, f"MIXERS={fields.MIXERS} without attention")
    model = decoder(fields)
    plain = model.lm_tpl.stack_tpl.layer_tpl
    head = fields.DIMS_PER_HEAD or fields.MODEL_DIMS // fields.NUM_HEADS
    pattern = []
    for name in fields.MIXERS:
        layer = plain.clone()
        if name != "attention":
            mixer = getattr(layers, _MIXERS[name])
            sizes = fields_of(
                mixer,
                num_key_heads=fields.NUM_HEADS,
                num_value_heads=fields.NUM_HEADS,
                key_dim_per_head=head,
                value_dim_per_head=head,
                output_tpl=plain.attention_tpl.output_tpl.clone(),
            )
            layer.attention_tpl = Config(mixer, **sizes)
        pattern.append(layer)
    repeat_layers(model, *pattern)
    return model
