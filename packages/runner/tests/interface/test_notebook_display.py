"""What a notebook shows: configs, layers and models as trees, and a bar."""

from __future__ import annotations

import dataclasses
import io
import sys
import types
from pathlib import Path
from types import ModuleType

import pytest
import treescope

from layerkit_runner import TrainResult
from layerkit_runner.observers import Progress, RunInfo


def test_config_is_a_foldable_tree(lines: ModuleType):
    config = lines.LinesLm().model()
    shown = treescope.render_to_text(config)
    assert shown.startswith("LanguageModel(") and "lm_tpl=TransformerLm(" in shown
    assert "num_layers=" in shown and "treescope" in treescope.render_to_html(config)


def test_configs_layers_and_models_are_shown_as_trees(run: TrainResult):
    loaded = run.model
    pytest.importorskip("IPython")
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    formatter = InteractiveShell.instance().display_formatter
    for value in (loaded.config, loaded.model, loaded.config.lm_tpl, loaded):
        with capture_output() as captured:
            formatter.format(value)  # as for the last value of a cell
        (output,) = captured.outputs
        assert "treescope" in output.data["text/html"]
    layer, model = treescope.render_to_text(loaded.model), treescope.render_to_text(loaded)
    assert layer.startswith("LanguageModel(") and "lm_tpl=TransformerLm(" in layer
    assert f"path={loaded.path!r}" in model and "config=LanguageModel(" in model
    assert "ShapeDtypeStruct" in model


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
