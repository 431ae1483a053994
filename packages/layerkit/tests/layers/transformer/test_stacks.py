"""Tests of scanned stacks, compared with unrolled stacks."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from layerkit.base.base_layer import AUX_LOSS, CACHE, BaseLayer
from layerkit.config import sub_config_field
from layerkit.errors import ConfigError
from layerkit.layers.attention.biases import Alibi, RelativeBias
from layerkit.layers.attention.cross import CrossAttention
from layerkit.layers.basic.positions import RotaryPositionalEmbedding
from layerkit.layers.transformer.stacks import (
    StackedTransformer,
    StackedTransformerRepeated,
)
from layerkit.layers.transformer.transformer import Transformer
from layerkit.ops.attention.masks import AttentionMask

KEY = jax.random.key(0)
BATCH, LENGTH, MEMORY_LENGTH, DIMS = 3, 6, 4, 8
SIZES = {"input_dims": DIMS, "hidden_dims": 12, "num_heads": 4}
X = jax.random.normal(KEY, (BATCH, LENGTH, DIMS))
MEMORY = jax.random.normal(jax.random.key(1), (BATCH, MEMORY_LENGTH, DIMS))
ROW = jnp.tile(jnp.arange(LENGTH, dtype=jnp.int32), (BATCH, 1))
CAUSAL = AttentionMask.causal_mask(BATCH, LENGTH)
# One document in the first row, two in the others, and padding at the end of the second.
SEGMENTS = jnp.array([[1] * 6, [1, 1, 1, 2, 2, 0], [1, 1, 2, 2, 2, 2]], jnp.int32)
SEGMENT_POS = jnp.array([[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 3]], jnp.int32)
PACKED = AttentionMask.causal_mask(BATCH, LENGTH, segment_ids=SEGMENTS)
STACKS = (StackedTransformer, StackedTransformerRepeated)


def memory_mask(num_queries=LENGTH):
    queries = jnp.zeros((BATCH, num_queries), jnp.int32)
    return AttentionMask(queries, jnp.zeros((BATCH, MEMORY_LENGTH), jnp.int32))


class Balanced(BaseLayer):
    """A feed-forward with an auxiliary loss, as a mixture of experts has; padding stays out."""

    input_dims: int = 0
    hidden_dims: int = 0
    feed_forward_tpl: Any = sub_config_field(None)

    def setup(self):
        template = Transformer.HParams.config().feed_forward_tpl
        sizes = {"input_dims": self.input_dims, "hidden_dims": self.hidden_dims}
        self.create_child("experts", template, **sizes)

    def fprop(self, x, *, is_token=None):
        tokens = x if is_token is None else jnp.where(is_token[..., None], x, 0.0)
        self.add_aux_loss("balance", jnp.mean(tokens**2))
        return self.experts(tokens)


def layer_config(**attention):
    config = Transformer.HParams.config()
    config.attention_tpl.set(rotary_tpl=RotaryPositionalEmbedding.HParams.config(), **attention)
    return config


LOCAL, GLOBAL = layer_config(window=2), layer_config()
EXPERTS = layer_config().set(feed_forward_tpl=Balanced.HParams.config())
CROSS = layer_config().set(
    cross_attention_tpl=CrossAttention.HParams.config(), norm_policy="pre_post"
)
UNROTATED = Transformer.HParams.config()
ACROSS = {"memory": MEMORY, "memory_mask": memory_mask()}
ALIBI = Alibi.HParams.config()
BIAS = jax.random.normal(KEY, (1, 4, LENGTH, LENGTH))

# Fields of the stack, and what it is called with beside mask and positions.
KINDS = {
    "alike": ({"layer_tpl": GLOBAL, "num_layers": 3}, {}),
    "remainder": ({"block_tpls": (LOCAL, GLOBAL), "num_layers": 5}, {}),
    "experts": ({"block_tpls": (GLOBAL, EXPERTS), "num_layers": 4}, {}),
    "first": ({"first_tpls": (EXPERTS,), "block_tpls": (LOCAL, GLOBAL), "num_layers": 6}, {}),
    "cross": (
        {"layer_tpl": CROSS, "num_layers": 2, "relative_bias_tpl": ALIBI},
        {"bias": BIAS, **ACROSS},
    ),
    "shared bias": (
        {
            "block_tpls": (UNROTATED.clone(parallel=True), UNROTATED),
            "num_layers": 3,
            "relative_bias_tpl": ALIBI,
        },
        {"bias": BIAS},
    ),
}


def make(stack, **fields):
    return stack.HParams.config(**{**SIZES, **fields}).Instantiate()


def random_weights(layer):
    """Weights without the zeros and ones at which many mistakes are invisible."""
    random = np.random.default_rng(7)
    shapes = jax.eval_shape(layer.init, KEY)
    return jax.tree.map(lambda x: random.normal(0.0, 0.3, x.shape).astype(np.float32), shapes)


def layer_of(stack, tree, layer):
    """The leaves of one layer, by `locate_layer`."""
    path, indices = stack.locate_layer(layer)
    for name in path:
        tree = tree[name]
    return jax.tree.map(lambda leaf: leaf[indices], tree)


def moved(tree, source, target):
    """`tree` of the stack `source` as that of the stack `target`, layer by layer."""
    shapes = jax.eval_shape(target.init, KEY)["params"]
    result = jax.tree.map(lambda leaf: np.full(leaf.shape, np.nan, np.float32), shapes)
    for layer in range(source.num_layers):
        place = layer_of(target, result, layer)
        taken = layer_of(source, tree, layer)
        assert jax.tree.structure(place) == jax.tree.structure(taken)
        path, indices = target.locate_layer(layer)
        subtree = result
        for name in path:
            subtree = subtree[name]

        def put(leaf, value, indices=indices):
            leaf[indices or ...] = value

        jax.tree.map(put, subtree, taken)
    if "relative_bias" in tree:
        result["relative_bias"] = tree["relative_bias"]
    assert not any(np.isnan(leaf).any() for leaf in jax.tree.leaves(result))
    return result


def values_and_gradients(layer, params, extra, *, mask=PACKED, positions=SEGMENT_POS):
    """Output, auxiliary loss, and the gradients for weights, inputs and memory."""
    layer = layer.clone(train=False)
    arrays = {name: value for name, value in extra.items() if name != "memory_mask"}
    masks = {name: value for name, value in extra.items() if name == "memory_mask"}

    def loss(params, x, arrays):
        output, updates = layer.apply(
            {"params": params}, x, mask=mask, positions=positions, **arrays, **masks,
            mutable=[AUX_LOSS],
        )  # fmt: skip
        aux = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(updates))
        return jnp.sum(jnp.sin(output)) + aux, (output, jnp.float32(aux))

    run = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
    (_, outputs), gradients = jax.jit(run)(params, X, arrays)
    return outputs, gradients


def assert_close(first, second, *, rtol=1e-4, atol=1e-5):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=rtol, atol=atol), first, second)


# The ordinary one has first layers and a pattern with a remainder; encoder-decoders have memory
# and a bias.
_SLOW = ("alike", "remainder", "experts", "cross", "shared bias")


@pytest.fixture(
    scope="module", params=[pytest.param(k, marks=[pytest.mark.slow] * (k in _SLOW)) for k in KINDS]
)
def row(request):
    """A kind of stack in a row with its weights, outputs and gradients."""
    fields, extra = KINDS[request.param]
    layer = make(StackedTransformer, **fields)
    params = random_weights(layer)["params"]
    return fields, extra, layer, params, values_and_gradients(layer, params, extra)


def test_scan_equals_unrolled_stack(row):
    fields, extra, layer, params, (outputs, gradients) = row
    scan = make(StackedTransformerRepeated, **fields, remat="projections")
    actual, (of_weights, *others) = values_and_gradients(scan, moved(params, layer, scan), extra)
    assert_close(actual, outputs)
    assert_close(moved(of_weights, scan, layer), gradients[0])
    assert_close(others, list(gradients[1:]))


def test_cached_steps_of_a_scan_equal_fprop(row):
    fields, extra, layer, params, _ = row
    expected = jax.jit(
        lambda params: layer.apply({"params": params}, X, mask=CAUSAL, positions=ROW, **extra)
    )(params)
    scan = make(StackedTransformerRepeated, **fields)
    assert_close(decoded(scan, moved(params, layer, scan), extra), expected)


def decoded(layer, params, extra):
    """The outputs of a whole row, one token at a time."""
    variables = {"params": params}
    memory = {"memory": MEMORY} if "memory" in extra else {}
    bias = extra.get("bias")

    @jax.jit
    def init_cache(variables):
        arguments = {"method": "init_cache", "mutable": [CACHE]}
        return layer.apply(variables, BATCH, LENGTH, **memory, **arguments)[1]

    @jax.jit
    def extend(state, x, start, new_bias):
        optional = {} if bias is None else {"bias": new_bias}
        if memory:
            optional["memory_mask"] = memory_mask(x.shape[1])
        return layer.apply(
            {**variables, **state},
            x,
            time_step=start,
            positions=jnp.broadcast_to(start + jnp.arange(x.shape[1]), x.shape[:2]),
            **optional,
            method="extend_step",
            mutable=[CACHE],
        )

    state, outputs = init_cache(variables), []
    for position in range(LENGTH):
        new = slice(position, position + 1)
        new_bias = None if bias is None else bias[:, :, new]
        output, state = extend(state, X[:, new], jnp.int32(position), new_bias)
        outputs.append(output)
    return jnp.concatenate(outputs, axis=1)


def test_cached_steps_of_an_unrolled_stack_equal_fprop():
    fields, extra = KINDS["shared bias"]
    layer = make(StackedTransformer, **fields)
    params = random_weights(layer)["params"]
    expected = jax.jit(
        lambda p: layer.apply({"params": p}, X, mask=CAUSAL, positions=ROW, **extra)
    )(params)
    assert_close(decoded(layer, params, extra), expected)


def test_weights_can_be_stacked_on_several_axes():
    fields = {"block_tpls": (LOCAL, UNROTATED), "num_layers": 9}
    flat = make(StackedTransformerRepeated, **fields)
    grid = make(StackedTransformerRepeated, **fields, stacked_shape=(2, 2))
    params = random_weights(flat)["params"]
    there = moved(params, flat, grid)
    kernels = [tree["repeat"]["sub"]["layers_1"]["attention"]["query"] for tree in (params, there)]
    assert [kernel["w"].shape for kernel in kernels] == [(4, DIMS, 4, 2), (2, 2, DIMS, 4, 2)]
    np.testing.assert_array_equal(kernels[0]["w"], kernels[1]["w"].reshape(4, DIMS, 4, 2))

    def run(layer, params):
        apply = lambda p: layer.apply({"params": p}, X, mask=CAUSAL, positions=ROW)  # noqa: E731
        return jax.jit(apply)(params)

    assert_close(run(grid, there), run(flat, params))


@pytest.mark.parametrize("stack", STACKS)
def test_inputs_of_another_dtype_are_cast(stack):
    layer = make(stack, num_layers=2, fprop_dtype="bfloat16")

    def run(key):
        variables = layer.init(key)
        whole = layer.apply(variables, X, mask=CAUSAL, positions=ROW)
        arguments = {"method": "init_cache", "mutable": [CACHE]}
        state = layer.apply(variables, BATCH, LENGTH, **arguments)[1]
        arguments = {"time_step": jnp.int32(0), "positions": ROW[:, :1], "mutable": [CACHE]}
        first = X[:, :1]
        step, _ = layer.apply({**variables, **state}, first, **arguments, method="extend_step")
        return whole, step

    assert X.dtype == jnp.float32
    assert [rows.dtype for rows in jax.eval_shape(run, KEY)] == [jnp.bfloat16] * 2


def test_locate_layer_returns_the_layers_variables(raises):
    fields = {"block_tpls": (LOCAL, LOCAL, GLOBAL), "num_layers": 8}
    assert make(StackedTransformer, **fields).locate_layer(5) == (("layers_5",), ())
    scan = make(StackedTransformerRepeated, **fields)
    assert scan.locate_layer(5) == (("repeat", "sub", "layers_2"), (1,))
    assert scan.locate_layer(7) == (("remainder_1",), ())
    later = make(StackedTransformerRepeated, first_tpls=(LOCAL,), num_layers=3)
    assert [later.locate_layer(n)[0][0] for n in range(3)] == ["first_0", "repeat", "repeat"]
    with raises(ConfigError, field="first_tpls"):
        jax.eval_shape(later.clone(num_layers=1, first_tpls=(LOCAL, LOCAL)).init, KEY)
    alike = make(StackedTransformerRepeated, num_layers=6, stacked_shape=(2, 3))
    assert alike.locate_layer(4) == (("repeat", "sub"), (1, 1))
    short = make(StackedTransformerRepeated, **{**fields, "num_layers": 2})
    assert short.locate_layer(1) == (("remainder_1",), ())
    assert sorted(jax.eval_shape(short.init, KEY)["params"]) == ["remainder_0", "remainder_1"]


def test_unroll_puts_several_layers_into_an_iteration():
    one, two = (make(StackedTransformerRepeated, num_layers=4, unroll=unroll) for unroll in (1, 2))
    lines = [
        len(jax.jit(run).lower(jax.eval_shape(layer.init, KEY)).as_text().splitlines())
        for layer in (one, two)
        for run in [lambda v, layer=layer: layer.apply(v, X, mask=CAUSAL, positions=ROW)]
    ]
    assert lines[0] < lines[1]
    variables = random_weights(one)
    run = lambda layer: layer.apply(variables, X, mask=CAUSAL, positions=ROW)  # noqa: E731
    assert_close(jax.jit(run, static_argnums=0)(two), jax.jit(run, static_argnums=0)(one))


def test_shared_bias_is_one_table_of_all_layers():
    table = RelativeBias.HParams.config(num_buckets=4, max_distance=5)
    fields = {"layer_tpl": UNROTATED, "num_layers": 2}
    layer = make(StackedTransformer, **fields, relative_bias_tpl=table)
    params = random_weights(layer)["params"]
    assert params["relative_bias"]["w"].shape == (4, 4)
    # The same as each layer with a table of its own that holds the same numbers.
    alone = UNROTATED.clone()
    alone.attention_tpl.relative_bias_tpl = table
    apart = make(StackedTransformer, num_layers=2, layer_tpl=alone)
    copies = {name: dict(params[name]) for name in ("layers_0", "layers_1")}
    for copy in copies.values():
        copy["attention"] = {**copy["attention"], "relative_bias": params["relative_bias"]}
    actual, gradients = values_and_gradients(layer, params, {})
    expected, apart_gradients = values_and_gradients(apart, copies, {})
    assert_close(actual, expected)
    tables = [apart_gradients[0][name]["attention"]["relative_bias"]["w"] for name in copies]
    assert_close(gradients[0]["relative_bias"]["w"], tables[0] + tables[1])


def test_pattern_has_parameter_paths_per_block():
    layer = make(StackedTransformerRepeated, block_tpls=(LOCAL, GLOBAL), num_layers=5)
    paths = traverse_util.flatten_dict(jax.eval_shape(layer.init, KEY)["params"], sep="/")
    queries = {path: leaf.shape for path, leaf in paths.items() if path.endswith("query/w")}
    assert queries == {
        "repeat/sub/layers_0/attention/query/w": (2, DIMS, 4, 2),
        "repeat/sub/layers_1/attention/query/w": (2, DIMS, 4, 2),
        "remainder_0/attention/query/w": (DIMS, 4, 2),
    }


@pytest.mark.parametrize("kind", [StackedTransformer, StackedTransformerRepeated])
def test_layers_have_hidden_sizes_of_their_own_if_the_stack_has_none(raises, kind):
    blocks = tuple(Transformer.HParams.config(hidden_dims=size) for size in (6, 10))
    sizes = {"input_dims": 4, "num_heads": 2, "num_layers": 5, "block_tpls": blocks}
    paths = traverse_util.flatten_dict(jax.eval_shape(kind(**sizes).init, KEY)["params"])
    widths = {leaf.shape[-1] for path, leaf in paths.items() if path[-2:] == ("up", "w")}
    assert widths == {6, 10}
    with raises(ConfigError, field="hidden_dims", value=6):
        kind(**sizes, hidden_dims=8).init(KEY)


def test_rematerialized_layers_that_share_weights_raise(raises):
    layer = Transformer.HParams.config()
    layer.feed_forward_tpl.shared_weight_id = "ff"
    sizes = {"input_dims": 4, "hidden_dims": 8, "num_heads": 2, "num_layers": 2}
    stack = StackedTransformer(**sizes, layer_tpl=layer)
    jax.eval_shape(stack.init, jax.random.key(0))
    with raises(ConfigError, field="remat", value="full"):
        stack.clone(remat="full").init(jax.random.key(0))
