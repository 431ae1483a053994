"""Fp8Dot, compared with Flax's fp8 layer and with exact products, and its state over steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import Mesh

from layerkit.base.base_layer import OVERWRITE_WITH_GRADIENT, PARAMS, BaseLayer
from layerkit.base.sharding import BoundSharding
from layerkit.base.weights import WeightHParams, is_box, logical_axes, unbox
from layerkit.config import sub_config_field
from layerkit.layers.basic.dots import create_dot, matmul
from layerkit.layers.basic.linears import Linear
from layerkit.layers.quantization.fp8 import Fp8Dot, accumulate_by_max, next_state
from layerkit.layers.transformer.pipeline import Pipeline
from layerkit.layers.transformer.repeat import Repeat

KEY = jax.random.key(0)
FP8 = Fp8Dot.HParams.config(amax_history_length=4)
TENSORS = ("input", "kernel", "output_grad")


def linear(**fields):
    return Linear(input_dims=16, output_dims=32, dot_tpl=FP8, **fields)


def inputs(step=0):
    return (1.0 + step) * jax.random.normal(jax.random.key(10 + step), (4, 6, 16))


def train_step(layer):
    """(outputs, gradients of weights and inputs, next state) of one step, compiled."""

    def step(params, state, x):
        def loss(params, state, x):
            variables = {PARAMS: params, OVERWRITE_WITH_GRADIENT: accumulate_by_max(state)}
            outputs = layer.apply(variables, x)
            return jnp.mean(jnp.square(outputs.astype(jnp.float32))), outputs

        grads = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)
        (of_params, of_state, of_x), outputs = grads(params, state, x)
        return outputs, of_params, of_x, next_state(state, of_state)

    return jax.jit(step)


def split(variables):
    return variables[PARAMS], variables[OVERWRITE_WITH_GRADIENT]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_steps_equal_flax(dtype):
    layer = linear(fprop_dtype=dtype)
    params, state = split(jax.jit(layer.init)(KEY))
    theirs = nn.Dense(32, use_bias=False, dtype=dtype, dot_general_cls=Op)
    w, their_state = params["w"], {"Op_0": state["dot"]}

    @jax.jit
    def their_step(w, state, x):
        def loss(w, state, x):
            variables = {PARAMS: {"kernel": w}, OVERWRITE_WITH_GRADIENT: state}
            outputs = theirs.apply(variables, x)
            return jnp.mean(jnp.square(outputs.astype(jnp.float32))), outputs

        return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(w, state, x)

    run = train_step(layer)
    for step in range(6):
        x = inputs(step).astype(dtype).reshape(-1, 16)
        outputs, of_params, of_x, state = run({"w": w}, state, x)
        (of_w, their_state, their_of_x), their_outputs = their_step(w, their_state, x)
        expected = (their_outputs, of_w, their_of_x, their_state["Op_0"])
        result = (outputs, of_params["w"], of_x, state["dot"])
        jax.tree.map(np.testing.assert_array_equal, result, expected)
    assert all(state["dot"][f"{tensor}_scale"] != 1.0 for tensor in TENSORS)


def Op():
    return nn.Fp8DirectDotGeneralOp(amax_history_length=4, name="Op_0")


def test_history_holds_the_last_steps_and_sets_the_scales():
    layer = linear()
    params, state = split(jax.jit(layer.init)(KEY))
    largest, run = [], train_step(layer)
    for step in range(6):
        previous = state["dot"]["input_amax_history"]
        _, _, _, state = run(params, state, inputs(step))
        largest.append(float(jnp.max(jnp.abs(inputs(step)))))
        history = np.sort(state["dot"]["input_amax_history"])
        np.testing.assert_allclose(history[-len(largest) :], np.sort(largest[-4:]), rtol=1e-6)
        expected = float(previous.max()) / 448.0 if step else 1.0
        np.testing.assert_allclose(state["dot"]["input_scale"], expected, rtol=1e-6)
    np.testing.assert_allclose(
        state["dot"]["kernel_scale"], jnp.max(jnp.abs(params["w"])) / 448, rtol=1e-6
    )


def test_group_of_weights_is_multiplied_in_one_product():
    dot = FP8.Instantiate()
    x = jax.random.normal(KEY, (3, 5, 16))
    w = jax.random.normal(jax.random.key(1), (3, 16, 8))
    variables = dot.init(KEY)
    run = jax.jit(dot.apply)
    result = run(variables, x, w)
    each = np.stack([run(variables, x[i], w[i]) for i in range(3)])
    np.testing.assert_allclose(result, each, rtol=1e-6, atol=1e-6)


class Twice(BaseLayer):
    """One weight that multiplies two times."""

    dot_tpl: Any = sub_config_field(None)

    def setup(self):
        weight = WeightHParams((16, 16), (None, None))
        self.create_variable("w", weight)
        create_dot(self, weight)

    def fprop(self, x):
        return matmul(self, 3.0 * matmul(self, x, self.theta.w), self.theta.w)


def test_product_that_runs_twice_keeps_the_largest_value():
    layer = Twice(dot_tpl=FP8)
    params, state = split(jax.jit(layer.init)(KEY))
    x = inputs()
    _, _, _, after = train_step(layer)(params, state, x)
    # Scales are 1 in the first step, so the inner product is that of the rounded factors.
    rounded = [t.astype(jnp.float8_e4m3fn).astype(jnp.float32) for t in (x, params["w"])]
    second = jnp.max(jnp.abs(3.0 * (rounded[0] @ rounded[1])))
    assert second > jnp.max(jnp.abs(x))
    np.testing.assert_allclose(after["dot"]["input_amax_history"][0], second, rtol=1e-5)
    np.testing.assert_array_equal(after["dot"]["kernel_scale"], [1.0])


class Block(BaseLayer):
    """A layer to be repeated, whose outputs are of the size of its inputs."""

    def setup(self):
        config = Linear.HParams.config(input_dims=16, output_dims=16, dot_tpl=FP8)
        self.create_child("linear", config)

    def fprop(self, x):
        return x + self.linear(x)


def test_repeated_layers_have_separate_scales_with_and_without_remat():
    one = Block()
    init = jax.jit(one.init)
    x, stacked_params, stacked_state = inputs(), [], []
    for key in jax.random.split(KEY, 3):
        params, state = split(init(key))
        stacked_params.append(params)
        stacked_state.append(state)
    stack = lambda trees: {"sub": jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)}  # noqa: E731

    class Unrolled(BaseLayer):
        def setup(self):
            self.create_children("block", [Block.HParams.config()] * 3)

        def fprop(self, x):
            for block in self.block:
                x = block(x)
            return x

    def by_name(trees):
        return {f"block_{i}": tree for i, tree in enumerate(trees)}

    expected = train_step(Unrolled())(by_name(stacked_params), by_name(stacked_state), x)
    for remat in ("none", "full"):
        repeat = Repeat(sub_tpl=Block.HParams.config(), num_repeats=3, remat=remat)
        _, shapes = split(jax.eval_shape(repeat.init, KEY))
        assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, stack(stacked_state))
        result = train_step(repeat)(stack(stacked_params), stack(stacked_state), x)
        np.testing.assert_allclose(result[0], expected[0], rtol=1e-5, atol=1e-5)
        last = stack([expected[3][f"block_{i}"] for i in range(3)])
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), result[3], last)
    boxed = jax.eval_shape(repeat.init_boxed, KEY)[OVERWRITE_WITH_GRADIENT]
    axes = logical_axes(boxed)["sub"]["linear"]["dot"]
    assert axes["input_scale"] == ("layers", None)


class Unit(Block):
    """Divides by the norm of a row, which is not a number in the bubbles of a pipeline."""

    def fprop(self, x):
        return super().fprop(x / jnp.linalg.norm(x, axis=-1, keepdims=True))


@pytest.mark.parametrize(
    ("circular_repeats", "num_microbatches", "remat"),
    [
        (2, 2, "full"),
        pytest.param(1, 4, "none", marks=pytest.mark.slow),
        pytest.param(1, 2, "full", marks=pytest.mark.slow),
        pytest.param(2, 4, "projections", marks=pytest.mark.slow),
    ],
)
def test_pipeline_keeps_the_largest_value_of_all_microbatches(
    circular_repeats, num_microbatches, remat
):
    row = Repeat(sub_tpl=Unit.HParams.config(), num_repeats=2 * circular_repeats)
    pipeline = Pipeline(
        stage_tpl=Unit.HParams.config(),
        num_stages=2,
        circular_repeats=circular_repeats,
        num_microbatches=num_microbatches,
        remat=remat,
    )
    params, state = (tree["sub"] for tree in split(jax.jit(row.init)(KEY)))
    leading = (circular_repeats, 2) if circular_repeats > 1 else (2,)

    def stacked(tree):
        return {"stage": jax.tree.map(lambda x: x.reshape(*leading, *x.shape[1:]), tree)}

    own, own_state = stacked(params), stacked(state)
    drawn = jax.eval_shape(pipeline.init, KEY)[OVERWRITE_WITH_GRADIENT]
    assert jax.tree.map(jnp.shape, drawn) == jax.tree.map(jnp.shape, own_state)
    run, run_row = train_step(pipeline), train_step(row)
    for step in range(3):
        # Rows of one microbatch are the largest, each time of another.
        x = inputs().at[step].multiply(10.0)
        outputs, gradients, _, own_state = run(own, own_state, x)
        expected, row_gradients, _, state = run_row({"sub": params}, {"sub": state}, x)
        state = state["sub"]
        np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-5)
        close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
        jax.tree.map(close, gradients, stacked(row_gradients["sub"]))
        close = partial(np.testing.assert_allclose, rtol=1e-4)
        jax.tree.map(close, own_state, stacked(state))
    dot = own_state["stage"]["linear"]["dot"]
    assert all(np.all(dot[f"{tensor}_scale"] != 1.0) for tensor in TENSORS)


def test_step_on_a_mesh_equals_one_device():
    bound = BoundSharding(Mesh(np.reshape(jax.devices(), (2, 2, 2)), ("data", "fsdp", "tensor")))
    layer = linear(activation_axes=("batch", "length", "act_mlp"))
    boxed = jax.jit(layer.init_boxed)(KEY)
    variables, x = unbox(boxed), inputs()
    places = jax.tree.map(
        lambda box: bound.sharding(box.axes, shape=box.value.shape), boxed, is_leaf=is_box
    )
    expected = train_step(layer)(*split(variables), x)
    rows = jax.device_put(x, bound.sharding(("batch", None, None)))
    placed = split(jax.device_put(variables, places))
    result = train_step(layer.clone(sharding=bound))(*placed, rows)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), result, expected)


def test_zero_and_non_finite_updates_are_ignored():
    state = {name: jnp.array([1.0, 2.0]) for name in ("ran", "did_not_run", "nan", "inf")}
    updates = {
        "ran": jnp.array([3.0, 0.0]),
        "did_not_run": jnp.zeros(2),
        "nan": jnp.array([3.0, jnp.nan]),
        "inf": jnp.array([jnp.inf, 2.0]),
    }
    after = next_state(state, updates)
    np.testing.assert_array_equal(after.pop("ran"), [3.0, 0.0])
    for kept in after.values():
        np.testing.assert_array_equal(kept, [1.0, 2.0])


def test_hopper_gpu_multiplies_eight_bit_floats():
    layer = linear(fprop_dtype=jnp.bfloat16)
    shapes = jax.eval_shape(layer.init, KEY)
    traced = train_step(layer).trace(*split(shapes), jax.ShapeDtypeStruct((4, 6, 16), jnp.bfloat16))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) == 3
    for line in products:
        operands = line.split(" : (")[1].split(") ->")[0]
        assert operands.count("f8E") == 2, line
    assert sum("f8E5M2" in line for line in products) == 2


def test_evaluation_does_not_change_the_state():
    layer = linear()
    variables = jax.jit(layer.init)(KEY)
    outputs, updates = jax.jit(partial(layer.apply, mutable=["aux_loss"]))(variables, inputs())
    exact = jax.jit(layer.clone(dot_tpl=None).apply)(variables, inputs())
    np.testing.assert_allclose(outputs, exact, rtol=0.1, atol=0.3)
    assert updates == {}
