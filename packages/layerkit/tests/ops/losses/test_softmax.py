from __future__ import annotations

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from layerkit.errors import ConfigError
from layerkit.ops.losses.softmax import (
    _statistics_in_four_passes,
    _statistics_in_one_pass,
    cross_entropy,
    soft_cross_entropy,
    weighted_mean,
)


def draw(*shape, seed=0, scale=2.0):
    return np.random.default_rng(seed).normal(size=shape, scale=scale).astype(np.float32)


def draw_labels(*shape, classes, seed=1):
    return np.random.default_rng(seed).integers(0, classes, shape).astype(np.int32)


def target_cross_entropy(logits, targets):
    """−Σ target·log softmax, in float64."""
    logits = logits.astype(np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -(targets * log_p).sum(-1)


# Compiled as a whole, since compiling each operation alone takes longer.
compiled = jax.jit(cross_entropy, static_argnames=("label_smoothing", "z_loss_weight"))


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_loss_is_cross_entropy_with_the_smoothed_target(smoothing):
    logits, labels = draw(3, 5, 7), draw_labels(3, 5, classes=7)
    one_hot = np.eye(7)[labels]
    losses = compiled(jnp.array(logits), jnp.array(labels), label_smoothing=smoothing)
    smoothed = (1 - smoothing) * one_hot + smoothing / 7
    np.testing.assert_allclose(losses.loss, target_cross_entropy(logits, smoothed), rtol=1e-5)
    np.testing.assert_allclose(losses.xent, target_cross_entropy(logits, one_hot), rtol=1e-5)
    np.testing.assert_array_equal(losses.z_loss, 0.0)


def test_z_loss_is_added_to_the_objective_and_reported_separately():
    logits, labels = draw(4, 6), draw_labels(4, classes=6)
    plain = compiled(jnp.array(logits), jnp.array(labels))
    losses = compiled(jnp.array(logits), jnp.array(labels), z_loss_weight=0.01)
    expected = 0.01 * np.log(np.exp(logits.astype(np.float64)).sum(-1)) ** 2
    np.testing.assert_allclose(losses.z_loss, expected, rtol=1e-5)
    np.testing.assert_array_equal(losses.xent, plain.xent)
    np.testing.assert_allclose(losses.loss, plain.xent + expected, rtol=1e-5)


def test_gradient_is_softmax_minus_target():
    logits, labels = draw(4, 6), draw_labels(4, classes=6)
    run = jax.jit(jax.grad(lambda z: cross_entropy(z, jnp.array(labels)).loss.sum()))
    gradient = run(jnp.array(logits))
    softmax = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(gradient, softmax - np.eye(6)[labels], atol=1e-6)


def test_large_logits_give_finite_exact_losses():
    losses = compiled(jnp.array([[1e4, 1e4 + 1.0]]), jnp.array([0]))
    np.testing.assert_allclose(losses.xent, [np.log1p(np.exp(1.0))], rtol=1e-3)


def test_low_precision_logits_are_cast_to_float32():
    logits, labels = jnp.array(draw(4, 6), jnp.bfloat16), jnp.array(draw_labels(4, classes=6))
    losses = cross_entropy(logits, labels)
    assert losses.xent.dtype == losses.loss.dtype == losses.z_loss.dtype == jnp.float32
    expected = cross_entropy(logits.astype(jnp.float32), labels)
    np.testing.assert_array_equal(losses.xent, expected.xent)


def test_correct_is_argmax_with_ties_to_the_first():
    logits = np.array([*itertools.product(range(-2, 3), repeat=3)], np.float32)
    for label in range(3):
        correct = compiled(jnp.array(logits), jnp.full(len(logits), label)).correct
        np.testing.assert_array_equal(correct, logits.argmax(-1) == label)


def test_statistics_of_gpus_equal_those_of_cpus():
    logits = draw(40, 300, scale=20.0)
    logits[0, 7] = logits[0, 9] = 1e4  # equal highest logits, above all others
    logits[1, :-1] = -np.inf
    labels = draw_labels(40, classes=300)
    labels[:4] = [9, 299, -1, 300]
    one_pass = jax.jit(_statistics_in_one_pass)(logits, labels)
    log_z, label_logit, is_best = _statistics_in_four_passes(jnp.array(logits), labels)
    np.testing.assert_allclose(one_pass[0], log_z, rtol=1e-6)
    np.testing.assert_array_equal(one_pass[1], label_logit)
    in_range = (labels >= 0) & (labels < 300)
    np.testing.assert_array_equal(one_pass[2][in_range], is_best[in_range])


@pytest.mark.slow
def test_gpu_reads_float32_logits_once_forward_and_once_backward(absent_devices):
    device = SingleDeviceSharding(absent_devices("cuda", 1)[0])
    tokens, dims, classes = 2048, 64, 50304

    def loss(hidden, vectors, labels):
        logits = jnp.einsum("td,vd->tv", hidden, vectors, preferred_element_type=jnp.float32)
        return cross_entropy(logits, labels).loss.mean()

    shapes = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=device)
        for shape, dtype in [
            ((tokens, dims), jnp.bfloat16),
            ((classes, dims), jnp.bfloat16),
            ((tokens,), jnp.int32),
        ]
    ]
    program = (
        jax.jit(jax.grad(loss, argnums=(0, 1)))
        .lower(*shapes)
        .compile({"xla_gpu_autotune_level": 0})
    )
    logits = f"f32[{tokens},{classes}]"
    fused = re.findall(r"^%(?!gemm)\S+ \(.*\) -> ", program.as_text(), re.M)
    assert sum(logits in parameters for parameters in fused) == 2


@pytest.mark.parametrize("label", [-100, -1, 3])
def test_label_out_of_range_is_nan_and_skipped_by_a_weight_of_zero(label):
    logits, labels = jnp.array(draw(2, 3)) - 10.0, jnp.array([1, label])

    def mean(logits):
        return weighted_mean(compiled(logits, labels).loss, jnp.array([1.0, 0.0]))

    losses = compiled(logits, labels)
    assert np.isfinite(losses.xent[0]) and np.isnan(losses.xent[1]) and np.isnan(losses.loss[1])
    assert not losses.correct[1]
    value, gradient = jax.jit(jax.value_and_grad(mean))(logits)
    np.testing.assert_allclose(value, losses.xent[0])
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient[1], 0.0)


def test_classes_whose_logit_is_minus_infinity_cost_nothing():
    logits = jnp.array([[1.0, 2.0, -jnp.inf]])
    options = {"entropy_loss_weight": 0.1, "z_loss_weight": 0.1}

    def hard(logits):
        return cross_entropy(logits, jnp.array([1]), **options).loss[0]

    def soft(logits):
        targets = jax.nn.one_hot(jnp.array([1]), logits.shape[-1])
        return soft_cross_entropy(logits, targets, **options).loss[0]

    for loss in (hard, soft):
        run = jax.jit(jax.value_and_grad(loss))
        value, gradient = run(logits)
        expected = run(logits[:, :2])
        np.testing.assert_allclose(value, expected[0], rtol=1e-6)
        np.testing.assert_allclose(gradient, np.pad(expected[1], ((0, 0), (0, 1))), atol=1e-6)


def test_no_label_of_logits_that_are_nan_is_correct():
    logits = jnp.full((6, 4), jnp.nan)
    assert not compiled(logits, jnp.array([0, 1, 2, 3, 0, 1])).correct.any()


@pytest.mark.parametrize(
    ("num_classes", "dtype"), [(256, "uint8"), (128, "int8"), (300, "uint8"), (300, "int64")]
)
def test_integers_of_every_width_are_labels(num_classes, dtype):
    labels = np.array([1, 100], dtype)
    logits = jax.random.normal(jax.random.key(0), (2, num_classes))
    result, expected = cross_entropy(logits, labels), cross_entropy(logits, labels.astype(np.int32))
    assert np.isfinite(result.loss).all()
    jax.tree.map(np.testing.assert_array_equal, result, expected)


def test_weighted_mean_equals_its_formula_in_float32():
    mean = weighted_mean(jnp.array([[1.0, 2.0], [3.0, 9.0]]), jnp.array([[1.0, 0.5], [2.0, 0.0]]))
    np.testing.assert_allclose(mean, (1.0 + 1.0 + 6.0) / 3.5, rtol=1e-6)
    assert mean.dtype == jnp.float32
    # In bfloat16 a sum of ones stops at 256.
    values, weights = jnp.ones(1000, jnp.bfloat16), jnp.full(1000, 0.5, jnp.bfloat16)
    np.testing.assert_allclose(weighted_mean(values, weights), 1.0)


def test_weighted_mean_without_weights_is_zero_with_finite_gradients():
    values, weights = jnp.array([1.0, jnp.inf, jnp.nan]), jnp.zeros(3)
    value, gradients = jax.value_and_grad(weighted_mean, (0, 1))(values, weights)
    assert value == 0.0
    np.testing.assert_array_equal(gradients[0], 0.0)
    assert np.isfinite(gradients[1]).all()


def test_losses_raise_for_invalid_arguments(raises):
    with raises(ConfigError, owner="cross_entropy", field="shape of labels", value=[2, 1]):
        cross_entropy(jnp.zeros((2, 3, 4)), jnp.zeros((2, 1), jnp.int32))
    with raises(ConfigError, owner="cross_entropy", field="dtype of labels", value="float32"):
        cross_entropy(jnp.zeros((1, 2)), jnp.zeros(1))
    with raises(ConfigError, owner="weighted_mean", field="shape of weights", value=[3]):
        weighted_mean(jnp.zeros((2, 3)), jnp.zeros(3))
