"""Tests of a Transformer layer: order of norms and branches, and cached steps."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.base_layer import CACHE, BaseLayer
from layerkit.errors import ConfigError
from layerkit.layers.attention.cross import CrossAttention
from layerkit.layers.basic.positions import RotaryPositionalEmbedding
from layerkit.layers.transformer.transformer import Transformer
from layerkit.ops.attention.masks import AttentionMask

KEY = jax.random.key(0)
BATCH, LENGTH, MEMORY_LENGTH, DIMS = 3, 6, 4, 8
SIZES = {"input_dims": DIMS, "hidden_dims": 12, "num_heads": 2}
X = jax.random.normal(KEY, (BATCH, LENGTH, DIMS))
MEMORY = jax.random.normal(jax.random.key(1), (BATCH, MEMORY_LENGTH, DIMS))
ROW = jnp.tile(jnp.arange(LENGTH, dtype=jnp.int32), (BATCH, 1))
CAUSAL = AttentionMask.causal_mask(BATCH, LENGTH)
SEGMENTS = jnp.array([[1] * 6, [1, 1, 1, 2, 2, 0], [1, 1, 2, 2, 2, 2]], jnp.int32)


def memory_mask(num_queries):
    """The second and third rows of the memory have padding."""
    segments = jnp.array([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]], jnp.int32)
    queries = jnp.zeros((BATCH, num_queries), jnp.int32)
    keys = jnp.zeros((BATCH, MEMORY_LENGTH), jnp.int32)
    return AttentionMask(queries, keys, jnp.ones_like(queries), segments)


CROSS = {"cross_attention_tpl": CrossAttention.HParams.config()}
WITH_MEMORY = {"memory": MEMORY, "memory_mask": memory_mask(LENGTH)}


def make(**fields):
    config = Transformer.HParams.config(**SIZES, **fields)
    config.attention_tpl.rotary_tpl = RotaryPositionalEmbedding.HParams.config()
    return config.Instantiate()


def random_weights(layer):
    """Weights without the zeros and ones at which many mistakes are invisible."""
    random = np.random.default_rng(7)
    shapes = jax.eval_shape(layer.init, KEY)
    return jax.tree.map(lambda x: random.normal(0.0, 0.3, x.shape).astype(np.float32), shapes)


def run(layer, variables, x=X, **arguments):
    arguments = {"mask": CAUSAL, "positions": ROW, **arguments}
    return jax.jit(lambda v, x: layer.apply(v, x, **arguments))(variables, x)


# Each layer by the equation that defines it, with its own norms and branches as functions.


def pre(x, n, a, f):
    x = x + a(n("attention_norm", x))
    return x + f(n("feed_forward_norm", x))


def post(x, n, a, f):
    x = n("attention_norm", x + a(x))
    return n("feed_forward_norm", x + f(x))


def pre_post(x, n, a, f):
    x = x + n("attention_post_norm", a(n("attention_norm", x)))
    return x + n("feed_forward_post_norm", f(n("feed_forward_norm", x)))


def branch(x, n, a, f):
    x = x + n("attention_post_norm", a(x))
    return x + n("feed_forward_post_norm", f(x))


def neox(x, n, a, f):
    return x + a(n("attention_norm", x)) + f(n("feed_forward_norm", x))


def gpt_j(x, n, a, f):
    normed = n("attention_norm", x)
    return x + a(normed) + f(normed)


def parallel_pre_post(x, n, a, f):
    normed = n("attention_norm", x)
    return x + n("attention_post_norm", a(normed)) + n("feed_forward_post_norm", f(normed))


def parallel_branch(x, n, a, f):
    return x + n("attention_post_norm", a(x)) + n("feed_forward_post_norm", f(x))


def weighted(x, n, a, f):
    x = x + 0.5 * a(n("attention_norm", x))
    return x + 0.25 * f(n("feed_forward_norm", x))


SHARED = {"parallel": True, "parallel_shares_norm": True}
EQUATIONS = {
    "pre": ({}, pre),
    "post": ({"norm_policy": "post"}, post),
    "pre_post": ({"norm_policy": "pre_post"}, pre_post),
    "branch": ({"norm_policy": "branch"}, branch),
    "parallel": ({"parallel": True}, neox),
    "parallel, one norm": (SHARED, gpt_j),
    "parallel pre_post, one norm": ({**SHARED, "norm_policy": "pre_post"}, parallel_pre_post),
    "weighted": ({"residual_weight": 0.5, "feed_forward_residual_weight": 0.5}, weighted),
    "scaled": ({"has_output_scale": True}, pre),
    "parallel branch": ({"parallel": True, "norm_policy": "branch"}, parallel_branch),
}


@pytest.mark.parametrize(("fields", "equation"), EQUATIONS.values(), ids=EQUATIONS)
def test_fprop_equals_its_formula(fields, equation):
    layer = make(**fields)
    variables = random_weights(layer)
    named = set()

    @jax.jit
    def expected(variables):
        bound = layer.bind(variables)

        def norm(name, x):
            named.add(name)
            return getattr(bound, name)(x)

        attention = partial(bound.attention, mask=CAUSAL, positions=ROW)
        scale = variables.get("non_trainable", {}).get("output_scale", 1.0)
        return scale * equation(X, norm, attention, bound.feed_forward)

    np.testing.assert_allclose(run(layer, variables), expected(variables), rtol=1e-5, atol=1e-5)
    # And there is no norm that the equation does not name.
    assert {name for name in variables["params"] if name.endswith("norm")} == named


@pytest.mark.parametrize("policy", [pytest.param("post", marks=pytest.mark.slow), "pre_post"])
def test_cross_attention_runs_between_attention_and_feed_forward(policy):
    layer = make(norm_policy=policy, **CROSS)
    variables = random_weights(layer)

    @jax.jit
    def expected(variables):
        bound = layer.bind(variables)
        branches = {
            "attention": partial(bound.attention, mask=CAUSAL, positions=ROW),
            "cross_attention": partial(
                bound.cross_attention, memory=MEMORY, mask=memory_mask(LENGTH)
            ),
            "feed_forward": bound.feed_forward,
        }
        x = X
        for name, read in branches.items():
            before = getattr(bound, f"{name}_norm", lambda x: x)
            after = getattr(bound, f"{name}_post_norm", lambda x: x)
            x = before(x + read(x)) if policy == "post" else x + after(read(before(x)))
        return x

    result = run(layer, variables, **WITH_MEMORY)
    np.testing.assert_allclose(result, expected(variables), rtol=1e-5, atol=1e-5)
    # Padding of the memory is not read; the rest is.
    padding = MEMORY.at[1, 2:].set(100.0).at[2, 3].set(-100.0)
    np.testing.assert_array_equal(
        run(layer, variables, **{**WITH_MEMORY, "memory": padding}), result
    )
    other = run(layer, variables, **{**WITH_MEMORY, "memory": MEMORY.at[1, 1].add(1.0)})
    np.testing.assert_array_equal(np.any(other != result, axis=(1, 2)), [False, True, False])


# Each policy once; what is done with a branch is the same code for all of them.
CASES = {
    "post": EQUATIONS["post"][0],
    "branch": EQUATIONS["branch"][0],
    "parallel": EQUATIONS["parallel pre_post, one norm"][0],
    "cross": CROSS,
}
_SLOW = ("post", "branch")


@pytest.mark.parametrize(
    "fields", [pytest.param(CASES[k], id=k, marks=[pytest.mark.slow] * (k in _SLOW)) for k in CASES]
)
def test_cached_steps_equal_fprop(fields):
    layer = make(**fields)
    variables = random_weights(layer)
    has_memory = layer.cross_attention_tpl is not None
    bias = jax.random.normal(KEY, (1, 2, LENGTH, LENGTH + 1))
    extra = WITH_MEMORY if has_memory else {}
    expected = run(layer, variables, bias=bias[..., :LENGTH], **extra)
    memory = {"memory": MEMORY} if has_memory else {}

    @jax.jit
    def init_cache(variables):
        arguments = {"method": "init_cache", "mutable": [CACHE]}
        return layer.apply(variables, BATCH, LENGTH + 1, **memory, **arguments)[1]

    state = init_cache(variables)

    @jax.jit
    def extend(state, x, bias, start):
        extra = {"memory_mask": memory_mask(x.shape[1])} if has_memory else {}
        return layer.apply(
            {**variables, **state},
            x,
            time_step=start,
            positions=jnp.broadcast_to(start + jnp.arange(x.shape[1]), x.shape[:2]),
            bias=bias,
            **extra,
            method="extend_step",
            mutable=[CACHE],
        )

    result, position = [], 0
    for width in (4, 1, 1):
        new = slice(position, position + width)
        output, state = extend(state, X[:, new], bias[:, :, new], jnp.int32(position))
        result.append(output)
        position += width
    np.testing.assert_allclose(jnp.concatenate(result, axis=1), expected, rtol=1e-4, atol=1e-5)


class TokensAlone(BaseLayer):
    """A feed-forward that adds one to tokens, and nothing to padding."""

    input_dims: int = 0
    hidden_dims: int = 0

    def fprop(self, x, *, is_token):
        return jnp.where(is_token[:, :, None], jnp.ones_like(x), 0.0)


def test_feed_forward_receives_paddings():
    layer = make(feed_forward_tpl=TokensAlone.HParams.config())
    variables = random_weights(layer)
    variables["params"]["attention"]["output"]["w"] *= 0.0
    packed = AttentionMask.causal_mask(BATCH, LENGTH, segment_ids=SEGMENTS)
    result = run(layer, variables, mask=packed) - X
    np.testing.assert_allclose(result, np.tile((SEGMENTS != 0)[..., None], DIMS), atol=1e-6)


class PlainFeedForward(BaseLayer):
    """A feed-forward that knows no padding."""

    input_dims: int = 0
    hidden_dims: int = 0

    def fprop(self, x):
        return x


def test_feed_forward_without_paddings_argument_runs_on_unpadded_rows():
    layer = make(feed_forward_tpl=PlainFeedForward.HParams.config())
    assert run(layer, random_weights(layer)).shape == X.shape


def constant_branches(**fields):
    """A layer whose branches add a constant each, whatever they read."""
    layer = Transformer(**SIZES, **fields)
    variables = jax.tree.map(jnp.ones_like, jax.eval_shape(layer.init, KEY))

    @partial(jax.jit, static_argnums=(0, 1))
    def add(layer, shape, seed=0, **arguments):
        return layer.apply(
            variables,
            jnp.zeros((*shape, DIMS)),
            mask=AttentionMask.causal_mask(*shape),
            positions=jnp.zeros(shape, jnp.int32),
            rngs={"random": jax.random.key(seed)},
            **arguments,
        )

    return layer, add


def test_dropout_acts_on_both_branches_in_training_only():
    layer, add = constant_branches(dropout_rate=0.5)
    assert np.unique(add(layer, (BATCH, LENGTH))).size == 1
    trained = add(layer.clone(train=True), (BATCH, LENGTH))
    # Each branch is dropped with probability 1/2: both at once in a quarter of the 144 places.
    assert abs(np.mean(trained == 0.0) - 0.25) < 0.15
    assert np.any(trained != add(layer.clone(train=True), (BATCH, LENGTH), 1))


def test_input_dropout_drops_the_residual_too():
    layer = Transformer(**SIZES, input_dropout_rate=0.25, train=True)
    # Without weights the branches add nothing, and the layer returns its input.
    variables = jax.tree.map(jnp.zeros_like, jax.eval_shape(layer.init, KEY))
    x = jnp.ones((40, LENGTH, DIMS))

    def apply(layer):
        mask = AttentionMask.causal_mask(40, LENGTH)
        positions = jnp.zeros((40, LENGTH), jnp.int32)
        arguments = {"mask": mask, "positions": positions, "rngs": {"random": KEY}}
        return np.asarray(jax.jit(lambda x: layer.apply(variables, x, **arguments))(x))

    np.testing.assert_array_equal(apply(layer.clone(train=False)), x)
    dropped = apply(layer)
    np.testing.assert_allclose(np.unique(dropped), [0.0, 1 / 0.75], rtol=1e-6)
    assert np.mean(dropped == 0.0) == pytest.approx(0.25, abs=0.05)


@pytest.mark.parametrize("handed_in", [False, True])
def test_droppath_drops_whole_branches_of_examples(handed_in):
    layer, add = constant_branches(droppath_rate=0.0 if handed_in else 0.25)
    rate = {"droppath_rate": jnp.float32(0.25)} if handed_in else {}
    shape = (400, 2)
    whole = np.unique(add(layer, shape, **rate)).item()
    trained = np.asarray(add(layer.clone(train=True), shape, **rate))
    assert np.all(trained == trained[:, :1, :1])
    # Attention gives 8 and the feed-forward 12·8·8 (of a norm that is 2 · 0 + 1): see `whole`.
    values, counts = np.unique(trained[:, 0, 0].round(3), return_counts=True)
    assert values.size == 4 and values[0] == 0.0
    np.testing.assert_allclose(values[3], whole / 0.75, rtol=1e-5)
    # Both are kept in 9/16, one of them in 3/16 each; the deviations are below 1/40.
    np.testing.assert_allclose(counts / 400, np.array([1, 3, 3, 9]) / 16, atol=0.09)


def test_layer_raises_for_a_missing_or_unused_memory(raises):
    plain, crossing = make(), make(**CROSS)
    with raises(ConfigError, field="memory"):
        run(plain, random_weights(plain), memory=MEMORY)
    weights = random_weights(crossing)
    with raises(ConfigError, field="memory_mask", value=None):
        run(crossing, weights, memory=MEMORY)
    with raises(ConfigError, field="memory", value=None):
        run(crossing, weights, memory_mask=memory_mask(LENGTH))
    with raises(ConfigError, field="memory", value=None):
        crossing.apply(weights, BATCH, LENGTH, method="init_cache", mutable=[CACHE])
    skipping = crossing.clone(allow_skip_cross_attention=True)
    with raises(ConfigError, field="memory_mask", value=None):
        run(skipping, weights, memory=MEMORY)


def test_feed_forward_residual_weight_equals_praxis(praxis):
    """The feed-forward half of a layer, with an attention that returns 0."""
    case = praxis("residual_weight")
    fields = {"input_dims": 4, "hidden_dims": 6, "num_heads": 2}
    layer = Transformer(**fields, feed_forward_residual_weight=0.5)
    weights = jax.tree.map(jnp.zeros_like, jax.eval_shape(layer.init, KEY))["params"]
    given = case["weights"]
    weights["feed_forward_norm"] = given["layer_norm"]
    for name, theirs in (("up", "ffn_layer1"), ("down", "ffn_layer2")):
        weights["feed_forward"][name] = given[theirs]["linear"]
    rows, length = case["x"].shape[:2]
    mask = AttentionMask.causal_mask(rows, length)
    positions = jnp.tile(jnp.arange(length), (rows, 1))
    result = run(layer, {"params": weights}, case["x"], mask=mask, positions=positions)
    np.testing.assert_allclose(result, case["outputs"], rtol=1e-5, atol=1e-6)


def test_layer_without_a_memory_skips_cross_attention_if_allowed():
    crossing = make(**CROSS, allow_skip_cross_attention=True)
    weights = random_weights(crossing)
    names = ("cross_attention", "cross_attention_norm")
    without = {name: w for name, w in weights["params"].items() if name not in names}
    skipped = run(crossing, weights)
    np.testing.assert_array_equal(skipped, run(make(), {"params": without}))
    assert np.any(run(crossing, weights, **WITH_MEMORY) != skipped)

    @jax.jit
    def extend(weights):
        _, cache = crossing.apply(weights, BATCH, LENGTH, method="init_cache", mutable=[CACHE])
        step = {"time_step": jnp.int32(0), "positions": ROW, "method": "extend_step"}
        return crossing.apply({**weights, **cache}, X, **step, mutable=[CACHE])[0]

    np.testing.assert_allclose(extend(weights), skipped, rtol=1e-5, atol=1e-5)
