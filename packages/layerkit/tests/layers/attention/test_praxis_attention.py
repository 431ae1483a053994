"""Primer's convolutions and local attention in blocks equal Praxis, with their gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.base_layer import CACHE, PROMPT_CACHE
from layerkit.layers import CausalConvolution, MultiHeadAttention, TransformerXLAttention
from layerkit.ops.attention import local_blocks
from layerkit.ops.attention.masks import AttentionMask, row_positions, segments_from_paddings

DIMS, HEADS, SCALE = 4, 2, 2**-0.5


def ours(weights, *, power=1):
    """Weights of Praxis, or gradients with power=-1, under our names."""
    tree = {}
    for name, value in weights.items():
        if name.startswith("dconv_"):
            child = {"q": "query_conv", "k": "key_conv", "v": "value_conv"}[name[-1]]
            tree[child] = {"w": np.stack([value[f"dconv_{tap}"] for tap in (2, 1, 0)])}
        elif name == "post":
            tree["output"] = {"w": np.transpose(value["w"], (1, 2, 0)), "b": value["b"]}
        elif name == "pos_proj":
            tree["position_projection"] = value
        else:  # Praxis adds u and v to scaled queries.
            tree[name] = value / SCALE**power if name in ("u", "v") else value
    return tree


@pytest.mark.parametrize(
    ("name", "layer_class", "fields"),
    [
        (
            "primer_attention",
            MultiHeadAttention,
            {"qkv_conv_tpl": CausalConvolution.HParams.config(width=3)},
        ),
        pytest.param("local_attention", MultiHeadAttention, {"window": 3}, marks=pytest.mark.slow),
        ("local_attention_xl", TransformerXLAttention, {"window": 3}),
    ],
)
def test_layer_and_its_gradient_equal_praxis(praxis, monkeypatch, name, layer_class, fields):
    monkeypatch.setattr(local_blocks, "_SMALLEST_BLOCK", 1)
    case = praxis(name)
    layer = layer_class(input_dims=DIMS, num_heads=HEADS, use_bias=True, train=False, **fields)
    batch, length = case["x"].shape[:2]
    if name == "primer_attention":
        segments = jnp.asarray(case["segments"], jnp.int32)
        mask = AttentionMask.causal_mask(batch, length, segment_ids=segments)
    else:
        segments = segments_from_paddings(jnp.asarray(case["paddings"]))
        mask = AttentionMask.bidirectional_mask(batch, length, segment_ids=segments)

    def loss(params, x):
        positions = row_positions(batch, length)
        outputs = layer.apply({"params": params}, x, mask=mask, positions=positions)
        return jnp.sum(outputs * case["probe"]), outputs

    grad = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    (gradient, of_inputs), outputs = grad(ours(case["weights"]), jnp.asarray(case["x"]))
    is_token = (segments != 0)[..., None]
    np.testing.assert_allclose(outputs * is_token, case["outputs"] * is_token, atol=1e-5)
    np.testing.assert_allclose(of_inputs, case["input_gradient"], atol=1e-4)
    expected = ours(case["gradient"], power=-1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), gradient, expected)


@pytest.mark.slow
def test_samples_that_share_a_prompt_equal_lazy_prefix_broadcast_of_praxis(praxis):
    case = praxis("lazy_prefix_broadcast")
    layer = MultiHeadAttention(input_dims=DIMS, num_heads=HEADS, use_bias=True, logit_cap=2.0)
    prompts, samples = case["prompts"], case["samples"]
    (rows, width), steps = prompts.shape[:2], samples.shape[1]
    variables = {"params": ours(case["weights"])}

    def extend(held, x, time_step):
        at = {"time_step": time_step, "positions": row_positions(*x.shape[:2])}
        return layer.apply({**variables, **held}, x, **at, method="extend_step", mutable=[CACHE])

    @jax.jit
    def run():
        _, held = layer.apply(variables, rows, width + steps, method="init_cache", mutable=[CACHE])
        shared = extend(held, prompts, 0)[1][CACHE]
        # The slots of samples hold the tokens before the first step: position 2 in slot 0, 1 in 1.
        last = {name: jnp.repeat(x[:, :, jnp.array([2, 1])], 2, 0) for name, x in shared.items()}
        outputs = []
        for step in range(steps):
            held = {CACHE: last, PROMPT_CACHE: shared}
            output, state = extend(held, samples[:, step : step + 1], jnp.int32(width + step))
            last = state[CACHE]
            outputs.append(output)
        return jnp.concatenate(outputs, axis=1)

    np.testing.assert_allclose(run(), case["outputs"], rtol=1e-5, atol=1e-5)
