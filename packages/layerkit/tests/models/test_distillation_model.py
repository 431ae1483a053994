"""DistillationModel: losses from the logits of both networks, features, and samples."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.base_layer import AUX_LOSS, PARAMS, RANDOM, SUMMARIES
from layerkit.base.base_model import BaseModel
from layerkit.base.sharding import DEFAULT_RULES, BoundSharding
from layerkit.base.weights import logical_axes
from layerkit.config import build
from layerkit.config.nested_map import NestedMap
from layerkit.layers.moe.token_choice import MoeFeedForward
from layerkit.layers.transformer.stacks import StackedTransformer, StackedTransformerRepeated
from layerkit.models.distillation_model import DistillationModel
from layerkit.models.transformer_lm import TransformerLm
from layerkit.ops.losses.distillation import divergence, top_log_probs

KEY = jax.random.key(0)
BATCH, LENGTH, VOCAB = 4, 12, 17


def network(dims, layers, stack=StackedTransformerRepeated):
    return TransformerLm.HParams.config(
        vocab_size=VOCAB, model_dims=dims, hidden_dims=2 * dims, num_layers=layers, num_heads=2,
        stack_tpl=stack.HParams.config(),
    )  # fmt: skip


def config(**fields):
    fields = {"lm_tpl": network(8, 2), "teacher_tpl": network(16, 3), **fields}
    return DistillationModel.HParams.config(**fields)


def make_batch(seed=0):
    ids = np.random.default_rng(seed).integers(1, VOCAB, (BATCH, LENGTH + 1)).astype(np.int32)
    weights = (np.arange(LENGTH) < np.array([[12], [9], [12], [5]])).astype(np.float32)
    return NestedMap(ids=ids[:, :-1], labels=ids[:, 1:], weights=weights)


def draw_weights(model):
    random = np.random.default_rng(2)
    shapes = jax.eval_shape(model.init, KEY)
    return jax.tree.map(lambda x: random.normal(0, 0.3, x.shape).astype(np.float32), shapes)


@functools.cache
def weights():
    return draw_weights(build(config()))


@functools.partial(jax.jit, static_argnums=0)
def gradients(model, params, batch, key=KEY):
    def loss(params):
        (metrics, _), _ = model.clone(train=True).apply(
            {PARAMS: params}, batch, rngs={RANDOM: key}, mutable=[AUX_LOSS, SUMMARIES]
        )
        return metrics["loss"].value, {name: m.value for name, m in metrics.items()}

    return jax.value_and_grad(loss, has_aux=True)(params)


def logits_of(child, params, batch):
    tpl = config().lm_tpl if child == "lm" else config().teacher_tpl
    run = jax.jit(functools.partial(build(tpl).apply, method="logits"))
    return run({PARAMS: params[child]}, batch.ids)


@pytest.mark.parametrize("chunk_size", [pytest.param(None, marks=pytest.mark.slow), 5])
def test_loss_mixes_divergence_and_cross_entropy_of_the_logits(chunk_size):
    params, batch = weights()[PARAMS], make_batch()
    tpl = config(alpha=0.7, beta=0.3, temperature=2.0)
    tpl.lm_tpl.softmax_tpl.chunk_size = chunk_size

    def expected(student):
        logits = logits_of("lm", {**params, "lm": student}, batch)
        teacher = logits_of("teacher", params, batch)
        xent = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch.labels[..., None], -1)[..., 0]
        kl = divergence(logits, teacher, beta=0.3, temperature=2.0)
        return jnp.sum((0.7 * kl + 0.3 * xent) * batch.weights) / batch.weights.sum()

    (loss, metrics), gradient = gradients(build(tpl), params, batch)
    value, slopes = jax.jit(jax.value_and_grad(expected))(params["lm"])
    np.testing.assert_allclose(loss, value, rtol=1e-5)
    for one, other in zip(*map(jax.tree.leaves, (gradient["lm"], slopes)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradient["teacher"]))
    assert set(metrics) == {"loss", "xent", "accuracy", "divergence"}


@pytest.mark.parametrize(
    ("beta", "num_ids"), [pytest.param(0.5, None, marks=pytest.mark.slow), (1.0, VOCAB - 3)]
)
def test_stored_tokens_of_teacher_equal_the_live_teacher(beta, num_ids):
    params, batch = weights()[PARAMS], make_batch()
    live = gradients(build(config(beta=beta, num_ids=num_ids)), params, batch)
    logits = logits_of("teacher", params, batch)[..., :num_ids]
    ids, log_probs = top_log_probs(logits, num_ids or VOCAB)
    stored = build(config(beta=beta, num_ids=num_ids, teacher_tpl=None))
    assert stored.frozen_weights == ()
    batch |= {"teacher_ids": ids, "teacher_log_probs": log_probs}
    read = gradients(stored, {"lm": params["lm"]}, NestedMap(batch))
    for one, other in zip(*map(jax.tree.leaves, (read[0], live[0])), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    for one, other in zip(*map(jax.tree.leaves, (read[1]["lm"], live[1]["lm"])), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "stack", [pytest.param(StackedTransformer, marks=pytest.mark.slow), StackedTransformerRepeated]
)
def test_features_are_the_outputs_of_layers(stack):
    model = build(config(
        features=((0, 0), (1, 2)), feature_weight=0.5, lm_tpl=network(8, 2, stack),
        teacher_tpl=network(16, 3, stack),
    ))  # fmt: skip
    params, batch = draw_weights(model)[PARAMS], make_batch()
    outputs = {}
    for child in ("lm", "teacher"):
        bare = build(getattr(model, f"{child}_tpl"))
        options = {"method": "hidden", "capture_intermediates": True}
        run = jax.jit(functools.partial(bare.apply, **options))
        _, captured = run({PARAMS: params[child]}, batch.ids)
        for layer in range(bare.num_layers):
            path, index = bare.locate_layer(layer)
            tree = functools.reduce(lambda tree, name: tree[name], path, captured["intermediates"])
            outputs[child, layer] = np.asarray(tree["__call__"][0][index])
    distances = [
        ((outputs["lm", i] @ params[f"feature_{i}"]["w"] - outputs["teacher", j]) ** 2).mean(-1)
        for i, j in ((0, 0), (1, 2))
    ]
    expected = np.average(np.mean(distances, 0), weights=batch.weights)
    (loss, metrics), gradient = gradients(model, params, batch)
    np.testing.assert_allclose(metrics["feature_distance"], expected, rtol=1e-4)
    np.testing.assert_allclose(loss, metrics["divergence"] + 0.5 * expected, rtol=1e-4)
    assert np.any(gradient["feature_1"]["w"])


def test_reports_of_student_are_kept_and_those_of_teacher_are_not():
    tpl = config()
    for lm in (tpl.lm_tpl, tpl.teacher_tpl):
        lm.stack_tpl.layer_tpl.feed_forward_tpl = MoeFeedForward.HParams.config(num_experts=2)
    model, batch = build(tpl).clone(train=True), make_batch()
    variables = draw_weights(model)
    mutable = [AUX_LOSS, SUMMARIES]
    options = {"rngs": {RANDOM: KEY}, "mutable": mutable}
    _, reports = jax.jit(functools.partial(model.apply, **options))(variables, batch)
    alone = build(tpl.lm_tpl).clone(train=True)
    run = jax.jit(functools.partial(alone.apply, method="hidden", **options))
    _, expected = run({PARAMS: variables[PARAMS]["lm"]}, batch.ids)
    for name in mutable:
        assert set(reports[name]) == {"lm"}
        jax.tree.map(np.testing.assert_allclose, reports[name]["lm"], expected[name])


@pytest.mark.slow
def test_samples_continue_prompts_by_the_key_and_only_in_training():
    model = build(config(on_policy_fraction=1.0, prompt_length=4, alpha=0.5))
    params, batch = weights()[PARAMS], make_batch()
    batch.weights *= np.arange(LENGTH) >= np.array([[0], [0], [1], [4]])
    (loss, metrics), gradient = gradients(model, params, batch)
    again, other = (gradients(model, params, batch, jax.random.key(k))[0][0] for k in (0, 1))
    assert loss == again != other
    assert set(metrics) == {"loss", "divergence"}
    assert metrics["loss"] == metrics["divergence"]
    assert any(np.any(leaf) for leaf in jax.tree.leaves(gradient["lm"]))
    (metrics, _), _ = model.clone(train=True).apply(
        {PARAMS: params}, batch, rngs={RANDOM: KEY}, mutable=[AUX_LOSS]
    )
    # Prompts of 4, 4, 2 and no tokens, each of which 9 steps of the decoder continue.
    assert metrics["loss"].weight == 9 + 9 + 9 + 0
    assert set(model.apply({PARAMS: params}, batch)[0]) >= {"xent", "accuracy"}


def test_share_of_steps_with_samples_is_the_fraction():
    model = build(config(on_policy_fraction=0.25, prompt_length=4))
    params, batch = weights()[PARAMS], make_batch()
    (data, _), _ = gradients(build(config()), params, batch)
    losses = [gradients(model, params, batch, jax.random.key(k))[0][0] for k in range(40)]
    assert 3 <= sum(not np.isclose(loss, data) for loss in losses) <= 18


def test_weights_of_teacher_have_their_own_axes_and_dtype():
    rules = DEFAULT_RULES.extend(teacher_embed="data")
    tpl = config(sharding=BoundSharding(None, rules))
    tpl.teacher_tpl.dtype = jnp.bfloat16
    boxed = jax.eval_shape(build(tpl).init_boxed, KEY)[PARAMS]
    axes = logical_axes(boxed)
    assert axes["teacher"]["softmax"]["w"] == ("vocab", "teacher_embed")
    assert axes["lm"]["softmax"]["w"] == ("vocab", "embed")
    assert boxed["teacher"]["softmax"]["w"].value.dtype == jnp.bfloat16
    assert isinstance(build(tpl), BaseModel)


@pytest.mark.parametrize(
    ("field", "value", "others"),
    [
        ("alpha", 1.5, {}),
        ("beta", -0.1, {}),
        ("temperature", 0.0, {}),
        ("teacher_tpl", None, {"on_policy_fraction": 0.5}),
        ("teacher_tpl", None, {"features": ((0, 0),)}),
        ("features", (0, 3), {}),
    ],
)
def test_wrong_fields_raise(raises, field, value, others):
    from layerkit.errors import ConfigError

    with raises(ConfigError, field=field, value=value):
        fields = {field: (value,) if field == "features" else value, **others}
        build(config(**fields)).init(KEY)
