"""ClassificationModel against NumPy."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np

from layerkit.config.nested_map import NestedMap
from layerkit.layers.basic.elementwise import Identity
from layerkit.layers.basic.linears import FeedForward
from layerkit.models.classification_model import ClassificationModel

KEY = jax.random.key(0)
BATCH, DIMS, CLASSES = 8, 6, 5


def classifier(network=None, **fields):
    config = ClassificationModel.HParams.config(
        network_tpl=network or FeedForward.HParams.config(input_dims=DIMS, output_dims=4), **fields
    )
    config.softmax_tpl.set(input_dims=4 if network is None else DIMS, num_classes=CLASSES)
    return config.Instantiate()


def first_weights(model):
    return jax.jit(model.init)(KEY)


@partial(jax.jit, static_argnums=0)
def run(model, variables, batch):
    return model.apply(variables, batch)


def make_batch(shape=(BATCH, DIMS)):
    random = np.random.default_rng(0)
    return NestedMap(
        inputs=random.normal(size=shape).astype(np.float32),
        labels=random.integers(0, CLASSES, BATCH).astype(np.int32),
        weights=np.asarray([1, 1, 1, 1, 1, 1, 0, 0], np.float32),
    )


def test_loss_and_accuracies_follow_from_the_logits():
    model, batch = classifier(top_k=2), make_batch()
    variables = first_weights(model)
    metrics, examples = run(model, variables, batch)
    params = variables["params"]
    hidden = batch.inputs @ params["network"]["linear"]["w"] + params["network"]["bias"]["b"]
    logits = np.maximum(hidden, 0.0) @ params["softmax"]["w"] + params["softmax"]["b"]
    xent = np.log(np.exp(logits).sum(-1)) - logits[np.arange(BATCH), batch.labels]
    order = np.argsort(-logits, axis=-1)
    expected = {
        "loss": xent,
        "xent": xent,
        "accuracy": order[:, 0] == batch.labels,
        "top_2_accuracy": (order[:, :2] == batch.labels[:, None]).any(-1),
    }
    assert set(metrics) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(
            metrics[name].value, np.average(values, weights=batch.weights), rtol=1e-5, atol=1e-7
        )
        assert metrics[name].weight == 6.0
    np.testing.assert_array_equal(examples.classes, order[:, 0])
    np.testing.assert_allclose(examples.per_example_xent, xent, rtol=1e-5)


def test_axes_between_batch_and_features_are_averaged():
    model, batch = classifier(Identity.HParams.config()), make_batch((BATCH, 3, DIMS))
    variables = first_weights(model)
    pooled = NestedMap(batch, inputs=batch.inputs.mean(1))
    several, _ = run(model, variables, batch)
    one, _ = run(model, variables, pooled)
    np.testing.assert_allclose(several["loss"].value, one["loss"].value, rtol=1e-6)


def test_batch_keys_are_those_of_the_fields(raises):
    model, batch = classifier(input_field="image", label_field="digit"), make_batch()
    variables = first_weights(model)
    named = NestedMap(image=batch.inputs, digit=batch.labels, weights=batch.weights)
    got, _ = run(model, variables, named)
    expected, _ = run(classifier(), variables, batch)
    assert got["loss"].value == expected["loss"].value
    with raises(KeyError, owner="ClassificationModel()", value="image"):
        model.apply(variables, NestedMap(images=batch.inputs, digit=batch.labels))


def test_rows_of_padding_have_no_weight():
    model, batch = classifier(top_k=2), make_batch()
    variables = first_weights(model)
    del batch["weights"]
    first = jax.tree.map(lambda x: x[:6], batch)
    expected, _ = run(model, variables, first)
    weights = np.asarray([1, 1, 1, 1, 1, 1, 0, 0], np.float32)
    result, _ = run(model, variables, NestedMap(batch, eval_sample_weights=weights))
    for name, metric in expected.items():
        np.testing.assert_allclose(result[name].value, metric.value, rtol=1e-6)
        assert result[name].weight == metric.weight == 6.0


def test_certain_soft_labels_equal_labels():
    model, batch = classifier(top_k=2), make_batch()
    variables = first_weights(model)
    expected, examples = run(model, variables, batch)
    soft = batch | {"labels": np.eye(CLASSES, dtype=np.float32)[batch.labels]}
    result, soft_examples = run(model, variables, soft)
    for name, metric in expected.items():
        np.testing.assert_allclose(result[name].value, metric.value, rtol=1e-5)
    np.testing.assert_allclose(soft_examples.scores, examples.scores, rtol=1e-5)
