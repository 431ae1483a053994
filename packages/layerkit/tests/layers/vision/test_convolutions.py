"""Convolutions and pooling against Praxis and PyTorch, forward and gradient."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from layerkit.base.sharding import DEFAULT_RULES, STANDARD_MESH_AXES, BoundSharding
from layerkit.base.weights import WeightHParams, WeightInit
from layerkit.config import build
from layerkit.errors import ConfigError
from layerkit.layers import Conv, ConvBNAct, ConvTranspose, GlobalPooling, Pooling
from layerkit.layers.vision.convolutions import sum_windows

KEY = jax.random.key(0)
SIZES = {"input_dims": 4, "output_dims": 6, "kernel_size": (3, 2)}
CASES = {
    "even": {"padding": "EVEN", "strides": (2, 3)},
    "valid": {"padding": "VALID", "strides": (1, 2), "dilations": (2, 1)},
    "same": {"strides": 2, "use_bias": True},
    "causal": {"padding": "CAUSAL"},
    "groups": {"padding": "EVEN", "kernel_size": (2, 3), "num_groups": 2},
    "depthwise": {
        "padding": "CAUSAL",
        "kernel_size": (3,),
        "dilations": 2,
        "num_groups": 4,
        "output_dims": 8,
    },
    "video": {
        "padding": "EVEN",
        "kernel_size": (2, 1, 2),
        "strides": (1, 2, 1),
        "input_dims": 3,
        "output_dims": 2,
    },
}


def outputs_and_gradients(layer, params, x, cotangent):
    def loss(params, x):
        outputs = layer.apply({"params": params}, x)
        return jnp.sum(outputs * cotangent), outputs

    gradients, outputs = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, x)
    return outputs, *gradients


@pytest.mark.parametrize("name", CASES)
def test_convolution_and_gradients_equal_praxis(praxis, name):
    case = praxis(f"conv_{name}")
    layer = build(Conv.HParams.config(**{**SIZES, **CASES[name]}))
    arguments = case["weights"], case["x"], case["cotangent"]
    outputs, of_weights, of_x = outputs_and_gradients(layer, *arguments)
    np.testing.assert_allclose(outputs, case["outputs"], atol=1e-5)
    np.testing.assert_allclose(of_x, case["gradient_of_x"], atol=1e-4)
    for weight, value in case["gradients"].items():
        np.testing.assert_allclose(of_weights[weight], value, atol=1e-4)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"padding": "VALID"}, {}),
        ({"padding": ((1, 0), (1, 1))}, {"padding": 1, "output_padding": (1, 0)}),
        (
            {"padding": ((2, 2), (0, 0)), "dilations": (2, 1)},
            {"padding": (2, 0), "dilation": (2, 1)},
        ),
    ],
    ids=["all", "output_padding", "dilated"],
)
def test_transposed_convolution_equals_pytorch(ours, theirs):
    torch = pytest.importorskip("torch")
    layer = build(ConvTranspose.HParams.config(**SIZES, strides=2, use_bias=True, **ours))
    x = np.random.default_rng(0).normal(size=(2, 5, 6, 4)).astype(np.float32)
    params = jax.tree.map(lambda w: w + 0.1, layer.init(KEY)["params"])
    weight = torch.tensor(np.array(params["w"]).transpose(2, 3, 0, 1))
    expected = torch.nn.functional.conv_transpose2d(
        torch.tensor(x.transpose(0, 3, 1, 2)),
        weight,
        torch.tensor(np.array(params["b"])),
        stride=2,
        **theirs,
    )
    result = layer.apply({"params": params}, x)
    np.testing.assert_allclose(result, expected.numpy().transpose(0, 2, 3, 1), atol=1e-5)


def test_transposed_convolution_with_same_padding_multiplies_sizes():
    layer = build(ConvTranspose.HParams.config(**SIZES, strides=(2, 3)))
    assert layer.apply(layer.init(KEY), jnp.ones((1, 5, 4, 4))).shape == (1, 10, 12, 6)


def test_convolution_normalizes_and_activates():
    layer = build(ConvBNAct.HParams.config(**SIZES)).clone(train=True)
    x = jax.random.normal(KEY, (4, 8, 8, 4))
    variables = jax.jit(layer.init)(KEY)
    result, state = jax.jit(partial(layer.apply, mutable=["non_trainable"]))(variables, x)
    plain = Conv(**SIZES).apply({"params": {"w": variables["params"]["w"]}}, x)
    mean, variance = jnp.mean(plain, (0, 1, 2)), jnp.var(plain, (0, 1, 2))
    expected = jnp.maximum((plain - mean) / jnp.sqrt(variance + 1e-3), 0)
    np.testing.assert_allclose(result, expected, atol=1e-5)
    np.testing.assert_allclose(state["non_trainable"]["bn"]["moving_mean"], 0.001 * mean, atol=1e-6)


def test_fans_of_a_convolution_count_its_window():
    weight = WeightHParams((3, 2, 4, 6), (None,) * 4, fan_out_dims=(3,), window_dims=(0, 1))
    assert weight.fans() == weight.fans(WeightInit.XavierLastAxes()) == (24, 36)
    layer = build(Conv.HParams.config(**SIZES, weight_init=WeightInit.FanOut(2.0)))
    box = layer.init_boxed(KEY)["params"]["w"]
    assert box.is_factor
    assert box.fan_in_dims == (-4, -3, -2)
    assert box.fan_out_dims == (-1,)
    assert np.std(box.value) == pytest.approx(2 / 6, rel=0.2)


def test_convolution_rejects_what_does_not_fit(raises):
    for fields, field, value in (
        ({"num_groups": 3}, "input_dims", 4),
        ({"strides": (1, 2, 3)}, "strides", (1, 2, 3)),
        ({"padding": ((0, 1),)}, "padding", ((0, 1),)),
    ):
        with raises(ConfigError, field=field, value=value):
            build(Conv.HParams.config(**{**SIZES, **fields})).init(KEY, jnp.ones((1, 4, 4, 4)))
    for padding in (((1, 1),), ((2, 0), (0, 0))):
        with raises(ConfigError, field="padding", value=padding):
            build(Pooling.HParams.config(padding=padding)).init(KEY)


@pytest.mark.parametrize("kind", ["max", "mean"])
@pytest.mark.parametrize(
    ("padding", "strides"), [("SAME", (1, 1)), ("SAME", (2, 3)), ("VALID", (2, 1))]
)
def test_pooling_equals_praxis(praxis, kind, padding, strides):
    theirs = {"max": "max", "mean": "avg"}[kind]
    case = praxis(f"pooling_{theirs}_{padding}_{strides[0]}".lower())
    layer = Pooling(window=(3, 2), strides=strides, kind=kind, padding=padding)
    is_token = case["paddings"] == 0
    np.testing.assert_allclose(layer.apply({}, case["x"]), case["outputs"], atol=1e-6)
    masked = layer.apply({}, case["x"], is_token=is_token)
    np.testing.assert_allclose(masked, case["masked"], atol=1e-6)
    left = layer.apply({}, is_token, method="pool_tokens")
    np.testing.assert_array_equal(left, case["left"] == 0)


@pytest.mark.parametrize("kind", ["max", "mean"])
def test_global_pooling_equals_praxis(praxis, kind):
    case = praxis("global_pooling_" + {"max": "max", "mean": "avg"}[kind])
    x = case["x"][:2]
    is_token = jnp.broadcast_to(case["paddings"][:2, :, None] == 0, x.shape[:-1])
    layer = GlobalPooling(kind=kind)
    np.testing.assert_allclose(layer.apply({}, x), case["outputs"], atol=1e-6)
    masked = layer.apply({}, x, is_token=is_token)
    np.testing.assert_allclose(masked, case["masked"], atol=1e-6)
    assert not np.any(layer.apply({}, x, is_token=jnp.zeros(x.shape[:-1], bool)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_means_of_many_large_values_are_exact_in_half_precision(dtype):
    x = jnp.full((1, 32, 32, 1), 100.0).at[:, ::2].add(1.0)
    layer = Pooling(window=(32, 32), kind="mean", fprop_dtype=dtype)
    assert layer.apply({}, x).item() == jnp.asarray(100.5, dtype)


def test_images_of_bytes_are_read_as_numbers():
    x = np.random.default_rng(0).integers(0, 256, (2, 4, 4, 4)).astype(np.uint8)
    for layer in (Conv(**SIZES), Pooling(), GlobalPooling(kind="max")):
        variables = layer.init(KEY, x)
        result = layer.apply(variables, x)
        np.testing.assert_array_equal(result, layer.apply(variables, x.astype(np.float32)))
        assert result.dtype == jnp.float32


@pytest.mark.parametrize("fields", [{}, {"num_groups": 4, "dilations": 2}], ids=["dense", "groups"])
def test_convolution_on_a_mesh_has_the_values_and_gradients_of_one_device(fields):
    layer = Conv(input_dims=4, output_dims=8, kernel_size=(3,), strides=2, **fields)
    variables, x = layer.init(KEY), jax.random.normal(KEY, (4, 16, 4))

    def run(layer, variables, x):
        def loss(variables, x):
            outputs = layer.apply(variables, layer.constrain(x, "batch", "length", None))
            return jnp.sum(outputs**2), outputs

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(variables, x)

    expected = jax.jit(lambda *arrays: run(layer, *arrays))(variables, x)
    # data, fsdp, tensor, stage, expert, context
    mesh = Mesh(np.reshape(jax.devices(), (1, 2, 2, 1, 1, 2)), STANDARD_MESH_AXES)
    bound = BoundSharding(mesh, DEFAULT_RULES)
    axes = (None, None if fields else "embed", "mlp")
    weights = jax.tree.map(lambda w: jax.device_put(w, bound.sharding(axes)), variables)
    rows = jax.device_put(x, bound.sharding(("batch", None, None)))
    split = layer.clone(sharding=bound)
    with jax.set_mesh(mesh):
        result = jax.jit(lambda *arrays: run(split, *arrays))(weights, rows)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), result, expected
    )


@pytest.mark.parametrize("length", [9, 2])
def test_sum_over_the_window_equals_a_convolution_in_groups(length):
    x, w = jax.random.normal(KEY, (2, length, 4)), jax.random.normal(KEY, (3, 2, 6))
    strides, padding, dilations = (2,), ((-1, 2),), (3,)
    names = {"dimension_numbers": ("N0C", "0IO", "N0C"), "feature_group_count": 2}
    expected = jax.lax.conv_general_dilated(x, w, strides, padding, None, dilations, **names)
    result = jax.jit(sum_windows, static_argnums=(2, 3, 4, 5))(x, w, strides, padding, dilations, 2)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
