"""What a notebook shows: tables of weights, metrics, meshes and configs, escaped, and a bar."""

from __future__ import annotations

import dataclasses
import io
import re
import sys
import types
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import pytest

from layerkit_runner import LoadedModel, TrainResult
from layerkit_runner.observers import Progress, RunInfo


class Balance(HTMLParser):
    """A parser that checks that each tag is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def rows(html: str) -> list[list[str]]:
    parser = Balance()
    parser.feed(html)
    assert not parser.open
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", html)]
    return [row for row in cells if row]


def test_tables_of_weights_count_every_number(run: TrainResult, model: LoadedModel):
    total = sum(leaf.size for leaf in jax.tree.leaves(model.weights))
    fresh = model.config.Instantiate()._repr_html_()
    loaded = model._repr_html_()
    for html in (fresh, loaded):
        assert sum(int(row[-1].replace(",", "")) for row in rows(html)) == total
    shared = next(row for row in rows(fresh) if row[0] == "lm/softmax/w")
    assert shared[1:] == ["259 × 16", "float32", "vocab, embed", "4,144"]
    assert repr(model).startswith(f"LoadedModel(LanguageModel, {total:,} weights")
    assert rows(run._repr_html_())[0][:2] == ["train", "4"]


def test_texts_are_escaped_and_configs_fold(lines: ModuleType):
    config = lines.Lines.HParams.config(name="<script>alert(1)</script>")
    html = config._repr_html_()
    assert "<script>" not in html and "&lt;script&gt;" in html
    tree = lines.LinesLm().model()._repr_html_()
    assert rows(tree) is not None and "TransformerLm" in tree and "num_layers" in tree


def test_bar_is_drawn_in_a_notebook(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    # A kernel's shell has an attribute of this name.
    shell = types.SimpleNamespace(kernel=object())
    ipython = types.SimpleNamespace(get_ipython=lambda: shell, version_info=(9, 0))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    names = [field.name for field in dataclasses.fields(RunInfo)]
    facts = {"mode": "train", "num_train_steps": 3, "start_step": 0, "train_programs": ()}
    info = RunInfo(**{**dict.fromkeys(names), **facts})
    for progress in (Progress(), Progress(stream=io.StringIO())):
        progress.start(info)
        for step in (1, 2, 3):
            progress.train_metrics(step, {"loss": 1.5})
            progress.progress(step)
        progress.message("done")
        progress.close()
    shown = capsys.readouterr()
    assert "3/3" in shown.err and "loss 1.5" in shown.err
    assert shown.out == "done\n"
