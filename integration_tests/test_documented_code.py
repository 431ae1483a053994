"""The code on pages that promise to be run, run in the order in which a reader meets it."""

from __future__ import annotations

import inspect
import re
import sys
import types
from pathlib import Path
from typing import Any

import jax
import pytest

from layerkit_runner import BaseExperiment
from layerkit_runner.configuration.resolve import resolve

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = [
    "data_sets.md",
    "init_from.md",
    "inputs.md",
    "optimization.md",
    "preferences.md",
    "programs.md",
    pytest.param("transformers.md", marks=pytest.mark.slow),
]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page: str, monkeypatch: pytest.MonkeyPatch):
    text = (DOCS / page).read_text()
    module = types.ModuleType("documented")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where dataclasses look
    names = vars(module)
    blocks = list(BLOCK.finditer(text))
    assert blocks
    for block in blocks:
        # Lines are counted as on the page, so that a failure names the place.
        blank = "\n" * text[: block.start(1)].count("\n")
        exec(compile(blank + block[1], str(DOCS / page), "exec"), names)
    # Experiments are made as well, since their methods may ask for what is not there.
    own = [value for value in names.values() if getattr(value, "__module__", None) == "documented"]
    for cls in filter(inspect.isclass, own):
        if issubclass(cls, BaseExperiment) and cls.task is not BaseExperiment.task:
            resolve(cls())


def test_example_of_decoding_from_python_runs_by_itself(capsys: pytest.CaptureFixture[str]):
    _, _, section = (DOCS / "decoding.md").read_text().partition("## From Python\n")
    block = BLOCK.search(section)
    assert block is not None
    exec(compile(block[1], "decoding.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "To be, " in printed
    assert "O " in printed


def test_example_of_hugging_face_folders_runs_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("safetensors")
    from layerkit.config import build
    from layerkit.interop.hugging_face import export_model, import_model
    from layerkit.layers import Embedding, FullSoftmax, RmsNorm, RotaryPositionalEmbedding, SiLU
    from layerkit.models import LanguageModel, TransformerLm

    lm = TransformerLm.HParams.config(
        vocab_size=12, model_dims=8, hidden_dims=10, num_layers=2, num_heads=2, dropout_rate=0.0
    )
    lm.set(
        softmax_tpl=FullSoftmax.HParams.config(),
        embedding_tpl=Embedding.HParams.config(),
        final_norm_tpl=RmsNorm.HParams.config(),
    )
    layer = lm.stack_tpl.layer_tpl
    layer.norm_tpl = RmsNorm.HParams.config()
    layer.feed_forward_tpl.set(use_gate=True, activation_tpl=SiLU.HParams.config())
    layer.attention_tpl.set(rotary_tpl=RotaryPositionalEmbedding.HParams.config())
    model = LanguageModel.HParams.config(lm_tpl=lm)
    monkeypatch.chdir(tmp_path)
    export_model("Llama-3.2-1B", model, build(model).init(jax.random.key(0)))
    _, _, section = (DOCS / "hugging_face.md").read_text().partition("## In Python\n")
    block = BLOCK.search(section)
    assert block is not None
    names: dict[str, Any] = {}
    exec(compile(block[1], "hugging_face.md", "exec"), names)
    assert names["logits"].shape == (1, 3, 12)
    import_model("my-llama")
