"""Smooth bounds of logits and the arrays that their gradients keep."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from layerkit.ops.soft_cap import soft_cap


def test_soft_cap_bounds_large_and_keeps_small_logits():
    logits = jnp.array([-1e6, -0.01, 0.0, 0.01, 30.0, 1e6])
    expected = [-30.0, -0.01, 0.0, 0.01, 30.0 * np.tanh(1.0), 30.0]
    np.testing.assert_allclose(soft_cap(logits, 30.0), expected, rtol=1e-5)
    assert soft_cap(logits, None) is logits


def test_backward_pass_of_soft_cap_keeps_one_array():
    logits = jnp.linspace(-50.0, 50.0, 21)
    _, backward = jax.vjp(lambda logits: soft_cap(logits, 30.0), logits)
    assert [leaf.shape for leaf in jax.tree.leaves(backward) if leaf.ndim] == [logits.shape]
    (result,) = backward(jnp.ones_like(logits))
    np.testing.assert_allclose(result, 1.0 / np.cosh(logits / 30.0) ** 2, rtol=1e-5)
