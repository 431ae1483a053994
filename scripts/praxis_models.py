"""Cases of `praxis_reference.py` that are about whole models, first values and defaults."""

from __future__ import annotations

import numpy as np
from praxis import base_layer, decoder_hparams, pax_fiddle, py_utils
from praxis.layers import (
    attentions,
    embedding_softmax,
    models,
    multi_query_attention,
    normalizations,
    transformer_models,
    transformers,
)


def language_models(record, run, random):
    """Whole decoders whose norms and attention have several forms."""
    ids = random.integers(0, 7, (2, 5))
    norm = pax_fiddle.Config(normalizations.LayerNorm)
    multi_query = pax_fiddle.Config(
        multi_query_attention.MultiQueryDotProductAttention, dim_per_head=2
    )
    cases = {
        "primer_hybrid": (1, {"norm_policy": "primer_hybrid"}, {}),
        "post": (1, {"norm_policy": "post"}, {}),
        "post_skip": (2, {"norm_policy": "post_skip"}, {}),
        "qk_norm": (2, {}, {"ln_tpl": norm, "use_rotary_position_emb": True}),
        "multi_query": (1, {"tr_atten_tpl": multi_query}, {}),
        "multi_query_repeated": (2, {"tr_atten_tpl": multi_query}, {"use_bias": False}),
    }
    for name, (repeats, fields, attention) in cases.items():
        layer = pax_fiddle.Config(transformers.Transformer, **fields)
        layer.tr_atten_tpl.set(**attention)
        stack = pax_fiddle.Config(
            transformers.StackedTransformer,
            model_dims=4,
            hidden_dims=6,
            num_heads=2,
            num_layers=3 - repeats,
            transformer_layer_params_tpl=layer,
        )
        if repeats > 1:
            stack = pax_fiddle.Config(
                transformers.StackedTransformerRepeated, block=stack, x_times=repeats
            )
        weights, outputs, _ = run(
            transformer_models.TransformerLm,
            ids,
            np.zeros(ids.shape, np.float32),
            model_dims=4,
            vocab_size=7,
            stacked_transformer_tpl=stack,
        )
        flat = py_utils.NestedMap.FromNestedDict(weights).FlattenItems()
        record(
            f"lm_{name}",
            ids=ids,
            weights={f"lm/{path.replace('.', '/')}": weight for path, weight in flat},
            logits=outputs.logits,
        )


def first_deviations(record, *_):
    """Record the standard deviations of the first values of relative biases and of routers."""
    layers = {
        "relative_bias": (
            "wrb",
            pax_fiddle.Config(attentions.RelativeBias, num_heads=6, name="bias"),
            (np.zeros((1, 2), np.int32), np.zeros((1, 2), np.int32)),
        ),
        "router": (
            "gate",
            pax_fiddle.Config(
                transformers.TransformerFeedForwardMoe,
                name="experts",
                input_dims=32,
                hidden_dims=6,
                num_experts=4,
                num_groups=1,
            ),
            (np.zeros((1, 4, 32), np.float32), np.zeros((1, 4), np.float32)),
        ),
    }
    result = {}
    for name, (weight, layer, inputs) in layers.items():
        declared = base_layer.instantiate(layer).abstract_init_with_metadata(*inputs)
        init = declared["params"][weight].init
        result[name] = init.scale / (np.sqrt(3) if init.method == "uniform" else 1)
    record("first_deviations", **result)


# Fields of layers, models and decoders whose defaults differ here; a field may be one of a field.
DEFAULTS = {
    transformer_models.TransformerLm: ("position_emb_tpl",),
    transformer_models.TransformerEncoderDecoder: ("position_emb_tpl",),
    attentions.DotProductAttention: ("use_bias", "internal_enable_per_dim_scale"),
    transformers.TransformerFeedForward: ("has_bias",),
    embedding_softmax.FullSoftmax: ("feed_forward_tpl.has_bias",),
    embedding_softmax.SharedEmbeddingSoftmax: ("feed_forward_tpl.has_bias",),
    transformers.TransformerFeedForwardMoe: (
        "use_gated_activation",
        "activation_tpl",
        "unadjusted_expert_capacity_factor",
        "moe_load_balance_loss_weight",
    ),
    transformers.StackedTransformer: ("num_groups",),
    transformers.StackedTransformerRepeated: ("checkpoint_policy",),
    models.LanguageModel: ("decoder_tpl",),
    decoder_hparams.SampleDecoderHParams: ("k", "eos_id", "max_decode_steps"),
    decoder_hparams.BeamSearchHParams: ("beam_size", "eos_id", "max_decode_steps"),
}


def defaults(record, *_):
    """Record the text of the defaults of some fields; a template is the name of its class."""
    result = {}
    for owner, fields in DEFAULTS.items():
        for field in fields:
            value = pax_fiddle.Config(owner)
            for name in field.split("."):
                value = getattr(value, name)
            if isinstance(value, pax_fiddle.Config):
                value = pax_fiddle.get_callable(value).__name__
            elif isinstance(value, decoder_hparams.DecoderHParams):
                value = type(value).__name__
            result[f"{owner.__name__}.{field}"] = getattr(value, "name", str(value))
    record("defaults", **result)
