"""The hybrid of gated delta nets and attention: its pattern, a short run, and generated text."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerkit.config import target_of
from layerkit.errors import ConfigError
from layerkit_experiments.lm.hybrid import HybridText
from layerkit_runner import cli
from layerkit_runner.observers import read_metrics
from layerkit_runner.run.resolve import resolve


def test_mixers_are_those_of_the_period():
    stack = resolve(HybridText()).task.model.lm_tpl.stack_tpl
    kinds = [target_of(layer.attention_tpl).__name__ for layer in stack.block_tpls]
    assert kinds == ["GatedDeltaNet"] * 3 + ["MultiHeadAttention"]
    stack = resolve(HybridText(MIXERS=("lstm", "attention"))).task.model.lm_tpl.stack_tpl
    assert target_of(stack.block_tpls[0].attention_tpl).__name__ == "Frnn"
    stack = resolve(HybridText(MIXERS=("mamba2", "attention"))).task.model.lm_tpl.stack_tpl
    assert target_of(stack.block_tpls[0].attention_tpl).__name__ == "Mamba2"
    # The initial scale of residual branches is that of attention.
    scales = [layer.attention_tpl.output_tpl.params_init for layer in stack.block_tpls]
    assert scales[0] == scales[1] is not None


@pytest.mark.parametrize("mixers", [(), ("gated_delta",)])
def test_unknown_or_no_mixers_are_refused(raises, mixers):
    with raises(ConfigError, field="MIXERS", value=mixers):
        resolve(HybridText(MIXERS=mixers))


@pytest.mark.slow
def test_reduced_form_learns_and_generates(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    sizes = {"NUM_LAYERS": 2, "MODEL_DIMS": 32, "HIDDEN_DIMS": 64, "PERCORE_BATCH_SIZE": 1.0}
    sizes |= {"MAX_SEQ_LEN": 32, "MIXERS": ("gated_delta_net", "attention")}
    steps = {"MAX_STEPS": 20, "CHECKPOINT_EVERY_N_STEPS": 20, "SUMMARY_INTERVAL_STEPS": 1}
    steps["EVAL_INTERVAL_STEPS"] = None
    words = [f"--fdl.{name}={value}" for name, value in (sizes | steps).items()]
    flags = ["--exp=lm.hybrid.HybridText", "--reduced", "--noenable_summary_writer"]
    assert cli.main([*flags, f"--job_log_dir={tmp_path}", *words]) == 0
    losses = [record["loss"] for record in read_metrics(tmp_path).train]
    assert sum(losses[-3:]) < sum(losses[:3]) - 0.3
    capsys.readouterr()
    options = ["--mode=generate", "--prompt=def f(x):", "--max_new_tokens=5", "--temperature=0"]
    assert cli.main([*options, f"--job_log_dir={tmp_path}"]) == 0
    assert capsys.readouterr().out.strip("\n")
