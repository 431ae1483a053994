"""The code on pages that promise to be run, run in the order in which a reader meets it."""

from __future__ import annotations

import inspect
import re
import sys
import types
from pathlib import Path

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
