"""Residual networks against Praxis and Transformers, in training and in evaluation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from layerkit.base.base_layer import NON_TRAINABLE
from layerkit.config import build
from layerkit.errors import ConfigError
from layerkit.layers import Pooling, ResNet, ResNetBasicBlock, ResNetBlock, resnet

KEY = jax.random.key(0)
BLOCKS = {"bottleneck": ResNetBlock, "basic": ResNetBasicBlock}
# Numbers of weights that torchvision lists, with a classifier of 1000 classes.
COUNTS = {18: 11_689_512, 34: 21_797_672, 50: 25_557_032, 101: 44_549_160, 152: 60_192_808}


def small(block, **fields):
    config = ResNet.HParams.config(channels=(4, 8), blocks=(1, 1), **fields)
    config.block_tpl = block.HParams.config()
    return config


@pytest.mark.parametrize("kind", BLOCKS)
def test_training_and_gradients_equal_praxis(praxis, kind):
    case = praxis(f"resnet_{kind}")
    layer = build(small(BLOCKS[kind])).clone(train=True)
    ours = {"beta": "bias", "gamma": "scale"}

    def read(tree):
        paths = {tuple(ours.get(n, n) for n in name.split(".")): x for name, x in tree.items()}
        return unflatten_dict(paths)

    state = jax.jit(layer.init)(KEY)[NON_TRAINABLE]

    def loss(params, x):
        variables = {"params": params, NON_TRAINABLE: state}
        outputs, updates = layer.apply(variables, x, mutable=[NON_TRAINABLE])
        return jnp.sum(outputs * case["cotangent"]), (outputs, updates[NON_TRAINABLE])

    (of_params, of_x), (outputs, moved) = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(
        read(case["weights"]), case["x"]
    )
    np.testing.assert_allclose(outputs, case["outputs"], atol=1e-5)
    np.testing.assert_allclose(of_x, case["gradient_of_x"], atol=1e-4)
    for result, theirs in ((of_params, case["gradients"]), (moved, case["state"])):
        expected = flatten_dict(read(theirs))
        for path, value in flatten_dict(result).items():
            np.testing.assert_allclose(value, expected.pop(path), atol=1e-4, err_msg=path)
        assert not expected


NAMES = {f"layer.{n}": f"body_{n}" for n in range(3)}
NAMES |= {"embedder.embedder": "entryflow_conv", "shortcut": "shortcut"}
NORM = {
    "weight": ("params", "scale", lambda w: w - 1),
    "bias": ("params", "bias", lambda w: w),
    "running_mean": (NON_TRAINABLE, "moving_mean", lambda w: w),
    "running_var": (NON_TRAINABLE, "moving_variance", lambda w: w),
}


def read_torch(tensors):
    """Return the variables of a ResNet of Transformers."""
    flat = {}
    for name, tensor in tensors.items():
        head, _, last = name.rpartition(".")
        place, _, kind = head.rpartition(".")
        if last == "num_batches_tracked":
            continue
        prefix, end = (), place
        if place.startswith("encoder"):
            _, _, stage, _, block, end = place.split(".", 5)
            prefix = (f"stage_{stage}_block_{block}",)
        path = (*prefix, NAMES[end])
        value = tensor.detach().numpy()
        if kind == "convolution":
            flat["params", *path, "w"] = value.transpose(2, 3, 1, 0)
        else:
            collection, ours, convert = NORM[last]
            flat[collection, *path, "bn", ours] = convert(value)
    return unflatten_dict(flat)


@pytest.mark.parametrize("kind", BLOCKS)
def test_evaluation_and_training_equal_transformers(kind):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.ResNetModel(
        transformers.ResNetConfig(
            embedding_size=1 if kind == "bottleneck" else 4,
            hidden_sizes=[4, 8],
            depths=[1, 1],
            layer_type=kind,
        )
    )
    for weight in theirs.state_dict().values():
        if weight.ndim == 1:
            weight.uniform_(0.5, 1.5)
    config = small(BLOCKS[kind], entry_pool_tpl=Pooling.HParams.config(padding="EVEN"))
    config.entry_pool_tpl.set(window=(3, 3), strides=2)
    config.conv_tpl.batch_norm_tpl.epsilon = 1e-5
    model = build(config)
    images = np.random.default_rng(0).normal(size=(4, 32, 32, 3)).astype(np.float32)
    rows = torch.tensor(images.transpose(0, 3, 1, 2))
    variables = read_torch(theirs.state_dict())
    shapes = jax.tree.map(np.shape, variables)
    assert shapes == jax.tree.map(np.shape, jax.eval_shape(model.init, KEY))
    variables = jax.tree.map(np.array, variables)  # PyTorch changes its statistics in place.
    for is_training in (False, True):
        expected = theirs.train(is_training)(rows).last_hidden_state
        result, updates = model.clone(train=is_training).apply(
            variables, images, mutable=[NON_TRAINABLE]
        )
        expected = expected.detach().numpy().transpose(0, 2, 3, 1)
        np.testing.assert_allclose(result, expected, atol=2e-5)
    # PyTorch averages n/(n - 1) times the variance of n values: here 4 · 16 · 16.
    moved = read_torch(theirs.state_dict())[NON_TRAINABLE]["entryflow_conv"]["bn"]
    ours = updates[NON_TRAINABLE]["entryflow_conv"]["bn"]
    old = variables[NON_TRAINABLE]["entryflow_conv"]["bn"]["moving_variance"]
    np.testing.assert_allclose(ours["moving_mean"], moved["moving_mean"], atol=1e-6)
    batch = (ours["moving_variance"] - 0.9 * old) * 1024 / 1023
    np.testing.assert_allclose(0.9 * old + batch, moved["moving_variance"], atol=1e-5)


# A depth of each kind of block in the ordinary tests.
@pytest.mark.parametrize(
    "depth",
    [pytest.param(n, marks=() if n in (18, 50) else pytest.mark.slow) for n in COUNTS],
)
def test_numbers_of_weights_are_those_of_torchvision(depth):
    model = build(resnet(depth))
    params = jax.eval_shape(model.init, KEY)["params"]
    classifier = 1000 * (model.channels[-1] + 1)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) + classifier == COUNTS[depth]


def test_unknown_depth_and_missing_stage_raise(raises):
    with raises(ConfigError, field="depth", value=20):
        resnet(20)
    with raises(ConfigError, field="blocks", value=(1,)):
        build(small(ResNetBlock).clone(blocks=(1,))).init(KEY)


def test_block_with_initial_zeros_is_the_identity():
    config = ResNetBlock.HParams.config(input_dims=8, output_dims=8, zero_init_residual=True)
    layer, x = build(config).clone(train=True), jax.random.normal(KEY, (2, 4, 4, 8))
    run = jax.jit(lambda key: layer.apply(layer.init(key), x, mutable=[NON_TRAINABLE]))
    outputs, _ = run(KEY)
    np.testing.assert_allclose(outputs, jnp.maximum(x, 0), atol=1e-6)
