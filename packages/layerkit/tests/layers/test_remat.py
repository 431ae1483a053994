"""Policies of rematerialisation: the same results, and just the residuals that each one names."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from layerkit.layers.remat import REMAT_POLICIES, check_remat_policy, remat

X = jax.random.normal(jax.random.key(0), (2, 3, 4))
W = jax.random.normal(jax.random.key(1), (4, 5))


class Attends(nn.Module):
    """One product without batch dimensions, then one with, each before something that bends."""

    policy: str
    in_scan: bool = False

    @nn.compact
    def __call__(self, x, w):
        def body(module, x, w):
            hidden = jnp.sin(x @ w)  # [2, 3, 5]
            logits = jnp.einsum("bqd,bkd->bqk", hidden, hidden)  # [2, 3, 3]
            return jnp.sum(jnp.tanh(logits))

        return remat(body, self.policy, in_scan=self.in_scan)(self, x, w)


def residual_shapes(policy):
    """Shapes of what the backward pass is handed, apart from `x` and `w` themselves."""

    def backward(x, w):
        return jax.vjp(lambda x, w: Attends(policy).apply({}, x, w), x, w)[1]

    shapes = [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(backward, X, W))]
    return {shape for shape in shapes if shape and shape not in (X.shape, W.shape)}


def test_each_policy_keeps_what_it_names():
    assert residual_shapes("none") == {(2, 3, 5), (2, 3, 3)}
    assert residual_shapes("dots") == {(2, 3, 5), (2, 3, 3)}
    assert residual_shapes("dots_no_batch") == {(2, 3, 5)}
    assert residual_shapes("full") == set()


def test_dots_recomputes_what_bends():
    def count(policy, name):
        def gradient(x, w):
            return jax.grad(lambda x: Attends(policy).apply({}, x, w))(x)

        return str(jax.make_jaxpr(gradient)(X, W)).count(f" = {name}")

    # Without a policy sin and tanh are computed once; with `dots` their inputs are kept and they
    # are computed again, but not the products; the others compute one or both of them again.
    assert count("none", "sin ") == count("none", "tanh ") == 1
    assert count("dots", "sin ") == count("dots", "tanh ") == 2
    assert count("dots", "dot_general") == count("none", "dot_general") == 5
    assert count("dots_no_batch", "dot_general") == 6
    assert count("full", "dot_general") == 7


@pytest.mark.parametrize("in_scan", [False, True])
@pytest.mark.parametrize("policy", REMAT_POLICIES)
def test_values_and_gradients_stay(policy, in_scan):
    def run(policy):
        module = Attends(policy, in_scan=in_scan)
        return jax.jit(jax.value_and_grad(lambda w: module.apply({}, X, w)))(W)

    def assert_close(a, b):  # XLA merges other operations where less is kept
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)

    jax.tree.map(assert_close, run(policy), run("none"))


def test_none_leaves_the_function_alone():
    def body(module, x):
        return x

    assert remat(body, "none", in_scan=False) is body


def test_an_unknown_policy_is_refused_with_the_near_one():
    with pytest.raises(ValueError) as caught:
        check_remat_policy("ful", owner="Repeat(stack)")
    assert str(caught.value) == (
        "Repeat(stack): remat='ful' is not a policy; did you mean 'full'?"
        " Policies: none, dots, dots_no_batch, full."
    )
