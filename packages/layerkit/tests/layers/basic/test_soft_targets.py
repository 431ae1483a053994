"""Soft targets, smoothed labels and the entropy loss, compared with Praxis."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.config.nested_map import NestedMap
from layerkit.layers.basic.embeddings import FullSoftmax
from layerkit.models.language_model import LanguageModel
from layerkit.ops.losses.softmax import cross_entropy, soft_cross_entropy

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
IDS = np.array([[0, 4, 2], [1, 3, 0]], np.int32)


def softmax_of(case, **fields):
    """Return a softmax layer with the weights of a case, as a function."""
    layer = FullSoftmax(input_dims=4, num_classes=5, use_bias=True, **fields)
    given = case["softmax"]["logits_ffn"]
    variables = {"params": {"w": given["linear"]["w"], "b": given["bias"]["b"]}}
    return jax.jit(lambda *inputs, **targets: layer.apply(variables, *inputs, **targets))


def test_soft_targets_equal_praxis(praxis):
    case = praxis("soft_targets")
    run = softmax_of(case)
    result = run(case["x"], weights=case["weights"], class_probabilities=case["targets"])
    np.testing.assert_allclose(result.per_token_xent, case["per_token"], rtol=1e-5)
    np.testing.assert_allclose([result.xent, result.loss], case["xent"], rtol=1e-5)


def test_smoothing_over_the_other_classes_equals_praxis(praxis):
    case = praxis("label_smoothing")
    # Praxis moves 0.1 to the other four of five classes: 0.125 to all of them is the same.
    run = softmax_of(case, label_smoothing=0.1 * 5 / 4)
    result = run(case["x"], case["ids"], case["weights"])
    np.testing.assert_allclose(result.per_token_loss, case["per_token"], rtol=1e-5)
    np.testing.assert_allclose(result.loss, case["loss"], rtol=1e-5)


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_entropy_loss_equals_praxis(praxis, chunk_size):
    case = praxis("entropy_loss")
    plain = softmax_of(case, chunk_size=chunk_size)(case["x"], IDS, case["weights"])
    run = softmax_of(case, chunk_size=chunk_size, entropy_loss_weight=0.25)
    result = run(case["x"], IDS, case["weights"])
    np.testing.assert_allclose(
        result.loss - plain.loss, 0.25 * case["avg_entropy_loss"], rtol=1e-4, atol=1e-6
    )
    np.testing.assert_array_equal(result.xent, plain.xent)


def test_certain_targets_equal_labels():
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 5)), jnp.float32)
    options = {"z_loss_weight": 0.1, "entropy_loss_weight": 0.2}

    def losses(logits):
        return cross_entropy(logits, IDS, **options)

    def soft_losses(logits):
        return soft_cross_entropy(logits, jax.nn.one_hot(IDS, 5), **options)

    def differentiate(function):
        gradient = jax.grad(lambda x: jnp.sum(function(x).loss))
        return jax.jit(lambda x: (function(x), gradient(x)))(logits)

    (expected, gradient), (result, soft_gradient) = map(differentiate, (losses, soft_losses))
    for name, value in expected._asdict().items():
        np.testing.assert_allclose(getattr(result, name), value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, soft_gradient, rtol=1e-4, atol=1e-6)


def test_targets_get_no_gradient():
    targets = jnp.asarray(np.full((2, 3, 4), 0.25), jnp.float32)
    gradient = jax.grad(lambda q: jnp.sum(soft_cross_entropy(jnp.asarray(X), q).loss))
    assert not np.any(jax.jit(gradient)(targets))


def test_language_model_learns_from_soft_targets():
    config = LanguageModel.HParams.config()
    config.lm_tpl.set(vocab_size=5, model_dims=4, hidden_dims=8, num_heads=2)
    model = config.Instantiate()
    variables = jax.jit(model.init)(KEY)
    shared = NestedMap(ids=IDS, weights=np.ones(IDS.shape, np.float32))
    hard, soft = (shared | targets for targets in _TARGETS)

    @jax.jit
    def run(batch):
        predictions = model.apply(variables, batch, method="compute_predictions")
        metrics, _ = model.apply(variables, predictions, batch, method="compute_loss")
        return [metrics[name].value for name in ("loss", "xent", "accuracy")]

    np.testing.assert_allclose(run(hard), run(soft), rtol=1e-5)


_TARGETS = ({"labels": IDS}, {"class_probabilities": np.eye(5, dtype=np.float32)[IDS]})
