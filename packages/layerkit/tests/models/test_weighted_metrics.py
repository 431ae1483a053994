"""token_metrics and row_scores compared with sums by hand, and in the models that report them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from layerkit.config.nested_map import NestedMap
from layerkit.models import ClassificationModel
from layerkit.models.weighted_metrics import row_scores, token_metrics


def test_score_is_the_weighted_log_probability_of_the_labels():
    xent = jnp.array([[1.0, 2.0, 4.0], [0.5, jnp.nan, 0.25], [1.0, 1.0, 1.0]])
    weights = jnp.array([[1, 0, 0.5], [1, 0, 1], [0, 0, 0]])
    scores = row_scores(xent, weights)
    assert scores.dtype == jnp.float32
    np.testing.assert_array_equal(scores, [-3.0, -0.75, 0.0])
    # Labels that do not count have no gradient either.
    gradient = jax.grad(lambda xent: row_scores(xent, weights).sum())(xent)
    np.testing.assert_array_equal(gradient, -weights)


def test_metrics_are_means_and_scores_are_per_row():
    xent = jnp.array([[1.0, 3.0], [2.0, 7.0]])
    weights = jnp.array([[1.0, 1.0], [1.0, 0.0]])
    predictions = NestedMap(
        loss=jnp.float32(2.5),
        xent=jnp.float32(2.0),
        total_weight=jnp.float32(3.0),
        per_token_xent=xent,
        correct=jnp.array([[True, False], [True, True]]),
    )
    metrics, outputs = token_metrics(predictions, weights)
    values = {name: (float(m.value), float(m.weight)) for name, m in metrics.items()}
    assert values == {"loss": (2.5, 3.0), "xent": (2.0, 3.0), "accuracy": (np.float32(2 / 3), 3.0)}
    np.testing.assert_array_equal(outputs.scores, [-4.0, -2.0])
    np.testing.assert_array_equal(outputs.per_token_xent, xent)
    np.testing.assert_array_equal(outputs.exact_match, [0.0, 1.0])
    # A row without weight is no exact match.
    _, outputs = token_metrics(predictions, jnp.array([[0.5, 0.0], [0.0, 0.0]]))
    np.testing.assert_array_equal(outputs.exact_match, [1.0, 0.0])


def test_classification_model_reports_scores():
    predictions = NestedMap(
        logits=jnp.array([[0.0, 1.0], [2.0, 0.0]]),
        loss=jnp.float32(1.0),
        xent=jnp.float32(1.0),
        total_weight=jnp.float32(2.0),
        per_token_xent=jnp.array([0.25, 1.5]),
        correct=jnp.array([True, False]),
    )
    _, outputs = ClassificationModel().compute_loss(
        predictions, NestedMap(labels=jnp.array([1, 1]), label=jnp.array([1, 1]))
    )
    np.testing.assert_array_equal(outputs.scores, [-0.25, -1.5])
