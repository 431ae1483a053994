"""Losses on preferences and their gradients, compared with TRL on the same tables of logits.

`trl_reference.json` is recorded by `scripts/trl_reference.py`.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.base_layer import PARAMS, BaseLayer
from layerkit.base.weights import WeightHParams
from layerkit.config.nested_map import NestedMap
from layerkit.models.preference_model import (
    KtoModel,
    PreferenceModel,
    RewardModel,
    mismatch_answers,
)
from layerkit.ops.losses.preference import dpo_loss, kto_divergence, odds_ratio_loss
from layerkit.ops.losses.softmax import cross_entropy

TRL = json.loads(Path(__file__).with_name("trl_reference.json").read_text())
VOCAB, LENGTH = len(TRL["policy"]), 8
POLICY, REFERENCE, HEAD = (np.float32(TRL[name]) for name in ("policy", "reference", "head"))


class Table(BaseLayer):
    """A language model that predicts a token from the one before it alone."""

    model_dims: int = VOCAB

    def setup(self):
        self.create_variable("table", WeightHParams((VOCAB, VOCAB), axes=(None, None)))

    def hidden(self, ids):
        return self.theta.table[ids]

    def fprop(self, ids, *, labels, weights, **_):
        return NestedMap(per_token_xent=cross_entropy(self.hidden(ids), labels).xent)


def rows_of(texts, prompts):
    """The arrays of `lm_features` of texts that begin with the start id."""
    rows = NestedMap(
        {
            name: np.zeros((len(texts), LENGTH), np.int32)
            for name in ("ids", "labels", "segment_ids")
        },
        weights=np.zeros((len(texts), LENGTH), np.float32),
    )
    for row, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        size = len(text) - 1
        rows.ids[row, : size + 1] = text
        rows.labels[row, :size] = text[1:]
        rows.segment_ids[row, :size] = 1
        rows.weights[row, prompt - 1 : size] = 1.0
    return rows


def pairs(prompts=None):
    prompts = prompts or TRL["prompts"]
    return NestedMap({side: rows_of(TRL[side], prompts) for side in ("chosen", "rejected")})


def judgements():
    rows = rows_of(TRL["answers"], TRL["answer_prompts"])
    return NestedMap(answer=rows, is_desirable=np.array(TRL["is_desirable"]))


PAIRED = functools.partial(PreferenceModel, beta=0.3)
JUDGED = functools.partial(KtoModel, beta=0.3)
WEIGHTED = {"desirable_weight": 0.7, "undesirable_weight": 1.6}
CASES = {
    "sigmoid": (PAIRED(lm_tpl=None), pairs()),
    "hinge": (PAIRED(lm_tpl=None, loss="hinge"), pairs()),
    "ipo": (PAIRED(lm_tpl=None, loss="ipo"), pairs()),
    "smoothed": (PAIRED(lm_tpl=None, reference="none", label_smoothing=0.2), pairs()),
    "simpo": (
        PreferenceModel(lm_tpl=None, reference="none", loss="simpo", beta=2.0, gamma=0.7),
        pairs(),
    ),
    "orpo": (PAIRED(lm_tpl=None, reference="none", loss="orpo"), pairs([1, 1, 1])),
    "kto": (JUDGED(lm_tpl=None), judgements()),
    "kto_weighted": (JUDGED(lm_tpl=None, **WEIGHTED), judgements()),
    "reward": (RewardModel(lm_tpl=None), pairs()),
    "reward_centered": (RewardModel(lm_tpl=None, centering=0.05), pairs()),
}


def weights_of(model):
    params = {"lm": {"table": POLICY}}
    if isinstance(model, RewardModel):
        params["score"] = {"w": HEAD}
    elif model.reference == "frozen":
        params["reference_lm"] = {"table": REFERENCE}
    return params


@functools.partial(jax.jit, static_argnums=0)
def loss_and_gradients(model, params, batch):
    def loss(params):
        metrics, outputs = model.apply({PARAMS: params}, batch)
        return metrics["loss"].value, (metrics, outputs)

    return jax.value_and_grad(loss, has_aux=True)(params)


@pytest.mark.parametrize("name", TRL["cases"])
def test_losses_and_gradients_equal_those_of_trl(name):
    model, batch = CASES[name]
    model = model.clone(lm_tpl=Table.HParams.config())
    (loss, (metrics, _)), gradients = loss_and_gradients(model, weights_of(model), batch)
    expected = TRL["cases"][name]
    np.testing.assert_allclose(loss, expected["loss"], rtol=1e-5)
    np.testing.assert_allclose(gradients["lm"]["table"], expected["table"], rtol=1e-5, atol=1e-6)
    if "head" in expected:
        np.testing.assert_allclose(gradients["score"]["w"], expected["head"], rtol=1e-5, atol=1e-6)
    if name == "kto":
        assert metrics["divergence"].value > 0.1


def test_mismatched_rows_have_the_answer_of_the_row_before():
    mismatch = jax.jit(mismatch_answers)
    batch = mismatch(judgements().answer)
    texts = np.concatenate([batch.ids[:, :1], batch.labels], axis=1).tolist()
    assert [
        text[: int(row.sum()) + prompt]
        for text, row, prompt in zip(texts, batch.weights, TRL["answer_prompts"], strict=True)
    ] == [[0, 3, 1, 5, 4], [0, 2, 4, 2], [0, 4, 1, 5, 5], [0, 1, 3, 2]]
    # An answer that does not fit is cut.
    full = rows_of([[0, 1, 2, 3, 4, 5, 1, 2], [0, 1]], [2, 1])
    full.weights = full.weights[:, :4]
    cut = mismatch(NestedMap(full, ids=full.ids[:, :4], labels=full.labels[:, :4]))
    np.testing.assert_array_equal(cut.weights, [[0, 1, 0, 0], [1, 1, 1, 0]])
    np.testing.assert_array_equal(cut.labels[1, :3], [2, 3, 4])


def test_rows_of_padding_do_not_change_the_loss_of_judgements():
    model = JUDGED(lm_tpl=Table.HParams.config())
    batch = judgements()
    padded = jax.tree.map(lambda x: np.concatenate([x, 0 * x[:1]]), batch)
    padded.eval_sample_weights = np.array([1, 1, 1, 1, 0], np.float32)
    # The first row then meets the row of padding instead of the last one.
    batch.weights = np.array([1, 1, 1, 1], np.float32)
    (_, (metrics, outputs)), _ = loss_and_gradients(model, weights_of(model), batch)
    (_, (result, rewards)), _ = loss_and_gradients(model, weights_of(model), padded)
    np.testing.assert_allclose(rewards.rewards[:4], outputs.rewards, rtol=1e-6)
    for name in ("desirable_reward", "undesirable_reward", "reward_margin"):
        np.testing.assert_allclose(result[name].value, metrics[name].value, rtol=1e-6)
    assert (result["divergence"].weight, metrics["divergence"].weight) == (3.0, 4.0)


def test_one_judgement_raises_since_its_answer_would_follow_its_prompt(raises):
    model = JUDGED(lm_tpl=Table.HParams.config(), train=True)
    batch = jax.tree.map(lambda x: x[:1], judgements())
    with raises(ValueError, field="rows of a batch", value=1):
        model.apply({PARAMS: weights_of(model)}, batch)


def test_losses_stay_finite_at_their_limits():
    extremes = jnp.array([-1e4, 0.0, 1e4])
    assert jnp.isfinite(dpo_loss(extremes, beta=1.0)).all()
    certain = jnp.zeros(2)
    value, gradient = jax.value_and_grad(
        lambda p: odds_ratio_loss(p, certain - 3.0, beta=1.0).sum()
    )(certain)
    assert jnp.isfinite(value) and jnp.isfinite(gradient).all()
    assert kto_divergence(jnp.array([-2.0, 1.0]), jnp.ones(2)) == 0.0


@pytest.mark.parametrize(
    ("model", "field"),
    [
        (PreferenceModel(loss="simpo"), "reference"),
        (PreferenceModel(gamma=0.5), "gamma"),
        (PreferenceModel(loss="ipo", label_smoothing=0.1), "label_smoothing"),
        (PreferenceModel(reference="base"), "reference"),
        (KtoModel(reference="batch"), "reference"),
    ],
)
def test_fields_that_do_not_fit_together_raise(raises, model, field):
    with raises(ValueError, field=field):
        model.clone(lm_tpl=Table.HParams.config()).init(jax.random.key(0))
