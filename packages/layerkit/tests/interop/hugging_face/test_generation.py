"""Decoding defaults of folders, compared with the processors that transformers builds from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.config import build
from layerkit.decoding.logit_processors import RowsSoFar, process_logits
from layerkit.errors import ConfigError
from layerkit.interop.hugging_face import decoder_config, generation_notes, speech_prompt

VOCAB = 70
CONFIG = {"model_type": "llama", "vocab_size": VOCAB, "eos_token_id": 2}


def write(folder: Path, content: dict[str, Any] | None, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    if content is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **content}))
    return folder


@pytest.fixture(scope="module")
def gpt2() -> Any:
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
    torch.manual_seed(0)
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 16, "vocab_size": VOCAB}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"temperature": 0.6, "top_p": 0.9, "top_k": 20},  # not sampling
        {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"do_sample": True, "temperature": 1},  # top_k is 50
        {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 0},
        {"do_sample": True, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1, "min_p": 0.05},
        {"do_sample": True, "bad_words_ids": [[5], [2]]},  # The end token is kept.
        {"suppress_tokens": [3, 9], "bad_words_ids": [[5], [2]], "min_new_tokens": 4},
    ],
)
@pytest.mark.parametrize("is_config_json", [False, True])
def test_decoder_equals_the_processors_of_transformers(
    gpt2: Any, content: dict[str, Any], is_config_json: bool, tmp_path: Path
):
    """The last place is config.json, if there is no other file."""
    import torch
    import transformers

    theirs = transformers.GenerationConfig(eos_token_id=2, **content)
    gpt2.generation_config = theirs
    prepared, _ = gpt2._prepare_generation_config(None)
    gpt2._prepare_special_tokens(prepared, device="cpu")
    ids = np.random.default_rng(0).integers(0, 30, (3, 6))
    logits = np.random.default_rng(1).normal(0, 3, (3, VOCAB)).astype(np.float32)
    processors = gpt2._get_logits_processor(prepared, input_ids_seq_length=3, device="cpu")
    expected = processors(torch.tensor(ids), torch.tensor(logits)).numpy()
    write(tmp_path, None if is_config_json else content, **(content if is_config_json else {}))
    decoder = build(decoder_config(tmp_path))
    rows = RowsSoFar(jnp.asarray(ids), jnp.full(3, 3), jnp.int32(6))
    result = process_logits(decoder.all_processors(), jnp.asarray(logits), rows)
    assert (decoder.temperature > 0) == bool(content.get("do_sample"))
    if decoder.temperature == 0:  # Others may exclude tokens, but never the most likely one.
        np.testing.assert_array_equal(jnp.argmax(result, -1), np.argmax(expected, -1))
    else:
        np.testing.assert_array_equal(result == -np.inf, expected == -np.inf)
        np.testing.assert_allclose(result, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("content", "steps", "max_length"),
    [
        ({}, 64, None),
        ({"max_length": 30}, 30, 30),
        ({"max_length": 30, "max_new_tokens": 7}, 7, None),  # which takes precedence
    ],
)
def test_length(content: dict[str, Any], steps: int, max_length: int | None, tmp_path: Path):
    decoder = build(decoder_config(write(tmp_path, content)))
    assert (decoder.max_decode_steps, decoder.max_length) == (steps, max_length)


def test_an_error_names_the_key_of_the_file(raises, tmp_path: Path):
    with raises(ConfigError, field="no_repeat_ngram_size", value=-1):
        decoder_config(write(tmp_path, {"no_repeat_ngram_size": -1}))


def test_prompt_of_whisper_has_the_language_the_task_and_no_timestamps(raises, tmp_path: Path):
    multilingual = {
        "lang_to_id": {"<|en|>": 43, "<|de|>": 44},
        "task_to_id": {"transcribe": 45, "translate": 46},
        "no_timestamps_token_id": 47,
    }
    folder = write(tmp_path, multilingual)
    assert speech_prompt(folder) == (43, 45, 47)
    assert speech_prompt(folder, language="de", task="translate") == (44, 46, 47)
    with raises(ConfigError, field="language", value="german"):
        speech_prompt(folder, language="german")
    english = write(tmp_path, {"no_timestamps_token_id": 47})
    assert speech_prompt(english) == (47,)
    for field, value in {"language": "de", "task": "translate"}.items():
        with raises(ConfigError, field=field, value=value):
            speech_prompt(english, **{field: value})
    with raises(ConfigError, field="no_timestamps_token_id"):
        speech_prompt(write(tmp_path, {}))


def test_notes_have_what_is_used_and_what_is_not_supported(tmp_path: Path):
    content = {
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.9,
        "max_length": 40,
        "num_beams": 4,
        "typical_p": 0.5,
        "early_stopping": True,
        "encoder_repetition_penalty": 1.0,
        "bad_words_ids": [[1], [3, 4]],
    }
    folder = write(tmp_path, content)
    used, lacking = generation_notes(folder, decoder_config(folder))
    shown = "temperature=0.6, top_k=50, top_p=0.9, max_length=40, bad_words_ids=[[1], [3, 4]]"
    assert used == f"generation   {shown}, by default (generation_config.json)"
    assert lacking == (
        "generation   unsupported and not applied: num_beams=4, typical_p=0.5,"
        " bad_words_ids=[[3, 4]] (generation_config.json)"
    )
    write(folder, {"typical_p": 0.5})  # Only sampling reads it.
    assert generation_notes(folder, decoder_config(folder)) == [
        "generation   greedy, max_decode_steps=64, by default (generation_config.json)"
    ]
