"""BertModel: prediction of masked tokens from both sides, and the tokens that are never masked."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError
from layerkit.layers.basic.embeddings import Embedding
from layerkit.layers.basic.positions import TrainablePositionalEmbedding
from layerkit.models.bert import BertModel
from layerkit.models.transformer_lm import TransformerLm

KEY = jax.random.key(0)
BATCH, LENGTH, VOCAB = 8, 10, 16
MASK = VOCAB - 1
RANDOM = np.random.default_rng(0)
IDS = RANDOM.integers(1, MASK, (BATCH, LENGTH)).astype(np.int32)
PADDINGS = (np.arange(LENGTH) >= np.array([10, 6] * 4)[:, None]).astype(np.float32)


def bert(**fields):
    config = BertModel.HParams.config(**fields)
    config.lm_tpl.set(vocab_size=VOCAB, model_dims=16, hidden_dims=16, num_layers=1, num_heads=2)
    config.lm_tpl.position_tpl = TrainablePositionalEmbedding.HParams.config(max_length=LENGTH)
    config.augmenter_tpl.set(mask_token_id=MASK, mask_prob=0.4)
    return config.Instantiate()


@pytest.fixture(scope="module")
def variables():
    """Of all models here."""
    return jax.jit(bert().init)(KEY)


def test_masked_tokens_are_predicted_from_both_sides(variables):
    model = bert()
    weights = np.zeros(IDS.shape, np.float32)
    weights[:, 4] = 1.0
    masked = np.where(weights > 0, MASK, IDS)
    batch = NestedMap(ids=IDS, masked_ids=masked, masked_weights=weights)
    run = jax.jit(partial(model.apply, variables))
    metrics, _ = run(batch)
    for column in (3, 5):
        changed = masked.copy()
        changed[:, column] = changed[:, column] % (MASK - 1) + 1
        other, _ = run(NestedMap(batch, masked_ids=changed))
        assert other["xent"].value != metrics["xent"].value
    every = jax.jit(partial(model.apply, method=lambda model, ids: model.lm.logits(ids)))(
        variables, masked
    )
    log_probs = np.asarray(jax.nn.log_softmax(every))[:, 4]
    expected = -log_probs[np.arange(BATCH), IDS[:, 4]].mean()
    np.testing.assert_allclose(metrics["xent"].value, expected, rtol=1e-5)
    assert metrics["xent"].weight == BATCH


def test_padding_and_special_tokens_are_never_masked(variables):
    model = bert(unmasked_ids=(1, 2), train=True)
    predict = jax.jit(partial(model.apply, method="compute_predictions", rngs={"random": KEY}))
    predictions = predict(variables, NestedMap(ids=IDS, paddings=PADDINGS))
    hidden = np.asarray(predictions.weights) == 1.0
    assert hidden.any()
    assert not hidden[(PADDINGS == 1) | (IDS <= 2)].any()


def test_rows_of_padding_are_not_masked(variables):
    model = bert()
    fills = np.arange(BATCH) >= 6
    batch = NestedMap(ids=np.where(fills[:, None], 0, IDS), eval_sample_weights=1.0 - fills)
    weights = jax.jit(partial(model.apply, method="compute_predictions"))(variables, batch).weights
    assert weights[:6].any() and not weights[6:].any()


def test_types_of_tokens_are_added_to_their_embeddings(raises, variables):
    plain = bert()
    types = Embedding.HParams.config(num_classes=3)
    typed = plain.clone(lm_tpl=plain.lm_tpl.clone(token_type_tpl=types))
    table = RANDOM.normal(size=(3, 16)).astype(np.float32)
    params = dict(variables["params"]["lm"], token_type={"w": table})

    @partial(jax.jit, static_argnums=0)
    def hidden(model, params, **types):
        run = partial(model.apply, method=lambda m, ids: m.lm.hidden(ids, **types))
        return run({"params": {"lm": params}}, IDS)

    for kind, arguments in ((0, {}), (2, {"token_type_ids": np.full_like(IDS, 2)})):
        shifted = dict(variables["params"]["lm"])
        shifted["softmax"] = {"w": shifted["softmax"]["w"] + table[kind]}
        expected = hidden(plain, shifted)
        np.testing.assert_allclose(hidden(typed, params, **arguments), expected, atol=1e-5)
    with raises(ConfigError, field="token_type_tpl", value=None):
        plain.apply(variables, NestedMap(ids=IDS, token_type_ids=IDS))


@pytest.mark.parametrize(
    ("padding", "are_runs"),
    [({"paddings": PADDINGS}, False), ({"segment_ids": 1 - PADDINGS}, True), ({}, True)],
    ids=["paddings", "segment_ids", "no_padding"],
)
def test_kernels_of_runs_are_not_selected_for_paddings(attention_calls, padding, are_runs):
    model, batch = bert(), NestedMap(ids=IDS, masked_ids=IDS, masked_weights=PADDINGS, **padding)
    jax.eval_shape(model.init, KEY, batch)
    assert {call.segments_are_runs for call in attention_calls} == {are_runs}


def test_training_reduces_the_loss(variables):
    """Every row says one token over and over, so that the others tell a hidden one."""
    model = bert(train=True)
    ids = np.broadcast_to(np.arange(1, BATCH + 1, dtype=np.int32)[:, None], (BATCH, LENGTH))
    batch = NestedMap(ids=ids)

    @jax.jit
    def step(params, key):
        def loss(params):
            metrics, _ = model.apply({"params": params}, batch, rngs={"random": key})
            return metrics["loss"].value

        value, gradient = jax.value_and_grad(loss)(params)
        return value, jax.tree.map(lambda p, g: p - 0.5 * g, params, gradient)

    params, values = variables["params"], []
    for number in range(60):
        value, params = step(params, jax.random.key(number))
        values.append(float(value))
    assert np.mean(values[-5:]) < 0.4 * np.mean(values[:3])


def test_causal_network_or_incomplete_masks_raise(raises, variables):
    config = BertModel.HParams.config()
    config.lm_tpl = TransformerLm.HParams.config(
        vocab_size=VOCAB, model_dims=8, hidden_dims=8, num_heads=2
    )
    with raises(ConfigError, field="lm_tpl.is_causal", value=True):
        config.Instantiate().init(KEY)
    batch = NestedMap(ids=IDS, masked_ids=IDS)
    with raises(KeyError, value="masked_weights", choices=("ids", "masked_ids")):
        bert().apply(variables, batch)
