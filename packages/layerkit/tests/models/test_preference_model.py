"""PreferenceModel: losses compared with their formulas, and a reference that is not trained."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.base_layer import AUX_LOSS, PARAMS, RANDOM
from layerkit.config import build
from layerkit.config.nested_map import NestedMap
from layerkit.decoding.loop import SampleDecoder
from layerkit.layers.moe.token_choice import MoeFeedForward
from layerkit.layers.quantization.lora import add_lora
from layerkit.layers.transformer.multi_token import MultiTokenPrediction
from layerkit.models.language_model import LanguageModel
from layerkit.models.preference_model import PreferenceModel

KEY = jax.random.key(0)
BATCH, LENGTH, VOCAB = 4, 6, 11


def dpo(**fields):
    config = PreferenceModel.HParams.config(**fields)
    config.lm_tpl.set(vocab_size=VOCAB, model_dims=8, hidden_dims=8, num_layers=1, num_heads=2)
    return config.Instantiate()


def answers(random):
    ids = random.integers(1, VOCAB, (BATCH, LENGTH + 1)).astype(np.int32)
    weights = (np.arange(LENGTH) >= random.integers(1, 4, (BATCH, 1))).astype(np.float32)
    return NestedMap(ids=ids[:, :-1], labels=ids[:, 1:], weights=weights)


def make_batch(seed=0):
    random = np.random.default_rng(seed)
    return NestedMap(chosen=answers(random), rejected=answers(random))


@functools.cache
def weights():
    """Of a model without a reference of its own."""
    return jax.jit(dpo(reference="none").init)(KEY)


@functools.partial(jax.jit, static_argnums=0)
def run(model, variables, batch):
    return model.apply(variables, batch)


@jax.jit
def logits_of(variables, ids):
    model = dpo(reference="none")
    return model.apply(variables, ids, method=lambda model, ids: model.lm.logits(ids))


def log_probs(variables, rows):
    """Each answer's log-probability, from the logits alone."""
    logits = np.asarray(logits_of(variables, rows.ids), np.float64)
    every = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return (np.take_along_axis(every, rows.labels[..., None], -1)[..., 0] * rows.weights).sum(-1)


def expected_loss(name, h, beta, smoothing):
    if name == "sigmoid":
        return (1 - smoothing) * np.log1p(np.exp(-beta * h)) + smoothing * np.log1p(
            np.exp(beta * h)
        )
    if name == "hinge":
        return np.maximum(0.0, 1.0 - beta * h)
    return (h - 0.5 / beta) ** 2


@pytest.mark.parametrize(
    ("loss", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.2), ("hinge", 0.0), ("ipo", 0.0)]
)
def test_loss_equals_its_formula(loss, smoothing):
    model = dpo(loss=loss, beta=0.7, label_smoothing=smoothing, reference="batch")
    variables, batch = weights(), make_batch()
    random = np.random.default_rng(5)
    for side in ("chosen", "rejected"):
        batch[f"{side}_reference_log_probs"] = random.normal(-3, 1, BATCH).astype(np.float32)
    ratios = {
        side: log_probs(variables, batch[side]) - batch[f"{side}_reference_log_probs"]
        for side in ("chosen", "rejected")
    }
    if loss == "ipo":
        ratios = {side: r / batch[side].weights.sum(-1) for side, r in ratios.items()}
    h = ratios["chosen"] - ratios["rejected"]
    batch.weights = np.asarray([1.0, 0.0, 1.0, 1.0], np.float32)
    metrics, pairs = run(model, variables, batch)
    losses = expected_loss(loss, h, 0.7, smoothing)
    np.testing.assert_allclose(
        metrics["loss"].value, np.average(losses, weights=batch.weights), rtol=1e-5
    )
    np.testing.assert_allclose(pairs.chosen_rewards - pairs.rejected_rewards, 0.7 * h, rtol=1e-4)
    np.testing.assert_allclose(
        metrics["reward_accuracy"].value, np.average(h > 0, weights=batch.weights), rtol=1e-6
    )
    assert metrics["loss"].weight == 3.0


def test_model_equal_to_its_reference_has_loss_log_2_and_learns():
    model = dpo(beta=0.5)
    assert model.frozen_weights == ("reference_lm/.*",)
    params = jax.jit(model.init)(KEY)[PARAMS]
    batch = make_batch()

    @jax.jit
    def value_and_grad(params):
        def loss(params):
            metrics, _ = model.apply({PARAMS: params}, batch)
            return metrics["loss"].value, metrics

        return jax.value_and_grad(loss, has_aux=True)(params)

    (start, metrics), gradient = value_and_grad(params)
    np.testing.assert_allclose(start, np.log(2.0), rtol=1e-6)
    assert metrics["reward_margin"].value == 0.0
    for leaf in jax.tree.leaves(gradient["reference_lm"]):
        np.testing.assert_array_equal(leaf, 0.0)
    for _ in range(10):
        (end, metrics), gradient = value_and_grad(params)
        params = jax.tree.map(lambda p, g: p - 0.3 * g, params, gradient)
    assert end < 0.5 * start
    assert metrics["reward_accuracy"].value == 1.0


@pytest.mark.parametrize(
    "has_magnitude", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["lora", "dora"]
)
def test_base_of_adapters_is_the_reference_without_weights_of_its_own(has_magnitude):
    config = PreferenceModel.HParams.config(reference="base", train=True)
    config.lm_tpl.set(vocab_size=VOCAB, model_dims=8, hidden_dims=8, num_layers=1, num_heads=2)
    config.lm_tpl = add_lora(
        config.lm_tpl, rank=2, dropout_rate=0.5, has_magnitude=has_magnitude, only=".*query_tpl"
    )
    model, batch = build(config), make_batch()
    assert (model.frozen_weights, dict(model.initial_copies)) == ((), {})
    params = jax.jit(model.init)(KEY)[PARAMS]
    assert set(params) == {"lm"}
    trained = jax.tree_util.tree_map_with_path(
        lambda path, x: x + 0.3 if "lora" in str(path[-1]) else x, params
    )
    predict = functools.partial(model.apply, rngs={RANDOM: KEY}, method="compute_predictions")
    first, later = (jax.jit(predict)({PARAMS: one}, batch) for one in (params, trained))
    np.testing.assert_allclose(first.policy, first.reference, rtol=1e-6)
    np.testing.assert_allclose(later.reference, first.reference, rtol=1e-6)
    assert (abs(later.policy - later.reference) > 1e-3).all()


def test_log_prob_of_no_reference_is_0():
    model = dpo(reference="none", beta=1.0)
    variables, batch = weights(), make_batch()
    assert set(variables[PARAMS]) == {"lm"}
    _, pairs = run(model, variables, batch)
    np.testing.assert_allclose(pairs.chosen_rewards, log_probs(variables, batch.chosen), rtol=1e-4)


def test_pairs_of_padding_have_no_weight():
    model = dpo(reference="none")
    variables, batch = weights(), make_batch()
    first = jax.tree.map(lambda x: x[:3], batch)
    for side in ("chosen", "rejected"):
        batch[side] = jax.tree.map(lambda x: np.concatenate([x[:3], 0 * x[3:]]), batch[side])
    batch.eval_sample_weights = np.array([1, 1, 1, 0], np.float32)
    expected, _ = run(model, variables, first)
    result, _ = run(model, variables, batch)
    for name, metric in expected.items():
        np.testing.assert_allclose(result[name].value, metric.value, rtol=1e-5, atol=1e-6)
        assert result[name].weight == 3.0


def test_labels_of_weight_0_have_no_effect():
    model = dpo(reference="none")
    variables, batch = weights(), make_batch()
    before, _ = run(model, variables, batch)
    odd = batch.chosen.weights == 0
    batch.chosen.labels = np.where(odd, -100, batch.chosen.labels)
    after, _ = run(model, variables, batch)
    assert jnp.isfinite(after["loss"].value)
    assert before["loss"].value == after["loss"].value


def test_auxiliary_losses_of_the_reference_are_not_collected():
    config = PreferenceModel.HParams.config()
    config.lm_tpl.set(vocab_size=VOCAB, model_dims=8, hidden_dims=8, num_layers=1, num_heads=2)
    experts = MoeFeedForward.HParams.config(num_experts=4)
    config.lm_tpl.stack_tpl.layer_tpl.feed_forward_tpl = experts
    model = config.Instantiate().clone(train=True)

    def losses(key):
        return model.apply(model.init(key), make_batch(), mutable=[AUX_LOSS])[1]

    updates = jax.eval_shape(losses, KEY)
    assert set(updates[AUX_LOSS]) == {"lm"}


def test_rejected_answers_are_no_targets_of_multi_token_prediction():
    config = PreferenceModel.HParams.config(reference="none", train=True)
    config.lm_tpl.set(vocab_size=VOCAB, model_dims=8, hidden_dims=8, num_layers=1, num_heads=2)
    config.lm_tpl.mtp_tpl = MultiTokenPrediction.HParams.config()
    model, batch = config.Instantiate(), make_batch()
    variables = jax.eval_shape(model.init, KEY)
    assert "mtp" in variables[PARAMS]["lm"]
    run = functools.partial(model.apply, mutable=[AUX_LOSS])
    assert not jax.eval_shape(run, variables, batch)[1]


def test_padding_is_masked_by_segment_ids():
    model = dpo(reference="none")
    variables, batch = weights(), make_batch()
    for rows in (batch.chosen, batch.rejected):
        rows.segment_ids = np.broadcast_to(np.arange(LENGTH) >= 2, rows.ids.shape).astype(np.int32)
        rows.segment_pos = np.maximum(np.arange(LENGTH) - 2, 0) + np.zeros_like(rows.ids)
        rows.weights = rows.weights * rows.segment_ids
    before, _ = run(model, variables, batch)
    batch.chosen.ids = np.where(batch.chosen.segment_ids, batch.chosen.ids, 3)
    after, _ = run(model, variables, batch)
    assert before["loss"].value == after["loss"].value


def test_decode_continues_prompts_with_the_policy():
    decoder = SampleDecoder.HParams.config(temperature=0.0, max_decode_steps=4)
    model = dpo(decoder=decoder)
    random = np.random.default_rng(1)
    params = jax.tree.map(
        lambda leaf: random.normal(size=leaf.shape).astype(np.float32),
        jax.eval_shape(model.init, KEY)[PARAMS],
    )
    lm = LanguageModel.HParams.config(lm_tpl=model.lm_tpl, decoder=decoder)
    prompts = NestedMap(ids=jnp.array([[3, 4], [5, 0]]), prompt_lengths=jnp.array([2, 1]))

    @functools.partial(jax.jit, static_argnums=0)
    def decode(model, params):
        return model.apply({PARAMS: params}, prompts, method="decode")

    result = decode(model, params)
    expected = decode(build(lm), {"lm": params["lm"]})
    np.testing.assert_array_equal(result.ids, expected.ids)
    reference = decode(build(lm), {"lm": params["reference_lm"]})
    assert not np.array_equal(result.ids, reference.ids)
