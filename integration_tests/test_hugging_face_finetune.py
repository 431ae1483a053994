"""A GPT-2 in a Hugging Face folder, fine-tuned by the command on local text, and exported again."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.config import build
from layerkit.interop.hugging_face import export_model, import_model
from layerkit_runner import cli

pytest.importorskip("safetensors")

VOCAB_SIZE = 264
EXPERIMENT = '''
from layerkit_experiments.lm.fine_tune import HuggingFaceLm
from layerkit_experiments.recipes.local_files import LocalFiles


class FineTune(LocalFiles, HuggingFaceLm):
    """The model of a folder on local text."""

    TOKENIZER = "bytes"
    FPROP_DTYPE = "float32"
    LEARNING_RATE = 1e-3
    ICI_MESH_SHAPE = [2, 2, 2]
    PERCORE_BATCH_SIZE = 1.0
    MAX_SEQ_LEN = 16
    MAX_STEPS = 6
    WARMUP_STEPS = 1
    SUMMARY_INTERVAL_STEPS = 1
    EVAL_INTERVAL_STEPS = None
    CHECKPOINT_EVERY_N_STEPS = 3

    def decode_datasets(self):
        """Return no configs, since the tests compare the weights."""
        return []
'''


@dataclasses.dataclass(frozen=True)
class Run:
    """What the command did.

    Attributes:
      source: The folder that training began from.
      target: The folder that was exported.
      metrics: The lines of metrics.jsonl of training steps.
      saved: The last checkpoint, path to array.
    """

    source: Path
    target: Path
    metrics: list[dict[str, Any]]
    saved: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small GPT-2 with random weights, for byte-level text."""
    from layerkit.interop.hugging_face.families.gpt2 import GPT2

    content = {"model_type": "gpt2", "vocab_size": VOCAB_SIZE, "n_embd": 32, "n_layer": 2}
    content |= {"n_head": 4, "n_positions": 32}
    model = GPT2.read_config(content)
    variables = jax.jit(build(model).init)(jax.random.key(0))
    # So that its loss is far from that of weights as they are drawn, ln 264 and a little.
    variables["params"]["lm"]["softmax"]["w"] *= 4.0
    folder = tmp_path_factory.mktemp("gpt2")
    export_model(folder, model, variables)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def run(gpt2_folder: Path, jobs: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("finetune")
    (folder / "fine_tune_of_this_test.py").write_text(EXPERIMENT)
    words = [
        "--exp=fine_tune_of_this_test.FineTune",
        f"--fdl.HF_FOLDER={gpt2_folder}",
        f"--fdl.TEXT_FILES=['{jobs.text_files}']",
        "--fdl.task.train.eval_at_end=False",
        f"--job_log_dir={folder / 'job'}",
        f"--jax_compilation_cache={jobs.cache}",
    ]
    target = folder / "exported"
    sys.path.insert(0, str(folder))
    try:
        assert cli.main(words) == 0
        assert cli.main([*words, "--mode=export", f"--export_dir={target}"]) == 0
    finally:
        sys.path.remove(str(folder))
    lines = (folder / "job" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    steps = [r for r in records if "event" not in r and "dataset" not in r]
    job = SimpleNamespace(checkpoints=folder / "job" / "checkpoints")
    return Run(gpt2_folder, target, steps, jobs.read_checkpoint(job, 6).leaves)


def loss_of(folder: Path, texts: list[Path]) -> float:
    """Cross-entropy of the beginnings of texts, in nats a byte, by the model of a folder."""
    model, variables = import_model(folder)
    ids = np.stack([np.frombuffer(text.read_bytes()[:17], np.uint8) for text in texts]) + 3
    inputs, labels = jnp.asarray(ids[:, :-1], jnp.int32), jnp.asarray(ids[:, 1:], jnp.int32)
    weights, lm = jnp.ones(inputs.shape), build(model)

    @jax.jit
    def xent(variables: Any) -> jax.Array:
        result = lm.apply(variables, method=lambda m: m.lm(inputs, labels=labels, weights=weights))
        return result.xent

    return float(xent(variables))


def test_training_begins_at_the_weights_of_the_folder(run: Run, text_files: Path):
    of_folder = loss_of(run.source, sorted(text_files.iterdir())[:32])
    assert of_folder > 8
    assert run.metrics[0]["loss"] == pytest.approx(of_folder, rel=0.2)
    assert run.metrics[-1]["loss"] < run.metrics[0]["loss"]


def test_export_has_the_saved_weights(run: Run):
    _, variables = import_model(run.target)
    leaves = jax.tree_util.tree_leaves_with_path(variables)
    assert len(leaves) == 20
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path)
        assert np.asarray(leaf).tobytes() == run.saved[name].tobytes(), name


def test_the_tokenizer_of_the_folder_goes_along(run: Run):
    assert (run.target / "tokenizer_config.json").read_text() == "{}"
    config = json.loads((run.target / "config.json").read_text())
    assert (config["model_type"], config["vocab_size"]) == ("gpt2", VOCAB_SIZE)


def test_transformers_loads_the_exported_folder(run: Run):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(run.target).eval()
    ids = np.random.default_rng(0).integers(3, VOCAB_SIZE, (2, 12))
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
    model, variables = import_model(run.target)
    ours = build(model).apply(variables, jnp.asarray(ids), method=lambda m, x: m.lm.logits(x))
    np.testing.assert_allclose(ours, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.slow
def test_an_average_is_exported_with_the_tokenizer_of_the_flag(
    gpt2_folder: Path, jobs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "begun_by_flag_of_this_test.py").write_text(EXPERIMENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    target = tmp_path / "exported"
    words = [
        "--exp=begun_by_flag_of_this_test.FineTune",
        f"--fdl.HF_FOLDER={gpt2_folder}",
        f"--fdl.TEXT_FILES=['{jobs.text_files}']",
        "--fdl.task.initial_weights=None",
        "--fdl.task.train.learner.ema_decay=0.9",
        "--fdl.task.train.decode_use_ema_states=True",
        f"--job_log_dir={tmp_path / 'job'}",
        f"--jax_compilation_cache={jobs.cache}",
    ]
    assert cli.main([*words, f"--init_from={gpt2_folder}"]) == 0
    assert cli.main([*words, "--mode=export", f"--export_dir={target}"]) == 0
    assert (target / "tokenizer_config.json").read_text() == "{}"
    saved = jobs.read_checkpoint(SimpleNamespace(checkpoints=tmp_path / "job" / "checkpoints"), 6)
    _, variables = import_model(target)
    for path, leaf in jax.tree_util.tree_leaves_with_path(variables["params"]):
        name = jax.tree_util.keystr(path)
        assert np.asarray(leaf).tobytes() == saved.leaves[f"['ema']{name}"].tobytes(), name
        assert (np.asarray(leaf) != saved.leaves[f"['params']{name}"]).any(), name
