"""Tests of pipelines, compared with sequential layers."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from layerkit.base.base_layer import AUX_LOSS, CACHE, NON_TRAINABLE, PARAMS, SUMMARIES, BaseLayer
from layerkit.base.sharding import BoundSharding
from layerkit.base.weights import WeightHParams, WeightInit, is_box, logical_axes
from layerkit.config import sub_config_field
from layerkit.errors import ConfigError
from layerkit.layers.transformer.pipeline import Pipeline
from layerkit.layers.transformer.repeat import Repeat

KEY = jax.random.key(0)
DIMS = 4


class Block(BaseLayer):
    """tanh(x/|x| · w) + shift, which is not a number where x is 0, as it is in bubbles."""

    def setup(self):
        self.create_variable("w", WeightHParams((DIMS, DIMS), axes=("embed", "mlp")))
        count = WeightHParams((), axes=(), init=WeightInit.Constant(0.0))
        self.create_variable("count", count, trainable=False)

    def fprop(self, x, *, shift, scale=1.0):
        hidden = x / jnp.linalg.norm(x, axis=-1, keepdims=True) @ self.theta.w * scale
        self.add_aux_loss("mean", jnp.mean(hidden))
        self.add_summary("square", jnp.mean(hidden**2))
        if self.is_mutable_collection(NON_TRAINABLE):
            self.update_var("count", self.get_var("count") + 1.0 + 0.0 * jnp.mean(hidden))
        return jnp.tanh(hidden) + shift

    def init_cache(self, batch_size):
        self.put_variable(CACHE, "seen", jnp.zeros((batch_size, DIMS)))

    def extend_step(self, x, *, shift):
        self.put_variable(CACHE, "seen", self.get_variable(CACHE, "seen") + x)
        return self.fprop(x, shift=shift)


def reference(weights, x, shift, scale):
    """Values, and means of what each layer reports: what a row of blocks computes."""

    def layer(x, w):
        hidden = x / jnp.linalg.norm(x, axis=-1, keepdims=True) @ w * scale
        return jnp.tanh(hidden) + shift, (jnp.mean(hidden), jnp.mean(hidden**2))

    return jax.lax.scan(layer, x, weights)


def pipeline(stages, microbatches, repeats=1, *, block=Block, layers=1, **fields):
    stage = block.HParams.config()
    if layers > 1:
        stage = Repeat.HParams.config(sub_tpl=stage, num_repeats=layers)
    fields = {"num_stages": stages, "num_microbatches": microbatches, "train": False, **fields}
    config = Pipeline.HParams.config(stage_tpl=stage, circular_repeats=repeats, **fields)
    return config.Instantiate()


def inputs(batch):
    random = np.random.default_rng(1)
    return random.normal(size=(2, batch, DIMS)).astype(np.float32)


def in_depth_order(tree, leading):
    return jax.tree.map(lambda leaf: np.asarray(leaf).reshape(-1, *leaf.shape[leading:]), tree)


def loss(outputs, aux):
    return jnp.sum(jnp.sin(outputs)) + sum(jnp.sum(value) for value in jax.tree.leaves(aux))


def check_close(result, expected):
    np.testing.assert_allclose(
        result, expected, rtol=0.0, atol=1e-5 * max(1, np.max(np.abs(expected)))
    )


def drawn_weights(layer):
    """Like `init`, but without compiling anything."""
    random = np.random.default_rng(0)
    shapes = jax.eval_shape(layer.init, KEY)
    draw = lambda x: random.uniform(-0.8, 0.8, x.shape).astype(x.dtype)  # noqa: E731
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    return {**zeros, PARAMS: jax.tree.map(draw, shapes[PARAMS])}


def slow(layer, name):
    return pytest.param(layer, id=name, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(pipeline(4, 16), id="gpipe"),
        slow(pipeline(4, 4), "gpipe, full"),
        slow(pipeline(4, 8, 2), "circular"),
        slow(pipeline(2, 4, 2), "circular, two stages"),
        pytest.param(pipeline(2, 2, 3), id="circular, full"),
        pytest.param(pipeline(3, 5, 2, stream_inputs=False), id="not streamed, circular"),
        slow(pipeline(4, 2, stream_inputs=False), "not streamed"),
        pytest.param(pipeline(2, None, layers=2, microbatch_size=3), id="by size, several layers"),
        slow(pipeline(2, 2, remat="none"), "without remat"),
        slow(pipeline(2, 2, 2, remat="dots"), "circular, remat dots"),
        slow(pipeline(2, 2, 2, remat="offload:stage_input"), "circular, inputs in host memory"),
    ],
)
def test_pipeline_equals_sequential_layers(layer):
    """Values, gradients, auxiliary losses, summaries and state of a pipeline of blocks."""
    variables = drawn_weights(layer)
    num_microbatches = layer.num_microbatches or 2
    batch = num_microbatches * (layer.microbatch_size or 2)
    (w,) = jax.tree.leaves(variables[PARAMS])
    leading = w.ndim - 2
    x, shift = inputs(batch)
    scale = np.float32(1.5)
    collections = [AUX_LOSS, SUMMARIES, NON_TRAINABLE]

    def run(params, x, shift, scale):
        every = {**variables, PARAMS: params}
        outputs, updates = layer.apply(every, x, shift=shift, scale=scale, mutable=collections)
        return loss(outputs, updates[AUX_LOSS]), (outputs, updates)

    def run_row(params, x, shift, scale):
        outputs, (means, squares) = reference(params, x, shift, scale)
        return loss(outputs, means), (outputs, means, squares)

    def both(run):
        return jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2, 3), has_aux=True))

    (_, (outputs, updates)), gradients = both(run)(variables[PARAMS], x, shift, scale)
    row = (in_depth_order(w, leading), x, shift, scale)
    (_, (expected, means, squares)), row_gradients = both(run_row)(*row)

    check_close(outputs, expected)
    (of_weights,) = jax.tree.leaves(in_depth_order(gradients[0], leading))
    check_close(of_weights, row_gradients[0])
    jax.tree.map(check_close, gradients[1:], row_gradients[1:])
    for collection, of_row in ((AUX_LOSS, means), (SUMMARIES, squares)):
        (reported,) = jax.tree.leaves(in_depth_order(updates[collection], leading))
        check_close(reported, of_row)
    (count,) = jax.tree.leaves(updates[NON_TRAINABLE])
    np.testing.assert_array_equal(count, np.full(count.shape, num_microbatches))


def test_rows_of_a_microbatch_are_offloaded_with_its_input():
    layer, (x, scale) = pipeline(2, 4, remat="offload:stage_input"), inputs(4)
    variables = drawn_weights(layer)

    def loss(x, scale):
        return jnp.sum(layer.apply(variables, x, shift=0.0, scale=scale))

    traced = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, scale)
    ticks = next(eqn for eqn in traced.eqns if eqn.primitive.name == "scan")
    saved = [out.aval for out in ticks.outvars if out.aval.shape == (5, 2, 1, DIMS)]
    assert [aval.memory_space.name for aval in saved] == ["Host", "Host"]


def test_bubbles_with_nan_have_no_effect():
    block = Block.HParams.config(train=False).Instantiate()
    run = lambda variables, x: jnp.sum(block.apply(variables, x, shift=0.0))  # noqa: E731
    value, gradient = jax.value_and_grad(run)(block.init(KEY), jnp.zeros((1, DIMS)))
    assert np.isnan(value) and np.all(np.isnan(gradient[PARAMS]["w"]))


def test_weights_are_stacked_in_order_of_depth():
    layer = pipeline(3, 3, repeats=2, layers=5)
    variables = jax.jit(layer.init)(KEY)
    w = variables[PARAMS]["stage"]["sub"]["w"]
    assert w.shape == (2, 3, 5, DIMS, DIMS)
    assert len(np.unique(np.asarray(w).reshape(30, -1), axis=0)) == 30
    # Xavier with the fans of one layer: were `stage` an input dimension, this would be less.
    bound = np.sqrt(6.0 / (DIMS + DIMS))
    assert 0.98 * bound < np.abs(w).max() <= bound
    axes = logical_axes(jax.eval_shape(layer.init_boxed, KEY))
    assert axes[PARAMS]["stage"]["sub"]["w"] == ("layers", "stage", "layers", "embed", "mlp")
    assert axes[NON_TRAINABLE]["stage"]["sub"]["count"] == ("layers", "stage", "layers")
    gpipe = jax.eval_shape(pipeline(3, 3, layers=5).init_boxed, KEY)
    assert logical_axes(gpipe)[PARAMS]["stage"]["sub"]["w"] == ("stage", "layers", "embed", "mlp")


class Twice(BaseLayer):
    """One pipeline, run two times."""

    pipeline_tpl: Any = sub_config_field(None)

    def setup(self):
        self.create_child("pipeline", self.pipeline_tpl)

    def fprop(self, x, *, shift):
        return self.pipeline(self.pipeline(x, shift=shift), shift=shift)


def test_pipeline_that_runs_twice_reports_twice():
    stage = Block.HParams.config()
    inner = Pipeline.HParams.config(stage_tpl=stage, num_stages=2, num_microbatches=2)
    layer, (x, shift) = Twice(pipeline_tpl=inner, train=False), inputs(2)
    variables = drawn_weights(layer)
    run = jax.jit(functools.partial(layer.apply, mutable=[AUX_LOSS]))
    _, updates = run(variables, x, shift=shift)
    first, second = updates[AUX_LOSS]["pipeline"]["stage"]["mean"]
    w = variables[PARAMS]["pipeline"]["stage"]["w"]
    _, (means, _) = reference(np.concatenate([w, w]), x, shift, 1.0)
    np.testing.assert_allclose(np.concatenate([first, second]), means, rtol=1e-4, atol=1e-6)


# What each pass is given.


class Mark(BaseLayer):
    """Writes a random number into the column that is its own."""

    def fprop(self, x, *, column, is_on=True):
        return x.at[:, column].set(jax.random.uniform(self.next_prng_key())) if is_on else x


def test_stages_rounds_and_microbatches_have_different_random_numbers():
    fields = {"num_stages": 2, "num_microbatches": 4, "circular_repeats": 3}
    layer = Pipeline.HParams.config(stage_tpl=Mark.HParams.config(), **fields).Instantiate()
    each = {"column": np.arange(6)}
    run = jax.jit(lambda x: layer.apply({}, x, per_copy=each, rngs={"random": KEY}))
    result = np.asarray(run(jnp.zeros((8, 6))))
    np.testing.assert_array_equal(result[:4], result[4:])  # rows r and r + 4 are one microbatch
    assert len(np.unique(result[:4])) == 4 * 6 and np.all(result > 0)
    # The order of `each` is that of the depth, and what is not an array stays what it is.
    assert np.all(layer.apply({}, jnp.zeros((8, 6)), per_copy=each, is_on=False) == 0)


def test_methods_and_indivisible_batches_run_sequentially():
    layer, (x, shift) = pipeline(2, 3, repeats=2, stream_inputs=False), inputs(5)
    variables = drawn_weights(layer)

    @jax.jit
    def extend(variables, x, shift):
        _, state = layer.apply(variables, 5, method="init_cache", mutable=[CACHE])
        assert state[CACHE]["stage"]["seen"].shape == (2, 2, 5, DIMS)
        return layer.apply(
            {**variables, **state}, "extend_step", x, shift=shift, method="run", mutable=[CACHE]
        )

    outputs, state = extend(variables, x, shift)
    check_close(jax.jit(layer.apply)(variables, x, shift=shift), outputs)
    w = np.asarray(variables[PARAMS]["stage"]["w"]).reshape(4, DIMS, DIMS)
    np.testing.assert_allclose(outputs, reference(w, x, shift, 1.0)[0], rtol=1e-5, atol=1e-6)
    seen = in_depth_order(state[CACHE]["stage"]["seen"], 2)
    for depth in range(4):
        expected, _ = reference(w[:depth], x, shift, 1.0)
        np.testing.assert_allclose(seen[depth], expected, rtol=1e-5, atol=1e-6)


# On a mesh.


class Wide(BaseLayer):
    """x + tanh(x · up) · down + shift, laid out as a feed-forward block is."""

    def setup(self):
        self.create_variable("up", WeightHParams((8, 16), axes=("embed", "mlp")))
        self.create_variable("down", WeightHParams((16, 8), axes=("mlp", "embed")))

    def fprop(self, x, *, shift):
        hidden = jnp.tanh(x @ self.theta.up)
        hidden = self.constrain(hidden, "batch", "length", "act_mlp")
        x = x + hidden @ self.theta.down + shift
        return self.constrain(x, "batch", "length", "act_embed")


wide_pipeline = functools.partial(pipeline, block=Wide, layers=2)


def bound(**sizes):
    devices = jax.devices()[: math.prod(sizes.values())]
    return BoundSharding(Mesh(np.reshape(devices, tuple(sizes.values())), tuple(sizes)))


def compiled_on(sharding, layer, arguments):
    """(loss and gradients, compiled for a mesh; its arguments, where they belong)."""
    boxed = jax.eval_shape(layer.init_boxed, KEY)
    weights = jax.tree.map(
        lambda box: sharding.sharding(box.axes, shape=box.value.shape), boxed, is_leaf=is_box
    )
    rows = sharding.sharding(("batch", None, None))
    places = (weights, rows, rows)
    run = jax.jit(
        jax.value_and_grad(summed(layer.clone(sharding=sharding)), argnums=(0, 1)),
        in_shardings=places,
        out_shardings=(None, places[:2]),
    )
    return run.lower(*arguments).compile(), jax.device_put(arguments, places)


def summed(layer):
    return lambda variables, x, shift: jnp.sum(jnp.sin(layer.apply(variables, x, shift=shift)))


@pytest.mark.parametrize(
    ("mesh", "layer"),
    [
        pytest.param(
            {"stage": 2, "fsdp": 2, "tensor": 2}, wide_pipeline(2, 4), marks=pytest.mark.slow
        ),
        ({"stage": 2, "fsdp": 2, "tensor": 2}, wide_pipeline(4, 8, repeats=2)),
        pytest.param(
            {"data": 2, "stage": 4},
            wide_pipeline(4, 6, stream_inputs=False),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["gpipe", "circular, two stages a device", "not streamed"],
)
def test_values_and_gradients_on_a_mesh_equal_one_device(mesh, layer):
    random = np.random.default_rng(2)
    batch = 4 * layer.num_microbatches
    arguments = (jax.jit(layer.init)(KEY), *random.normal(size=(2, batch, 5, 8)).astype(np.float32))
    expected = jax.jit(jax.value_and_grad(summed(layer), argnums=(0, 1)))(*arguments)
    run, placed = compiled_on(bound(**mesh), layer, arguments)
    result = run(*placed)
    jax.tree.map(check_close, result, expected)
    # One microbatch of four rows moves on from each device to the next, which has a share of the
    # rows, in the forward pass and in the backward one.
    rows = 4 // (mesh.get("data", 1) * mesh.get("fsdp", 1))
    text = run.as_text()
    assert len(re.findall(rf"f32\[1,{rows},5,8\]\S* collective-permute", text)) >= 4


@pytest.mark.parametrize("stream", [True, False])
def test_streamed_loop_has_only_collective_permutes(stream):
    layer = wide_pipeline(4, 8, repeats=2, stream_inputs=stream)
    shapes = (jax.eval_shape(layer.init, KEY), *2 * [jax.ShapeDtypeStruct((8, 5, 8), np.float32)])
    layer = layer.clone(sharding=bound(stage=4))
    text = jax.jit(lambda *a: layer.apply(*a[:2], shift=a[2])).lower(*shapes).compile().as_text()
    in_loop = [line for line in text.splitlines() if "while/body" in line]
    collectives = {
        name
        for line in in_loop
        for name in re.findall(r" (all-\w+|reduce-scatter|collective-permute)(?:-start)?\(", line)
    }
    assert "collective-permute" in collectives
    assert (collectives == {"collective-permute"}) == stream


@pytest.mark.parametrize("repeats", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_weights_are_gathered_once_before_the_ticks(repeats):
    numbers, in_loop, outside = [], [], []
    for once in (False, True):
        layer = wide_pipeline(2, 4, repeats=repeats, gather_weights_once=once)
        rows = np.random.default_rng(2).normal(size=(2, 16, 5, 8)).astype(np.float32)
        arguments = (drawn_weights(layer), *rows)
        # Rows of experts may be split over fewer axes than other rows.
        sharding = bound(stage=2, fsdp=2, tensor=2)
        sharding = dataclasses.replace(sharding, rules=sharding.rules.replace(expert_batch=None))
        run, placed = compiled_on(sharding, layer, arguments)
        numbers.append(run(*placed))
        gathers = [line for line in run.as_text().splitlines() if " all-gather(" in line]
        in_loop.append(sum("while/body" in line for line in gathers))
        outside.append(len(gathers) - in_loop[-1])
    jax.tree.map(check_close, *numbers)
    # The stage has two weights: forward, recomputed and for the gradients of their inputs.
    assert in_loop == [6, 0]
    assert outside[1] - outside[0] == 2


def test_loop_saves_no_copy_of_the_weights():
    layer = pipeline(2, 4, remat="none")
    x, shift = inputs(4)
    variables = jax.eval_shape(layer.init, KEY)
    run = jax.grad(lambda v: jnp.sum(layer.apply(v, x, shift=shift)))
    forward, _ = (
        eqn
        for eqn in jax.make_jaxpr(run)(variables).eqns
        if eqn.primitive.name == "scan" and eqn.params["length"] == 5
    )
    kept = [out.aval.shape for out in forward.outvars if out.aval.shape[:1] == (5,)]
    # Rows of a microbatch and single numbers, but nothing [stage, dims, dims], not even booleans.
    assert kept and all(np.prod(shape[1:]) <= 2 * DIMS for shape in kept)


# What is refused.


def applied(layer, batch):
    """Trace a layer on a batch."""
    x, shift = inputs(batch)
    variables = jax.eval_shape(layer.init, KEY)
    return jax.eval_shape(lambda v: layer.apply(v, x, shift=shift), variables)


@pytest.mark.parametrize(
    ("fields", "field", "value"),
    [
        ({"microbatches": 4}, "num_microbatches", 4),
        ({"microbatch_size": 4}, "microbatch_size", 4),
        ({"microbatch_size": 2}, "num_microbatches", 3),
    ],
)
def test_training_raises_for_a_batch_that_cannot_be_split(raises, fields, field, value):
    with raises(ConfigError, owner="Pipeline()", field=field, value=value):
        applied(pipeline(2, **{"microbatches": None, "train": True, **fields}), 6)


@pytest.mark.parametrize(
    "policy", ["offload_residual", "offload:stage_input,residual", "offload:query;save:key"]
)
def test_init_raises_for_activations_in_host_memory_that_do_not_compile(raises, policy):
    with raises(ConfigError, owner="Pipeline()", field="remat", value=policy):
        applied(pipeline(2, 4, remat=policy), 4)


class Widening(BaseLayer):
    def fprop(self, x):
        return jnp.concatenate([x, x], axis=-1)


def test_apply_raises_for_a_stage_that_changes_the_shape(raises):
    stage = Widening.HParams.config()
    layer = Pipeline.HParams.config(stage_tpl=stage, num_stages=2, num_microbatches=2).Instantiate()
    with raises(ConfigError, field="result of stage", value="float32[2, 6]"):
        layer.apply({}, jnp.zeros((4, 3)))
