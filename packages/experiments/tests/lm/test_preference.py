"""Experiments on preferences: they learn them, resume, shard and export as transformers reads."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import layerkit_runner
from layerkit.config import build
from layerkit.errors import ConfigError, UserError
from layerkit_experiments.lm import preference
from layerkit_experiments.lm.quickstart import LocalText
from layerkit_experiments.recipes.preference_files import PreferenceFiles
from layerkit_inputs.base.errors import MissingFileError
from layerkit_inputs.chat.preference_input import reference_log_probs
from layerkit_runner import cli
from layerkit_runner.init_from import plan_first_state
from layerkit_runner.run.job import build_parts
from layerkit_runner.run.resolve import resolve

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.numpy")

PAIRS = [
    {"prompt": f"{a}+{b}?", "chosen": f"{a + b}.", "rejected": f"It is {a + b}!"}
    for a in range(6)
    for b in range(6)
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama, and files of pairs and of judgements."""
    folder = tmp_path_factory.mktemp("base")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300, num_attention_heads=4, max_position_embeddings=64, pad_token_id=0, **sizes
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    judged = [
        {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
        for pair in PAIRS
        for side in ("chosen", "rejected")
    ]
    for name, rows in (("pairs", PAIRS), ("judged", judged)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def make(name: str, base: Path, **more: Any) -> Any:
    fields = {"HF_FOLDER": str(base), "TOKENIZER": "bytes", "CHAT_TEMPLATE": "zephyr"}
    fields["CHAT_FILES"] = [str(base / ("judged.jsonl" if name == "Kto" else "pairs.jsonl"))]
    fields |= {"MAX_SEQ_LEN": 48, "MAX_STEPS": 16, "WARMUP_STEPS": 1, "LEARNING_RATE": 0.02}
    fields |= {"PERCORE_BATCH_SIZE": 1.0, "FPROP_DTYPE": "float32"}
    fields |= {"NUM_PROMPTS": 1, "MAX_DECODE_STEPS": 4, "SUMMARY_INTERVAL_STEPS": 1}
    return getattr(preference, name)(**{**fields, **more})


def export(job: Path, folder: Path) -> Path:
    words = [f"--job_log_dir={job}", "--mode=export", f"--export_dir={folder}"]
    assert cli.main(words) == 0
    return folder


def is_slow(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.parametrize("name", ["Dpo", is_slow("DpoLora"), is_slow("Simpo"), is_slow("Orpo")])
def test_pairs_are_learnt_and_the_policy_is_exported(name: str, base: Path, tmp_path: Path):
    ended = layerkit_runner.train(make(name, base), job_log_dir=tmp_path / "job")
    if name.startswith("Dpo"):
        np.testing.assert_allclose(ended.metrics["loss"][0], np.log(2.0), rtol=1e-6)
    last = ended.evaluations["heldout"].last()
    assert last["reward_accuracy"] == 1.0 and last["reward_margin"] > 0.1
    folder = export(tmp_path / "job", tmp_path / "policy")
    policy = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = np.arange(3, 15)[None]
    with torch.no_grad():
        expected = policy(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(ended.model.logits(ids), expected, atol=1e-4)


def test_judgements_are_learnt(base: Path, tmp_path: Path):
    ended = layerkit_runner.train(make("Kto", base), job_log_dir=tmp_path / "job")
    losses, last = ended.metrics["loss"], ended.evaluations["heldout"].last()
    np.testing.assert_allclose(losses[0], 0.5, rtol=1e-6)
    assert losses[-1] < 0.4 and last["reward_margin"] > 0.1


def test_reward_model_is_exported_as_a_classifier(base: Path, tmp_path: Path):
    ended = layerkit_runner.train(make("Reward", base), job_log_dir=tmp_path / "job")
    assert ended.evaluations["heldout"].last()["reward_accuracy"] == 1.0
    folder = export(tmp_path / "job", tmp_path / "reward")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    batch = build(ended.experiment.datasets[0].clone().set(batch_size=4)).get_next()
    with torch.no_grad():
        rewards = [model(torch.tensor(batch[s].ids)).logits for s in ("chosen", "rejected")]
    assert (rewards[0] > rewards[1]).all()


@pytest.mark.slow
def test_resumed_run_equals_the_uninterrupted_one(base: Path, tmp_path: Path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    experiment = make("DpoLora", base, MAX_STEPS=6, LORA_DROPOUT_RATE=0.1)
    expected = layerkit_runner.train(experiment, job_log_dir=whole)
    overrides = {"task.train.num_train_steps": 3}
    layerkit_runner.train(experiment, job_log_dir=resumed, overrides=overrides)
    ended = layerkit_runner.train(experiment, job_log_dir=resumed)
    assert ended.metrics["loss"] == expected.metrics["loss"]
    jax.tree.map(np.testing.assert_array_equal, ended.model.variables, expected.model.variables)


def losses(name: str, base: Path, mesh: list[int], steps: int = 3, **more: Any) -> list[float]:
    """The losses of the first steps on a mesh of simulated devices."""
    size = int(np.prod(mesh))
    more |= {"ICI_MESH_SHAPE": mesh, "PERCORE_BATCH_SIZE": 8 / size}
    resolved = resolve(make(name, base, **more))
    partitioner, task = build_parts(resolved)
    partitioner.start(jax.devices()[:size])
    partitioner.bind(task)
    state = plan_first_state(partitioner, task)().state
    step, all_losses = partitioner.train_step_fn(task), []
    data = build(resolved.datasets[0].clone().set(batch_size=8))
    for _ in range(steps):
        state, (metrics, _) = step(state, partitioner.put_batch(data.get_next()))
        all_losses.append(float(metrics["loss"].value))
    return all_losses


@pytest.mark.parametrize("name", ["Dpo", is_slow("Kto"), is_slow("Orpo"), is_slow("Reward")])
def test_losses_on_a_mesh_equal_those_on_one_device(name: str, base: Path):
    all_losses = [losses(name, base, mesh) for mesh in ([1, 1, 1], [2, 2, 1], [1, 2, 2])]
    np.testing.assert_allclose(all_losses[1:], [all_losses[0]] * 2, rtol=1e-4)


def test_stored_reference_replaces_the_second_network(raises, base: Path, tmp_path: Path):
    fields = {"REFERENCE_FOLDER": str(tmp_path)}
    stored = make("Dpo", base, **fields)
    model = layerkit_runner.load(base)
    for config in stored.datasets():
        build(config.set(batch_size=4)).write(reference_log_probs(model.score_ids))
    assert resolve(stored).task.model.reference == "batch"
    other = shutil.copytree(base, tmp_path / "other")
    tensors = safetensors.load_file(other / "model.safetensors")
    doubled = {name: 2 * tensor for name, tensor in tensors.items()}
    safetensors.save_file(doubled, other / "model.safetensors", metadata={"format": "pt"})
    with raises(MissingFileError, field="file"):
        losses("Dpo", other, [1, 1, 1], **fields)
    stored.check_init_from(str(base))
    with raises(ConfigError, field="REFERENCE_FOLDER", value=str(tmp_path)):
        stored.check_init_from(str(other))
    # The start is the sum of the folder and the adapters.
    adapted = [make("Dpo", base, ADAPTERS={str(other): x}, **fields) for x in (1.0, 0.5)]
    files = {build(one.datasets()[0].set(batch_size=4))._path for one in (stored, *adapted)}
    assert len(files) == 3
    all_losses, expected = (losses("Dpo", base, [1, 1, 1], **one) for one in (fields, {}))
    np.testing.assert_allclose(all_losses, expected, rtol=1e-4)


def test_orpo_on_microbatches_equals_that_on_the_batch(base: Path):
    all_losses = [losses("Orpo", base, [1, 1, 1], GRADIENT_ACCUMULATION_STEPS=n) for n in (1, 4)]
    np.testing.assert_allclose(all_losses[1], all_losses[0], rtol=1e-5)


def test_head_of_a_reward_model_is_trained_with_adapters(base: Path):
    learner = resolve(make("Reward", base, LORA_RANK=2)).task.train.learner
    assert any(re.fullmatch(pattern, "score/w") for pattern in learner.trainable)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("Kto", "GAMMA", 0.5),
        ("Reward", "BETA", 0.2),
        ("Dpo", "CENTERING", 0.1),
        ("Kto", "REFERENCE_FOLDER", "."),
        ("Simpo", "REFERENCE_FOLDER", "."),
    ],
)
def test_field_that_the_loss_does_not_read_raises(raises, base: Path, name, field, value):
    with raises(ConfigError, field=field, value=value):
        resolve(make(name, base, **{field: value}))


@pytest.mark.parametrize(("fields", "least"), [({}, 2), ({"GRADIENT_ACCUMULATION_STEPS": 4}, 8)])
def test_stage_of_kto_with_one_row_in_a_microbatch_raises(raises, base: Path, fields, least):
    stages = [{"until_step": n, "batch": rows} for n, rows in ((1, 16), (2, least))]
    resolve(make("Kto", base, MAX_STEPS=2, STAGES=stages, **fields))
    stages.append({"until_step": 3, "batch": least // 2})
    with raises(UserError, owner="Kto: STAGES[2]", field="batch", value=least // 2):
        resolve(make("Kto", base, MAX_STEPS=3, STAGES=stages, **fields))


class ByteDpo(PreferenceFiles, LocalText):
    """DPO of the quickstart model."""

    TOKENIZER = "bytes"
    CHAT_TEMPLATE = "zephyr"


@pytest.mark.slow
def test_model_of_an_earlier_job_is_tuned(base: Path, tmp_path: Path):
    sizes = {"NUM_LAYERS": 1, "MODEL_DIMS": 16, "HIDDEN_DIMS": 16, "MAX_SEQ_LEN": 48}
    first = layerkit_runner.train(
        LocalText(TEXT_FILES=[str(base / "pairs.jsonl")], JSON_AS_TEXT=True, **sizes),
        job_log_dir=tmp_path / "base",
        num_steps=2,
    )
    options = {"init_from": str(tmp_path / "base")}
    tuned = layerkit_runner.train(
        ByteDpo(CHAT_FILES=[str(base / "pairs.jsonl")], **sizes),
        job_log_dir=tmp_path / "tuned",
        num_steps=2,
        options=options,
    )
    params = tuned.model.variables["params"]
    jax.tree.map(
        np.testing.assert_array_equal,
        params["reference_lm"],
        first.model.variables["params"]["lm"],
    )
