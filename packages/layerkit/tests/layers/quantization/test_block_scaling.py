"""What products of blocks share; the kernel's program is traced for absent devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, use_abstract_mesh

from layerkit.base.sharding import BoundSharding
from layerkit.config import Config
from layerkit.errors import ConfigError
from layerkit.layers.basic.linears import Linear
from layerkit.layers.moe.token_choice import MoeFeedForward
from layerkit.layers.quantization.mxfp8 import MxFp8Dot
from layerkit.layers.quantization.nvfp4 import NvFp4Dot

RNGS = {"random": jax.random.key(3)}
both = pytest.mark.parametrize("dot", [MxFp8Dot, NvFp4Dot])


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def make_linear(dot, **fields):
    layer = Linear(input_dims=64, output_dims=32, dot_tpl=Config(dot), **fields)
    return layer, layer.init(jax.random.key(0))


def make_experts(dot, **fields):
    dot_tpl = Config(dot)
    layer = MoeFeedForward(input_dims=32, hidden_dims=64, num_experts=2, dot_tpl=dot_tpl, **fields)
    variables = jax.jit(layer.init)(jax.random.key(0))
    return layer, variables, jnp.asarray(draw(0, 2, 4, 32))


def on_device(kind, platform):
    """Return a context in which programs are traced for a device of another machine."""
    device = AbstractDevice(kind, num_cores=None, platform=platform)
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


@both
def test_leading_axes_are_tokens(dot):
    x, w = draw(0, 2, 6, 64), draw(1, 64, 4)
    multiply = jax.jit(lambda x, w: dot().apply({}, x, w))
    result = multiply(x, w)
    np.testing.assert_array_equal(result.reshape(12, 4), multiply(x.reshape(12, 64), w))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("dot", "least", "most"), [(MxFp8Dot, 0.01, 0.04), (NvFp4Dot, 0.1, 0.2)])
def test_layer_is_near_the_exact_product(dot, least, most, dtype):
    layer, variables = make_linear(dot, fprop_dtype=dtype)
    x = jax.random.normal(jax.random.key(1), (4, 8, 64), dtype)
    result = jax.jit(layer.apply)(variables, x)
    assert result.dtype == dtype
    reference = np.asarray(layer.clone(dot_tpl=None).apply(variables, x), np.float64)
    error = np.square(np.asarray(result, np.float64) - reference).mean()
    assert least < np.sqrt(error / np.square(reference).mean()) < most


@both
def test_program_of_blackwell_multiplies_blocks_forward_and_backward(dot):
    layer, variables = make_linear(dot, fprop_dtype="bfloat16", train=True)
    x = jnp.ones((8, 4, 64), jnp.bfloat16)

    def loss(variables, x):
        return layer.apply(variables, x, rngs=RNGS).astype("float32").sum()

    with on_device("NVIDIA B200", "gpu"):
        text = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(variables, x))
    assert text.count("scaled_matmul_wrapper[") == 3
    # NVFP4 rotates the two factors of the weight's gradient.
    assert text.count("dot_general") == (2 if dot is NvFp4Dot else 0)


@both
def test_product_of_blackwell_supports_vmap(dot):
    x, w = jnp.ones((2, 1, 32, 64)), jnp.ones((2, 1, 64, 96))

    def loss(x, w):
        return jnp.sin(dot().multiply(x, w, "cudnn")).sum()

    of_x, of_w = jax.eval_shape(jax.vmap(jax.grad(loss, argnums=(0, 1))), x, w)
    assert (of_x.shape, of_w.shape) == (x.shape, w.shape)


@pytest.mark.parametrize(
    ("dot", "kind", "platform"),
    [(MxFp8Dot, "NVIDIA H100 80GB HBM3", "gpu"), (NvFp4Dot, "TPU v5 lite", "tpu")],
)
def test_other_devices_raise(raises, dot, kind, platform):
    layer, variables = make_linear(dot)
    with on_device(kind, platform), raises(ConfigError, field="dot_tpl", value=dot.__name__):
        jax.eval_shape(layer.apply, variables, jnp.ones((4, 64)))


@pytest.mark.parametrize(("dot", "axis"), [(MxFp8Dot, "tensor"), (NvFp4Dot, "context")])
def test_mesh_that_splits_features_or_positions_raises(raises, dot, axis):
    layer, variables = make_linear(dot, sharding=BoundSharding(Mesh(jax.devices()[:2], (axis,))))
    with raises(ConfigError, field="dot_tpl", value=dot.__name__):
        jax.eval_shape(layer.apply, variables, jnp.ones((4, 8, 64)))


@pytest.mark.slow
@both
def test_experts_evaluate_as_they_train(dot):
    layer, variables, x = make_experts(dot, capacity_factor=2.0)
    training = layer.clone(train=True)

    @jax.jit
    def train(variables):
        return training.apply(variables, x, rngs=RNGS, mutable=["summaries", "aux_loss"])[0]

    evaluated = jax.jit(layer.apply)(variables, x)
    np.testing.assert_allclose(evaluated, train(variables), rtol=1e-5, atol=1e-5)


def test_experts_without_a_capacity_raise_in_training(raises):
    layer, variables, x = make_experts(MxFp8Dot, train=True)
    with raises(ConfigError, field="dot_tpl", value="MxFp8Dot"):
        jax.eval_shape(lambda v: layer.apply(v, x, mutable=["summaries", "aux_loss"]), variables)
