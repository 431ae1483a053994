"""Tests of scaled rotary frequencies, compared with published code."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.layers.basic.positions import RotaryPositionalEmbedding
from layerkit.ops.rotary_scaling import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NtkScaling,
    ProportionalScaling,
    YarnScaling,
    yarn_magnitude,
)

DIMS, BASE, TRAINED = 16, 10_000.0, 64
SHORT = tuple(1.0 + 0.1 * i for i in range(DIMS // 2))
LONG = tuple(2.0 + 1.5 * i for i in range(DIMS // 2))


def reference(kind, *, length=None, dims=DIMS, **parameters):
    """What transformers computes: frequencies and the factor of sines and cosines."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    fraction = parameters.pop("partial_rotary_factor", 1.0)
    config = transformers.LlamaConfig(
        hidden_size=2 * dims,
        num_attention_heads=2,
        head_dim=dims,
        max_position_embeddings=parameters.pop("max_position_embeddings", TRAINED),
        rope_parameters={
            "rope_type": kind,
            "rope_theta": BASE,
            "partial_rotary_factor": fraction,
            **parameters,
        },
    )
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
    return frequencies.numpy(), magnitude


def yarn(**fields):
    return YarnScaling(factor=4.0, original_max_position=TRAINED, **fields)


def of_yarn(**parameters):
    return {"factor": 4.0, "original_max_position_embeddings": TRAINED, **parameters}


CASES = {
    "linear": (LinearScaling(8.0), ("linear", {"factor": 8.0})),
    "proportional": (
        ProportionalScaling(0.3, factor=2.0),
        ("proportional", {"factor": 2.0, "partial_rotary_factor": 0.3}),
    ),
    # Dynamic scaling at twice the trained length: 4·128/64 - 3.
    "ntk": (NtkScaling(5.0), ("dynamic", {"factor": 4.0, "length": 2 * TRAINED})),
    "yarn": (yarn(), ("yarn", of_yarn())),
    "yarn, ramp elsewhere": (
        yarn(beta_fast=8.0, beta_slow=0.5),
        ("yarn", of_yarn(beta_fast=8.0, beta_slow=0.5)),
    ),
    "yarn, not truncated": (yarn(truncate=False), ("yarn", of_yarn(truncate=False))),
    "yarn, mscale": (
        yarn(mscale=0.7, mscale_all_dim=1.1),
        ("yarn", of_yarn(mscale=0.7, mscale_all_dim=1.1)),
    ),
    "yarn, factor given": (yarn(attention_factor=1.3), ("yarn", of_yarn(attention_factor=1.3))),
    "llama 3": (
        Llama3Scaling(8.0, 1.0, 4.0, TRAINED),
        (
            "llama3",
            {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": TRAINED,
            },
        ),
    ),
    "longrope, long": (
        LongRopeScaling(SHORT, LONG, TRAINED, 4 * TRAINED, longest_sequence=TRAINED + 1),
        ("longrope", {"length": TRAINED + 1}),
    ),
    "longrope, short": (
        LongRopeScaling(SHORT, LONG, TRAINED, 4 * TRAINED, longest_sequence=TRAINED),
        ("longrope", {"length": TRAINED}),
    ),
    "longrope, not extended": (
        LongRopeScaling(SHORT, LONG, TRAINED, TRAINED // 2, longest_sequence=1),
        ("longrope", {"length": 1, "max_position_embeddings": TRAINED // 2}),
    ),
    "longrope, factor given": (
        LongRopeScaling(SHORT, LONG, TRAINED, 4 * TRAINED, TRAINED + 1, attention_factor=1.4),
        ("longrope", {"length": TRAINED + 1, "attention_factor": 1.4}),
    ),
}


@pytest.mark.parametrize("case", list(CASES))
def test_frequencies_and_magnitude_equal_transformers(case):
    scaling, (kind, parameters) = CASES[case]
    if kind == "longrope":
        parameters = {
            "short_factor": list(SHORT),
            "long_factor": list(LONG),
            "original_max_position_embeddings": TRAINED,
            "max_position_embeddings": 4 * TRAINED,
            **parameters,
        }
    frequencies, magnitude = reference(kind, **parameters)
    layer = RotaryPositionalEmbedding(dims=DIMS, max_timescale=BASE, scaling=scaling)
    np.testing.assert_allclose(layer.frequencies(), frequencies, rtol=1e-6)
    assert scaling.magnitude() == pytest.approx(magnitude, rel=1e-6)
    plain = RotaryPositionalEmbedding(dims=DIMS, max_timescale=BASE).frequencies()
    assert np.abs(frequencies / plain - 1).max() > 0.1


def test_longrope_rotates_each_row_by_the_factors_of_its_length():
    scaling = LongRopeScaling(SHORT, LONG, 4, 16)
    layers = [
        RotaryPositionalEmbedding(
            dims=DIMS, scaling=dataclasses.replace(scaling, longest_sequence=length)
        )
        for length in (None, 4, 5)
    ]
    x = jax.random.normal(jax.random.key(0), (2, 6, 1, DIMS))
    # The documents of the first row have up to four tokens, that of the second five.
    positions = jnp.array([[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 0]])
    run = jax.jit(lambda x: [layer.apply({}, x, positions) for layer in layers])
    by_row, short, long = run(x)
    np.testing.assert_array_equal(by_row, jnp.stack([short[0], long[1]]))
    assert jnp.abs(short - long).max() > 0.1


def test_partial_rotary_has_the_frequencies_of_a_smaller_head():
    frequencies, _ = reference("yarn", dims=2 * DIMS, partial_rotary_factor=0.5, **of_yarn())
    layer = RotaryPositionalEmbedding(
        dims=2 * DIMS, max_timescale=BASE, fraction=0.5, scaling=yarn()
    )
    np.testing.assert_allclose(layer.frequencies(), frequencies, rtol=1e-6)


def test_scaling_changes_frequencies_as_documented():
    x = np.random.default_rng(0).normal(size=(1, 3, 2, DIMS)).astype(np.float32)
    far, near = jnp.array([[8, 24, 400]]), jnp.array([[1, 3, 50]])
    scaled = RotaryPositionalEmbedding(dims=DIMS, scaling=LinearScaling(8.0)).apply({}, x, far)
    plain = RotaryPositionalEmbedding(dims=DIMS).apply({}, x, near)
    np.testing.assert_allclose(scaled, plain, atol=1e-5)
    # The fastest pair makes many turns within the trained context, so YaRN turns it as before.
    yarned = RotaryPositionalEmbedding(dims=DIMS, scaling=yarn()).apply({}, x, far)
    plain = RotaryPositionalEmbedding(dims=DIMS).apply({}, x, far)
    fastest = [0, DIMS // 2]
    magnitude = yarn_magnitude(4.0)
    np.testing.assert_allclose(yarned[..., fastest], magnitude * plain[..., fastest], rtol=1e-5)
