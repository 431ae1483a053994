"""Targets, masks and losses of self-supervised models of speech (BEST-RQ)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.base_layer import NON_TRAINABLE, PARAMS, BaseLayer
from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError
from layerkit.layers import ConformerEncoder, SpeechTransformerEncoder, StackingOverTime
from layerkit.models import BestRqModel, CtcModel

BINS, CODES = 4, 6
RANDOM = np.random.default_rng(0)
LENGTHS = np.array([24, 13])
SRC = NestedMap(
    features=jnp.asarray(RANDOM.normal(size=(2, 24, BINS)), jnp.float32),
    paddings=jnp.asarray(np.arange(24) >= LENGTHS[:, None], jnp.float32),
)
BATCH = NestedMap(src=SRC)
SIZES = {"num_bins": BINS, "model_dims": 8, "hidden_dims": 8, "num_heads": 2}
CONFORMER = ConformerEncoder.HParams.config(num_channels=4, **SIZES)
TRANSFORMER = SpeechTransformerEncoder.HParams.config(**SIZES)
PAIRS = StackingOverTime.HParams.config(right=1, stride=2)
FOURS = StackingOverTime.HParams.config(right=3, stride=4)


class PairEncoder(BaseLayer):
    """An encoder without weights, whose outputs are pairs of frames."""

    num_bins: int = BINS
    model_dims: int = 2 * BINS

    def fprop(self, features, *, paddings):
        encoded = features.reshape(len(features), -1, self.model_dims)
        return NestedMap(encoded=encoded, paddings=paddings[:, ::2])


def make(encoder=None, stacking=PAIRS, **fields):
    encoder = PairEncoder.HParams.config() if encoder is None else encoder
    fields = {"mask_prob": 0.1, "mask_frames": 8, **fields}
    config = BestRqModel.HParams.config(frontend_tpl=None, encoder_tpl=encoder, **fields)
    config.stacking_tpl = stacking
    config.quantizer_tpl.set(num_classes=CODES, num_groups=2, projection_dims=6)
    return config.Instantiate()


@pytest.fixture(scope="module")
def variables():
    return jax.jit(make().init)(jax.random.key(0))


def test_targets_are_the_nearest_entries_of_each_codebook(variables):
    run = jax.jit(lambda v: make().apply(v, **SRC, method="quantize"))
    codes, is_token = jax.device_get(run(variables))
    frozen, features = jax.device_get((variables[NON_TRAINABLE]["quantizer"], SRC.features))
    for row, length in enumerate(LENGTHS):
        frames = np.zeros((24, BINS))
        frames[:length] = features[row, :length]
        for place in range(12):
            projected = np.concatenate(frames[2 * place : 2 * place + 2]) @ frozen["w"]
            for group in range(2):
                book = frozen["entries"][0, :, group]
                book = book / np.linalg.norm(book, axis=-1, keepdims=True)
                nearest = int(np.argmax(book @ projected[3 * group : 3 * group + 3]))
                is_frame = 2 * place < length
                assert codes[row, place, group] == (nearest if is_frame else 0)
                assert is_token[row, place] == is_frame


def test_spans_have_their_length_rate_and_noise():
    model = make(mask_prob=0.01, mask_frames=40)
    features, is_frame = jnp.ones((4, 3000, BINS)), jnp.arange(3000) < 2990
    run = jax.jit(lambda *x: model.apply({}, x[0], is_frame=x[1], method="mask_spans"))
    masked, is_masked = jax.device_get(run(features, is_frame))
    again, _ = run(features[:2, :300], is_frame[:300])
    np.testing.assert_array_equal(again, masked[:2, :300])
    assert abs(is_masked.mean() - (1 - 0.99**40)) < 0.03 and not is_masked[:, 2990:].any()
    edges = np.diff(np.pad(is_masked, ((0, 0), (1, 1))).astype(int), axis=1)
    lengths = np.nonzero(edges == -1)[1] - np.nonzero(edges == 1)[1]
    is_cut = np.nonzero(edges == -1)[1] == 2990
    assert lengths[~is_cut].min() == 40
    noise = masked[is_masked]
    assert abs(noise.mean()) < 0.002 and abs(noise.std() - 0.1) < 0.002
    assert (masked[~is_masked] == 1).all()


@pytest.mark.slow
@pytest.mark.parametrize(("encoder", "stacking"), [(TRANSFORMER, PAIRS), (CONFORMER, FOURS)])
def test_padded_rows_have_the_losses_of_shorter_ones(encoder, stacking):
    model = make(encoder, stacking)
    variables = jax.jit(model.init)(jax.random.key(0))
    run = jax.jit(lambda v, batch: model.apply(v, batch, method="compute_predictions"))
    # The draws of a row depend on its place.
    rows = jnp.array([1, 0])
    batch = jax.tree.map(lambda x: x[rows], BATCH)
    padded, alone = run(variables, batch), run(variables, jax.tree.map(lambda x: x[:1, :13], batch))
    length = alone.weights.shape[1]
    assert padded.weights[0].sum() == alone.weights[0].sum() > 0
    for name in ("weights", "codes", "per_token_xent"):
        np.testing.assert_allclose(padded[name][:1, :length], alone[name], rtol=1e-5)


def test_loss_is_the_mean_over_masked_frames_and_codebooks(variables):
    model = make()
    # All weights together are below 1.
    batch = NestedMap(BATCH, eval_sample_weights=jnp.array([0.01, 0.0]))

    def run(model):
        predictions = model.compute_predictions(batch)
        inputs, is_masked = model.mask_spans(SRC.features, is_frame=SRC.paddings == 0)
        encoded = model.encoder(inputs, paddings=SRC.paddings).encoded
        logits = jnp.stack([softmax.logits(encoded) for softmax in model.softmax], axis=2)
        return predictions.codes, is_masked, logits, model.compute_loss(predictions, batch)[0]

    outputs = jax.jit(lambda v: model.apply(v, method=run))(variables)
    codes, is_masked, logits, metrics = jax.device_get(outputs)
    hidden = is_masked[0].reshape(12, 2).all(axis=1)
    log_probs = np.take_along_axis(jax.nn.log_softmax(logits), codes[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(metrics["loss"].value, -log_probs[0, hidden].mean(), rtol=1e-5)
    is_right = np.argmax(logits, axis=-1) == codes
    np.testing.assert_allclose(metrics["accuracy"].value, is_right[0, hidden].mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"].weight, 0.01 * hidden.sum(), rtol=1e-5)
    assert 0 < metrics["loss"].weight < 1
    shares = [np.bincount(codes[0, :, group], minlength=CODES) / 12 for group in range(2)]
    np.testing.assert_allclose(
        metrics["code_coverage"].value, np.mean([share > 0 for share in shares]), rtol=1e-6
    )
    entropies = [-(share[share > 0] * np.log(share[share > 0])).sum() for share in shares]
    perplexity = np.mean(np.exp(entropies))
    np.testing.assert_allclose(metrics["code_perplexity"].value, perplexity, rtol=1e-5)


def test_encoder_is_that_of_ctc_and_the_quantizer_is_not_trained():
    config = CtcModel.HParams.config(frontend_tpl=None, augmenter_tpl=None, vocab_size=5)
    ctc = config.set(encoder_tpl=CONFORMER.clone()).Instantiate()
    key = jax.random.key(0)
    ours = jax.eval_shape(make(CONFORMER, FOURS).init, key)
    theirs = jax.eval_shape(ctc.init, key)
    for collection in (PARAMS, NON_TRAINABLE):
        assert ours[collection]["encoder"] == theirs[collection]["encoder"]
    assert set(ours[PARAMS]) == {"encoder", "softmax_0", "softmax_1"}
    assert set(ours[NON_TRAINABLE]["quantizer"]) == {"entries", "w", "b"}


def test_wrong_stacks_and_masks_raise(variables):
    with pytest.raises(ConfigError, match="stacking_tpl"):
        jax.eval_shape(make(stacking=FOURS).init_with_output, jax.random.key(0), BATCH)
    with pytest.raises(ConfigError, match="mask_prob"):
        make(mask_prob=0.0).apply(variables, SRC.features, is_frame=None, method="mask_spans")
