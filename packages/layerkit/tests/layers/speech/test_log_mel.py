"""Features equal those of Whisper, Kaldi and torchaudio; masks of SpecAugment equal Praxis'."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.layers import LogMel, SpectrumAugmenter
from layerkit.layers.speech.spectrum_augmenter import span_mask
from layerkit.ops.audio import mel_filters

WAVEFORM = (np.random.default_rng(0).normal(size=(2, 4000)) * 0.1).astype(np.float32)
KALDI = {
    "input_scale": 2.0**15,
    "fft_length": 512,
    "low_frequency": 20.0,
    "center": False,
    "preemphasis": 0.97,
    "removes_mean": True,
    "window": "povey",
    "triangles_in_mel": True,
    "floor": 2.0**-23,
}


def features(waveform, **fields):
    layer = LogMel.HParams.config(train=False, **fields).Instantiate()
    return jax.jit(partial(layer.apply, {}))(waveform)


@pytest.mark.slow
def test_whisper_features_are_equal():
    transformers = pytest.importorskip("transformers")
    extractor = transformers.WhisperFeatureExtractor()
    batch = extractor([*WAVEFORM], sampling_rate=16000, padding="longest", return_tensors="np")
    fields = {"mel_scale": "slaney", "has_unit_area": True, "normalization": "whisper"}
    actual = features(WAVEFORM, **fields).features
    np.testing.assert_allclose(actual, batch.input_features.transpose(0, 2, 1), atol=1e-5)


@pytest.mark.slow
def test_kaldi_features_of_seamless_are_equal():
    transformers = pytest.importorskip("transformers")
    extractor = transformers.SeamlessM4TFeatureExtractor()
    plain = [extractor._extract_fbank_features(row) for row in WAVEFORM]
    np.testing.assert_allclose(features(WAVEFORM, **KALDI).features, plain, atol=5e-4)
    batch = extractor([*WAVEFORM], sampling_rate=16000, return_tensors="np")
    actual = features(WAVEFORM, normalization="utterance", **KALDI).features
    # It stacks two frames, of which the last one is padded.
    stacked = actual[:, :22].reshape(2, 11, 160)
    np.testing.assert_allclose(stacked, batch.input_features[:, :11], atol=2e-3)


@pytest.mark.parametrize("scale", ["htk", "slaney"])
def test_torchaudio_features_are_equal(scale):
    audio_utils = pytest.importorskip("transformers.audio_utils")
    filters = audio_utils.mel_filter_bank(
        201, 40, 20.0, 7600.0, 16000, norm="slaney" if scale == "slaney" else None, mel_scale=scale
    )
    fields = {"mel_scale": scale, "has_unit_area": scale == "slaney"}
    limits = {"low_frequency": 20.0, "high_frequency": 7600.0, "num_bins": 40}
    window = audio_utils.window_function(400, "hann")
    expected = audio_utils.spectrogram(
        WAVEFORM[0], window, 400, 160, power=2.0, mel_filters=filters, log_mel="log"
    )
    actual = features(WAVEFORM, **fields, **limits).features
    np.testing.assert_allclose(actual[0], expected.T, atol=1e-4)


def test_filters_of_kaldi_are_straight_in_mel():
    audio_utils = pytest.importorskip("transformers.audio_utils")
    options = {"mel_scale": "kaldi", "triangularize_in_mel_space": True}
    expected = audio_utils.mel_filter_bank(257, 80, 20.0, 8000.0, 16000, **options)
    actual = mel_filters(
        80, num_frequencies=257, sample_rate=16000, low=20.0, high=8000.0, triangles_in_mel=True
    )
    np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.parametrize("center", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_padded_waveforms_have_the_features_of_shorter_ones(center):
    layer = LogMel.HParams.config(train=False, center=center, normalization="utterance")
    apply = jax.jit(partial(layer.Instantiate().apply, {}))
    lengths = jnp.array([4000, 2750, 100, 0])
    waveforms = jnp.asarray(np.tile(WAVEFORM, (2, 1)))
    padded = apply(waveforms, lengths=lengths)
    short = apply(waveforms[1:2, :2750]).features
    # A mirrored utterance of less than a frame is one frame, and an empty one none.
    expected = [padded.features.shape[1], short.shape[1], int(center), 0]
    np.testing.assert_array_equal((1 - padded.paddings).sum(axis=1), expected)
    np.testing.assert_allclose(padded.features[1, : short.shape[1]], short[0], atol=1e-4)
    np.testing.assert_array_equal(padded.features[1, short.shape[1] :], 0.0)
    np.testing.assert_array_equal(padded.features[2:], 0.0)


def test_dither_is_drawn_in_training_alone():
    layer = LogMel.HParams.config(dither=1.0, train=True).Instantiate()
    apply = jax.jit(lambda key: layer.apply({}, WAVEFORM, rngs={"random": key}))
    first, same, other = (apply(jax.random.key(seed)).features for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, same)
    assert np.abs(first - other).max() > 0.1


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("span_mask_longest", {"longest": 6}),
        ("span_mask_ratio", {"longest": None, "max_ratio": 0.4}),
        ("span_mask_counted", {"longest": None, "max_ratio": 0.4, "per_position": 0.1}),
    ],
)
def test_masks_equal_praxis(praxis, name, options):
    case = praxis(name)
    mask = span_mask(jnp.asarray(case["draws"]), jnp.asarray(case["lengths"]), size=20, **options)
    np.testing.assert_array_equal(~np.asarray(mask), case["kept"] > 0)


def test_augmenter_masks_spans_within_utterances_by_its_key():
    paddings = jnp.asarray(np.arange(40) >= np.array([40, 25])[:, None], jnp.float32)
    x = jnp.ones((2, 40, 16))
    fields = {"freq_mask_max_bins": 4, "freq_mask_count": 1, "time_mask_count": 2}
    layer = SpectrumAugmenter(**fields, time_mask_max_ratio=0.2, train=True)
    apply = jax.jit(lambda key: layer.apply({}, x, paddings=paddings, rngs={"random": key}))
    first, same, other = (apply(jax.random.key(seed)) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, same)
    assert (first != other).any()
    masked = np.asarray(first == 0)
    assert masked.all(axis=2).sum(axis=1).max() <= 16 and not masked[1, 25:].all(axis=1).any()
    assert masked.all(axis=1).sum(axis=1).max() <= 3
    evaluated = layer.clone(train=False).apply({}, x, paddings=paddings)
    np.testing.assert_array_equal(evaluated, x)
