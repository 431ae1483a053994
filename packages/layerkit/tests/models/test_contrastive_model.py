"""Contrastive losses against their papers, on meshes and with rows of padding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from layerkit.base.sharding import DEFAULT_RULES, BoundSharding
from layerkit.config import build
from layerkit.config.nested_map import NestedMap
from layerkit.layers import ContrastiveLoss, GlobalPooling
from layerkit.models import ContrastiveModel

KEY = jax.random.key(0)
KINDS = ("softmax", "sigmoid")
IMAGES, TEXTS = np.random.default_rng(0).normal(size=(2, 8, 5)).astype(np.float32)
WEIGHTS = np.array([1, 1, 0, 1, 0.5, 1, 1, 0], np.float32)


def paper(kind, images, texts):
    """Return the loss of each row, in float64."""
    images, texts = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (images, texts))
    logits = images.astype(np.float64) @ texts.T.astype(np.float64)
    if kind == "sigmoid":
        signs = 2 * np.eye(len(images)) - 1
        return np.log1p(np.exp(-signs * (10 * logits - 10))).sum(axis=1)
    logits /= 0.07
    sums = (np.log(np.exp(logits).sum(axis=axis)) for axis in (0, 1))
    return sum(sums) / 2 - np.diag(logits)


def total(variables, images, texts, weights, *, kind="softmax", sharding=None):
    layer = ContrastiveLoss(kind=kind, sharding=sharding)
    losses = layer.apply(variables, images, texts, weights=weights).per_example_loss
    return jnp.sum(losses * weights)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_the_papers_without_rows_of_weight_zero(kind):
    layer = ContrastiveLoss(kind=kind)
    variables = layer.init(KEY)
    actual = jax.jit(layer.apply)(variables, IMAGES, TEXTS, weights=WEIGHTS)
    kept = WEIGHTS > 0
    expected = paper(kind, IMAGES[kept], TEXTS[kept])
    np.testing.assert_allclose(actual.per_example_loss[kept], expected, rtol=1e-5)
    unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (IMAGES[kept], TEXTS[kept])]
    nearest = np.argmax(unit[0] @ unit[1].T, axis=1) == np.arange(kept.sum())
    np.testing.assert_array_equal(actual.correct[kept], nearest)


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_of_devices_equal_those_of_one(kind):
    variables = ContrastiveLoss(kind=kind).init(KEY)
    run = jax.value_and_grad(total, argnums=(0, 1, 2))
    arrays = (IMAGES, TEXTS, WEIGHTS)
    expected = jax.jit(lambda *args: run(*args, kind=kind))(variables, *arrays)
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    bound = BoundSharding(mesh, DEFAULT_RULES)
    rows = [jax.device_put(x, NamedSharding(mesh, PartitionSpec("data"))) for x in arrays]
    with jax.set_mesh(mesh):
        actual = jax.jit(lambda *args: run(*args, kind=kind, sharding=bound))(variables, *rows)
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    split, none = PartitionSpec("rows"), PartitionSpec()

    def step(variables, *arrays):  # as under the pmap partitioner, which adds losses and gradients
        value, (of_weights, *of_rows) = run(variables, *arrays, kind=kind)
        return *jax.lax.psum((value, of_weights), "rows"), *of_rows

    outputs = (none, none, split, split)
    replicas = jax.shard_map(
        step, mesh=mesh, in_specs=(none, *(split,) * 3), out_specs=outputs, check_vma=False
    )
    value, *gradients = jax.jit(replicas)(variables, *arrays)
    for result in (actual, (value, tuple(gradients))):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), result, expected
        )


def test_temperature_is_learned_in_float32_and_does_not_decay():
    config = ContrastiveModel.HParams.config(embed_dims=4, fprop_dtype="bfloat16")
    sizes = {"model_dims": 8, "hidden_dims": 8, "num_heads": 2}
    config.vision_tpl.set(position_grid=(2, 2), pool_tpl=GlobalPooling.HParams.config(), **sizes)
    config.vision_tpl.patch_tpl.patch_size = 4
    config.text_tpl.set(vocab_size=16, **sizes)
    model = build(config)
    variables = jax.jit(model.init)(KEY)
    boxed = jax.eval_shape(model.init_boxed, KEY)
    assert not boxed["params"]["loss"]["log_scale"].decays
    batch = NestedMap(images=jnp.ones((3, 8, 8, 3)), ids=jnp.ones((3, 4), jnp.int32))
    batch.eval_sample_weights = jnp.array([1.0, 1.0, 0.0])
    metrics, outputs = jax.jit(model.apply)(variables, batch)
    # Two pairs that are all equal, and a row of padding.
    np.testing.assert_allclose(metrics["loss"].value, np.log(2), rtol=1e-5)
    assert metrics["loss"].weight == 2
    assert outputs.images.dtype == jnp.bfloat16
    assert outputs.per_example_loss.dtype == jnp.float32


def test_scale_is_clipped_and_gradients_lead_below_the_limit():
    layer = ContrastiveLoss(max_scale=2.0)

    def loss(log_scale, texts):
        outputs = layer.apply({"params": {"log_scale": log_scale}}, TEXTS, texts)
        return outputs.per_example_loss.mean()

    limit = jnp.log(2.0)
    assert loss(limit + 1, TEXTS) == loss(limit, TEXTS) < loss(limit - 1, TEXTS)
    assert jax.grad(loss)(limit + 1, TEXTS) == 0  # Matching texts ask for a larger scale.
    assert jax.grad(loss)(limit + 1, TEXTS[::-1]) > 0


def test_text_without_an_end_is_read_at_its_last_token():
    config = ContrastiveModel.HParams.config(embed_dims=4)
    sizes = {"model_dims": 8, "hidden_dims": 8, "num_heads": 2}
    config.vision_tpl.set(position_grid=(2, 2), **sizes)
    config.text_tpl.set(vocab_size=16, **sizes)
    model = build(config)
    ids = jnp.array([[3, 5, 7, 0]])
    run = jax.jit(lambda v, *a, **k: model.apply(v, *a, method="embed_texts", **k))
    variables = jax.jit(model.init)(KEY)
    actual = run(variables, ids, paddings=jnp.array([[0, 0, 0, 1]]))
    np.testing.assert_allclose(actual, run(variables, ids[:, :3]), atol=1e-6)
