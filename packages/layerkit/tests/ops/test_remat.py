"""Tests of rematerialization policies: equal results, and the residuals of each policy."""

from __future__ import annotations

import contextlib
import functools
import io
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from layerkit.errors import ConfigError
from layerkit.layers.transformer.stacks import (
    StackedTransformer,
    StackedTransformerRepeated,
)
from layerkit.ops.attention.masks import AttentionMask, row_positions
from layerkit.ops.remat import (
    REMAT_POLICIES,
    check_remat_policy,
    remat,
)

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


def test_policy_saves_its_named_values():
    assert residual_shapes("none") == {(2, 3, 5), (2, 3, 3)}
    assert residual_shapes("dots") == {(2, 3, 5), (2, 3, 3)}
    assert residual_shapes("dots_no_batch") == {(2, 3, 5)}
    assert residual_shapes("full") == set()


def test_dots_policy_recomputes_elementwise_operations():
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


BATCH, LENGTH, DIMS = 3, 5, 8
ROWS = jax.random.normal(jax.random.key(0), (BATCH, LENGTH, DIMS))


def stack_loss(stack, policy, **fields):
    """A loss of (weights, inputs) through two layers, and random weights for it."""
    config = stack.HParams.config(
        num_layers=2, input_dims=DIMS, hidden_dims=12, num_heads=4, remat=policy
    )
    config.layer_tpl.set(**fields)
    layer = config.Instantiate()
    random = np.random.default_rng(7)
    shapes = jax.eval_shape(layer.init, jax.random.key(0))
    variables = jax.tree.map(lambda x: random.normal(0, 0.3, x.shape).astype(np.float32), shapes)
    mask, positions = AttentionMask.causal_mask(BATCH, LENGTH), row_positions(BATCH, LENGTH)

    def loss(variables, x):
        return jnp.sum(jnp.sin(layer.apply(variables, x, mask=mask, positions=positions)))

    return loss, variables


def kept_by_scan(policy, **fields):
    """Types of what a scan hands to its backward pass, apart from weights."""
    loss, variables = stack_loss(StackedTransformerRepeated, policy, **fields)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        jax.ad_checkpoint.print_saved_residuals(loss, variables, ROWS)
    lines = printed.getvalue().splitlines()
    return Counter(line.split()[0] for line in lines if "output of scan" in line)


HEADS, MODEL = f"[2,{BATCH},{LENGTH},4,2]", f"[2,{BATCH},{LENGTH},{DIMS}]"


def test_named_policies_save_only_their_values_of_a_transformer():
    # Beside the input: queries, keys, values; what attention gave, which the second norm needs.
    # What the feed-forward gave is only added, so its gradient needs nothing.
    assert kept_by_scan("full") == kept_by_scan("residual") == {f"f32{MODEL}": 1}
    assert kept_by_scan("attention_out") == {f"f32{MODEL}": 2}
    assert kept_by_scan("projections") == {f"f32{MODEL}": 2, f"f32{HEADS}": 3}
    assert kept_by_scan("offload_residual") == {f"f32<host>{MODEL}": 1}
    assert kept_by_scan("offload_projections") == {f"f32<host>{MODEL}": 2, f"f32<host>{HEADS}": 3}
    # A norm after a branch needs what the branch gave.
    assert kept_by_scan("projections", norm_policy="pre_post") == {
        f"f32{MODEL}": 3,
        f"f32{HEADS}": 3,
    }


def test_listed_names_are_saved_or_offloaded():
    hidden = f"[2,{BATCH * LENGTH},12]"
    assert kept_by_scan("save:query, feed_forward_hidden") == {
        f"f32{MODEL}": 1,
        f"f32{HEADS}": 1,
        f"f32{hidden}": 1,
    }
    assert kept_by_scan("save:key;offload:residual,feed_forward_hidden") == {
        f"f32<host>{MODEL}": 1,
        f"f32{HEADS}": 1,
        f"f32<host>{hidden}": 1,
    }


@pytest.mark.parametrize(
    ("stack", "policy"),
    [
        (StackedTransformerRepeated, "save:query,key;offload:residual,feed_forward_hidden"),
        *(
            pytest.param(stack, policy, marks=pytest.mark.slow)
            for stack in (StackedTransformer, StackedTransformerRepeated)
            for policy in REMAT_POLICIES
            if policy != "none"
        ),
    ],
)
def test_policies_do_not_change_a_transformer(stack, policy):
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, stacked(stack, policy), stacked(stack, "none"))


@functools.cache
def stacked(stack, policy):
    """A value of a stack and its gradients."""
    loss, variables = stack_loss(stack, policy)
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(variables, ROWS)


@pytest.mark.parametrize("train_weights", [True, False])
def test_input_gets_its_gradient_after_the_weights_of_its_layer(train_weights):
    loss, variables = stack_loss(StackedTransformer, "full")
    gradient = jax.grad(loss, argnums=(0, 1) if train_weights else 1)
    equations = jax.make_jaxpr(gradient)(variables, ROWS).eqns
    backward = [each.params["jaxpr"] for each in equations if each.primitive.name == "remat2"]
    expected = [ROWS.shape]
    if train_weights:  # Frozen weights get no gradient.
        expected += [w.shape for w in jax.tree.leaves(variables["params"]["layers_0"])]
    assert len(backward) == 2
    for layer in backward:
        last = [e for e in layer.eqns if e.primitive.name == "optimization_barrier"][-1]
        assert sorted(each.aval.shape for each in last.outvars) == sorted(expected)


def test_rematerialized_layers_have_forward_mode_derivatives():
    def derivative(policy):
        loss, variables = stack_loss(StackedTransformer, policy)
        run = lambda x: jax.jvp(lambda x: loss(variables, x), (x,), (jnp.cos(x),))[1]  # noqa: E731
        return jax.jit(run)(ROWS)

    np.testing.assert_allclose(derivative("full"), derivative("none"), rtol=1e-5)


@pytest.mark.parametrize(
    ("policy", "field", "value"),
    [
        ("ful", "remat", "ful"),
        ("keep:query", "treatment", "keep"),
        ("save:querry", "name", "querry"),
        ("save:", "name", ""),
        ("save:query;offload:query", "remat", "save:query;offload:query"),
        ("offload:stage_input", "remat", "offload:stage_input"),  # no pipeline
    ],
)
def test_check_remat_policy_raises_for_an_invalid_policy(raises, policy, field, value):
    with raises(ConfigError, field=field, value=value):
        check_remat_policy(policy, owner="Repeat(stack)")
