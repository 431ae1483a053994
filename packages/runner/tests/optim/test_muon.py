"""Muon equals its definition in NumPy, for every layout of the weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from layerkit.base.base_layer import PARAMS
from layerkit.base.weights import unbox
from layerkit.layers import MultiHeadAttention
from layerkit_runner.optim.muon import muon
from layerkit_runner.optim.weight_selection import declarations_of, declared


def orthogonalize(matrix: np.ndarray) -> np.ndarray:
    """Return the result of five iterations of Newton-Schulz, by Jordan's definition."""
    x = matrix / (np.linalg.norm(matrix) + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def updates_of(attention: Any, grads: Any) -> Any:
    boxes = jax.eval_shape(attention.Instantiate().init_boxed, jax.random.key(0))[PARAMS]
    optimizer = muon(0.1, beta=0.9)
    with declared(declarations_of(boxes)):
        state = optimizer.init(grads)
        for _ in range(2):
            updates, state = jax.jit(optimizer.update)(grads, state, grads)
    return updates


def test_combined_projection_is_updated_as_separate_ones():
    sizes = {"input_dims": 4, "num_heads": 6, "num_kv_heads": 2, "dim_per_head": 3}
    separate = MultiHeadAttention.HParams.config(**sizes)
    params = unbox(separate.Instantiate().init_boxed(jax.random.key(0))[PARAMS])
    groups = params["query"]["w"].reshape(4, 2, 3, 3)
    heads = [groups, params["key"]["w"][:, :, None], params["value"]["w"][:, :, None]]
    combined = {"qkv": {"w": jnp.concatenate(heads, axis=2)}, "output": params["output"]}
    ours = updates_of(separate, params)
    theirs = updates_of(separate.clone().set(combined_qkv=True), combined)
    w = np.asarray(theirs["qkv"]["w"])
    np.testing.assert_allclose(w[:, :, :3].reshape(4, 6, 3), ours["query"]["w"], atol=1e-8)
    np.testing.assert_allclose(w[:, :, 3], ours["key"]["w"], atol=1e-8)
    np.testing.assert_allclose(w[:, :, 4], ours["value"]["w"], atol=1e-8)
    # Two equal gradients g give the momentum 1.9 g and the direction g + 0.9 · 1.9 g.
    query = np.asarray(params["query"]["w"]).reshape(4, 18) * (1 + 0.9 * 1.9)
    expected = -0.1 * 0.2 * np.sqrt(18) * orthogonalize(query)
    np.testing.assert_allclose(ours["query"]["w"].reshape(4, 18), expected, atol=1e-6)
    output = np.asarray(params["output"]["w"]).reshape(18, 4)
    expected = -0.1 * 0.2 * np.sqrt(18) * orthogonalize(output.T).T
    np.testing.assert_allclose(ours["output"]["w"].reshape(18, 4), expected, atol=1e-6)
