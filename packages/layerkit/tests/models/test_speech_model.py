"""Losses and greedy decoding of models of speech."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.config.nested_map import NestedMap
from layerkit.models import CtcModel, TransducerModel
from layerkit.ops.losses.alignment import transducer_loss

VOCAB, BINS = 6, 4
RANDOM = np.random.default_rng(0)
SRC = NestedMap(
    features=jnp.asarray(RANDOM.normal(size=(2, 24, BINS)), jnp.float32),
    paddings=jnp.asarray(np.arange(24) >= np.array([24, 15])[:, None], jnp.float32),
)
TGT = NestedMap(
    labels=jnp.array([[1, 2, 2], [3, 0, 0]]), paddings=jnp.array([[0, 0, 0], [0, 1, 1]])
)
BATCH = NestedMap(src=SRC, tgt=TGT)


@functools.cache
def make(cls, **fields):
    config = cls.HParams.config(
        vocab_size=VOCAB, frontend_tpl=None, augmenter_tpl=None, train=False, **fields
    )
    config.encoder_tpl.set(num_bins=BINS, num_channels=8, model_dims=8, hidden_dims=8, num_heads=2)
    config.encoder_tpl.stack_tpl.layer_tpl.conv_tpl.kernel_size = 3
    model = config.Instantiate()
    return model, jax.jit(model.init)(jax.random.key(0))


def test_ctc_decodes_the_best_label_of_each_frame():
    model, variables = make(CtcModel)
    encode = jax.jit(lambda v: model.apply(v, SRC, method="encode"))
    encoded = encode(variables)
    outputs = jax.jit(lambda v: model.apply(v, BATCH, method="decode"))(variables)
    weights = variables["params"]["softmax"]
    best = np.argmax(encoded.encoded @ weights["w"] + weights["b"], axis=-1)
    for row in range(2):
        path = best[row][np.asarray(encoded.paddings[row]) == 0]
        kept = [
            one for place, one in enumerate(path) if one and (not place or one != path[place - 1])
        ]
        assert outputs.ids[row, : outputs.lengths[row]].tolist() == kept


@pytest.mark.parametrize(
    ("cls", "fields", "unaligned"),
    [
        (CtcModel, {}, [0, 1, 1, 0]),
        pytest.param(TransducerModel, {"joint_dims": 4}, [0, 0, 1, 1], marks=pytest.mark.slow),
    ],
)
def test_rows_with_too_few_frames_are_counted_and_left_out_of_the_loss(cls, fields, unaligned):
    model, variables = make(cls, **fields)
    rows = jnp.array([0, 0, 0, 1])
    batch = jax.tree.map(lambda x: x[rows], BATCH)
    # Six frames, three (four are needed), none, and none without labels.
    batch.src.paddings = jnp.float32(jnp.arange(24) >= jnp.array([24, 12, 0, 0])[:, None])
    batch.tgt.paddings = batch.tgt.paddings.at[3].set(1)
    # Of the same shape, so that one program is compiled.
    others = jnp.array([0, 1, 0, 1] if cls is TransducerModel else [0, 0, 0, 0])
    kept = jax.tree.map(lambda x: x[others], batch)

    def loss(params, batch):
        metrics, _ = model.apply({**variables, "params": params}, batch)
        return metrics["loss"].value, metrics

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (value, metrics), gradient = run(variables["params"], batch)
    (expected, _), expected_gradient = run(variables["params"], kept)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert metrics["unaligned_rows"].value == np.mean(unaligned)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3), gradient, expected_gradient
    )


def test_transducer_loss_in_chunks_is_that_of_all_logits():
    model, variables = make(TransducerModel, joint_dims=4, chunk_size=4)

    def whole(model):
        encoded = model.encode(SRC)
        contexts = jnp.array([[[0, 0], [0, 1], [1, 2], [2, 2]], [[0, 0], [0, 3], [3, 0], [0, 0]]])
        frames = model.from_encoder(encoded.encoded)[:, :, None]
        log_probs = model._joint(frames, model._predict(contexts)[:, None])
        labels = jnp.broadcast_to(TGT.labels[:, None, :, None], (2, 6, 3, 1))
        of_labels = jnp.take_along_axis(log_probs[:, :, :-1], labels, axis=-1)[..., 0]
        sizes = {"num_frames": jnp.array([6, 4]), "num_labels": jnp.array([3, 1])}
        return transducer_loss(log_probs[..., 0], of_labels, **sizes)

    expected = jax.jit(lambda v: model.apply(v, method=whole))(variables)
    metrics, outputs = jax.jit(lambda v: model.apply(v, BATCH))(variables)
    np.testing.assert_allclose(outputs.per_example_xent, expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"].value, expected.sum() / 4, rtol=1e-5)


def test_transducer_emits_labels_until_a_blank_in_each_frame():
    model, variables = make(TransducerModel, joint_dims=4, max_labels_per_frame=3)

    def score(model, frame, context):
        return model._joint(model.from_encoder(frame), model._predict(context))

    # Blanks and labels are about as likely.
    params = dict(variables["params"])
    params["softmax"] = {**params["softmax"], "w": 3.0 * params["softmax"]["w"]}
    variables = {**variables, "params": params}
    encoded = jax.jit(lambda v: model.apply(v, SRC, method="encode"))(variables)
    run = jax.jit(lambda *inputs: model.apply(variables, *inputs, method=score))
    expected = []
    for row in range(2):
        context, ids = [0, 0], []
        for frame in np.flatnonzero(np.asarray(encoded.paddings[row]) == 0):
            for _ in range(3):
                scores = run(encoded.encoded[row, frame], jnp.array(context))
                if not (best := int(jnp.argmax(scores))):
                    break
                ids.append(best)
                context = [context[1], best]
        expected.append(ids)
    outputs = jax.jit(lambda v: model.apply(v, BATCH, method="decode"))(variables)
    ids = [row[:length].tolist() for row, length in zip(outputs.ids, outputs.lengths, strict=True)]
    assert ids == expected and any(ids)
