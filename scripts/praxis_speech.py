"""Cases of `praxis_reference.py` that are about speech."""

from __future__ import annotations

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from praxis import base_layer, pax_fiddle
from praxis.layers import attentions, conformers, convolutions, spectrum_augmenter

RANDOM = np.random.default_rng(44)


def normal(*shape, scale=1.0):
    """Return normal numbers of few digits, which JSON holds exactly."""
    return np.round(RANDOM.normal(0.0, scale, shape), 3).astype(np.float32)


def conformer(x, probe, paddings, attention, *, is_causal=False, **fields):
    """Return a layer's weights, outputs, and the gradient of the sum of outputs times `probe`."""
    attention = attention.set(use_bias=True, internal_enable_per_dim_scale=False)
    layer = base_layer.instantiate(
        pax_fiddle.Config(
            conformers.Conformer,
            name="layer",
            input_dims=4,
            model_dims=4,
            kernel_size=3,
            ffn_dim_multiplier=2,
            atten_num_heads=2,
            trans_atten_tpl=pax_fiddle.Config(
                conformers.SelfAttentionWithNormAndResidual, self_atten_tpl=attention
            ),
            lconv_tpl=pax_fiddle.Config(convolutions.LightConv1D, is_causal=is_causal),
            **fields,
        )
    )
    with base_layer.JaxContext.new_context(hparams=base_layer.JaxContext.HParams(do_eval=True)):
        mask = attentions.causal_mask(x) if is_causal else None
        variables = layer.init(jax.random.PRNGKey(0), x, paddings, mask)
        weights = jax.tree_util.tree_map(lambda w: normal(*w.shape, scale=0.5), variables["params"])
        moments = jax.tree_util.tree_map(
            lambda w: np.abs(normal(*w.shape)) + 0.5, variables["non_trainable"]
        )

        def loss(weights):
            held = {"params": weights, "non_trainable": moments}
            outputs = layer.apply(held, x, paddings, mask)
            return jnp.sum(outputs * probe * (1 - paddings[..., None])), outputs

        gradient, outputs = jax.grad(loss, has_aux=True)(weights)
    return {
        "x": x,
        "probe": probe,
        "paddings": paddings,
        "weights": weights,
        "moments": moments,
        "outputs": outputs,
        "gradient": gradient,
    }


def speech(record):
    """Conformer layers with their gradients, and masks of SpecAugment."""
    x, probe, paddings = normal(2, 6, 4), normal(2, 6, 4), np.zeros((2, 6), np.float32)
    paddings[1, 4:] = 1.0
    xl = pax_fiddle.Config(conformers.DotProductAttentionWithContextXL, rel_pos_emb_dim=4)
    near = pax_fiddle.Config(
        conformers.DotProductAttentionWithContext, left_context=3, right_context=2
    )
    cases = {
        "conformer_xl": {"attention": xl},
        "conformer_local": {"attention": near, "layer_order": "conv_before_mhsa"},
        "conformer_causal": {"attention": xl, "is_causal": True},
    }
    for name, fields in cases.items():
        record(name, **conformer(x, probe, paddings, **fields))
    draws = np.round(RANDOM.uniform(size=(2, 3, 4)), 3).astype(np.float32)
    lengths = np.array([20, 11, 3])
    layer = base_layer.instantiate(
        pax_fiddle.Config(spectrum_augmenter.SpectrumAugmenter, name="layer")
    )
    for name, options in {
        "span_mask_longest": {"max_length": 6},
        "span_mask_ratio": {"max_ratio": 0.4},
        "span_mask_counted": {"max_ratio": 0.4, "masks_per_frame": 0.1},
    }.items():
        with (
            mock.patch.object(jax.random, "uniform", side_effect=list(draws)),
            mock.patch.object(type(layer), "next_prng_key"),
        ):
            kept = layer._get_mask(3, lengths, 20, multiplicity=4, **options)
        record(name, draws=draws, lengths=lengths, kept=np.asarray(kept, np.float32))
