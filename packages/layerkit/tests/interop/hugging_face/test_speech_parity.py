"""Features, logits and tokens of models of speech against Transformers: small random models."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.config import build
from layerkit.config.nested_map import NestedMap
from layerkit.interop.hugging_face import (
    decoder_config,
    export_model,
    import_model,
    speech_prompt,
)
from layerkit.layers import LogMel

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
pytest.importorskip("safetensors")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 50, "d_model": 16, "num_mel_bins": 8, "max_source_positions": 20}
SIZES |= {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 24}
SIZES |= {"decoder_layers": 3, "decoder_attention_heads": 2, "decoder_ffn_dim": 20}
SIZES |= {"max_target_positions": 12, "decoder_start_token_id": 40, "eos_token_id": 41}
SIZES |= {"bos_token_id": 41, "pad_token_id": 41}
GENERATION = {"lang_to_id": {"<|en|>": 43, "<|de|>": 44}, "is_multilingual": True}
GENERATION |= {"task_to_id": {"transcribe": 45, "translate": 46}, "no_timestamps_token_id": 47}
GENERATION |= {"suppress_tokens": [3, 5], "begin_suppress_tokens": [7, 41], "max_length": 12}
GENERATION |= {"decoder_start_token_id": 40, "eos_token_id": 41, "pad_token_id": 41}
RANDOM = np.random.default_rng(0)
WAVEFORM = (0.1 * RANDOM.normal(size=(2, 6400))).astype(np.float32)
IDS = RANDOM.integers(0, 40, (2, 9)).astype(np.int32)


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    """A model of Transformers, its folder, and its features of `WAVEFORM`."""
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**SIZES)).eval()
    for weight in model.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.3)
    torch.nn.init.normal_(model.model.decoder.embed_positions.weight, std=2.0)
    model.generation_config = transformers.GenerationConfig(**GENERATION)
    folder = tmp_path_factory.mktemp("whisper")
    model.save_pretrained(folder)
    extractor = transformers.WhisperFeatureExtractor(8)
    features = extractor(
        [WAVEFORM[0], WAVEFORM[1, :4000]], sampling_rate=16000, max_length=6400, return_tensors="pt"
    ).input_features
    return model, folder, features


def source():
    # What follows the end of a sound has no effect.
    return NestedMap(waveform=jnp.asarray(WAVEFORM), lengths=jnp.array([6400, 4000]))


@pytest.mark.parametrize("num_bins", [80, 128])
def test_features_equal_those_of_Whisper(num_bins):
    extractor = transformers.WhisperFeatureExtractor(num_bins)
    expected = extractor([WAVEFORM[0, :5000]], sampling_rate=16000, return_tensors="np")
    fields = {"mel_scale": "slaney", "has_unit_area": True, "normalization": "whisper"}
    layer = LogMel.HParams.config(num_bins=num_bins, num_samples=480_000, train=False, **fields)
    output = layer.Instantiate().apply({}, WAVEFORM[:1, :5000])
    np.testing.assert_allclose(
        output.features, expected.input_features.transpose(0, 2, 1), atol=1e-5
    )
    assert not output.paddings.any()


def test_logits_of_Whisper_equal_those_of_transformers_and_export_is_exact(
    whisper, tmp_path, parity_table
):
    model, folder, features = whisper
    config, variables = import_model(folder)
    ours = build(config)

    def run(bound):
        encoded = bound.frontend(source().waveform, lengths=source().lengths)
        return encoded.features, bound.model.logits(encoded.features, jnp.asarray(IDS))

    output, logits = jax.jit(lambda v: ours.apply(v, method=run))(variables)
    np.testing.assert_allclose(output, features.transpose(1, 2), atol=1e-5)
    with torch.no_grad():
        expected = model(input_features=features, decoder_input_ids=torch.tensor(IDS)).logits
    error = float(np.abs(logits - expected.numpy()).max() / np.abs(expected.numpy()).max())
    parity_table.append(("whisper", "plain", error))
    assert error < 1e-5
    export_model(tmp_path, config, variables, tokenizer_folder=folder)
    again = type(model).from_pretrained(tmp_path).state_dict()
    before = model.state_dict()
    assert again.keys() == before.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in before.items())


def test_decoded_labels_of_Whisper_equal_those_of_transformers(whisper):
    model, folder, features = whisper
    config, variables = import_model(folder)
    config.decoder = decoder_config(folder)
    config.prompt_ids = speech_prompt(folder, language="de")
    assert config.prompt_ids == (44, 45, 47)
    ours = build(config)
    outputs = jax.jit(lambda v: ours.apply(v, NestedMap(src=source()), method="decode"))(variables)
    expected = model.generate(features, language="de", task="transcribe", return_timestamps=False)
    assert outputs.ids[:, 4:].tolist() == expected.tolist() and len(np.unique(expected)) > 2
