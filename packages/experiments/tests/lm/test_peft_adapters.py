"""LoRA that is trained here and loaded by PEFT, and back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import layerkit_runner
from layerkit.errors import ConfigError
from layerkit_experiments.lm.fine_tune import FineTuneLora
from layerkit_runner import cli
from layerkit_runner.errors import UsageError
from layerkit_runner.init_from import plan_first_state
from layerkit_runner.init_from.settings import init_from_flags
from layerkit_runner.run.job import build_parts
from layerkit_runner.run.resolve import resolve

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

IDS = np.random.default_rng(0).integers(1, 250, (2, 12)).tolist()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama."""
    folder = tmp_path_factory.mktemp("base")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300, num_attention_heads=4, max_position_embeddings=64, **sizes
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def fields_of(base: Path, folder: Path, **more: Any) -> dict[str, Any]:
    (folder / "text.txt").write_text("Adapters are thin.\n" * 200)
    fields = {"HF_FOLDER": str(base), "TEXT_FILES": [str(folder / "text.txt")], "MAX_SEQ_LEN": 32}
    fields |= {"TOKENIZER": "bytes", "FPROP_DTYPE": "float32", "MAX_STEPS": 3, "WARMUP_STEPS": 1}
    return {**fields, "LEARNING_RATE": 0.03, "PERCORE_BATCH_SIZE": 1, **more}


def logits_of_peft(base: Path, adapter: Path) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    with torch.no_grad():
        plain = model(torch.tensor(IDS)).logits.numpy()
        adapted = peft.PeftModel.from_pretrained(model, adapter).eval()(torch.tensor(IDS))
    assert np.abs(adapted.logits.numpy() - plain).max() > 0.01 * np.abs(plain).max()
    return adapted.logits.numpy()


def assert_near(result: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(result - expected).max() < 1e-5 * np.abs(expected).max()


def test_trained_adapters_are_loaded_by_peft_and_back(base: Path, tmp_path: Path, raises: Any):
    fields = fields_of(base, tmp_path, LORA_MAGNITUDE=True, LORA_ONLY=".*(query|linear)_tpl")
    ended = layerkit_runner.train(FineTuneLora(**fields), job_log_dir=tmp_path / "run")
    words = [f"--job_log_dir={tmp_path / 'run'}", "--mode=export", "--adapters_only"]
    assert cli.main([*words, f"--export_dir={tmp_path / 'adapter'}"]) == 0
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    expected = logits_of_peft(base, tmp_path / "adapter")
    assert_near(ended.model.logits(IDS), expected)

    adapters = {str(tmp_path / "adapter"): 1.0}
    loaded = layerkit_runner.load(base, overrides={"ADAPTERS": adapters, "DTYPE": "float32"})
    assert_near(loaded.logits(IDS), expected)
    with raises(UsageError, field="folder"):
        layerkit_runner.load(tmp_path / "adapter")

    with pytest.raises(
        ConfigError, match="LORA_ONLY.*since the folders of ADAPTERS have their own"
    ):
        FineTuneLora(**fields, ADAPTERS=adapters).validate()

    # Beside the model of the experiment, whose adapters have the same shapes.
    partitioner, task = build_parts(resolve(FineTuneLora(**fields)))
    partitioner.start()
    partitioner.bind(task)
    flags = init_from_flags(str(tmp_path / "adapter"), None, beside=task.initial_weights)
    first = plan_first_state(partitioner, task, weights=flags)()
    for name, value in ended.model.weights["lm"]["stack"]["repeat"]["sub"]["attention"].items():
        for path in ("lora_a", "lora_b", "lora_magnitude") if name == "query" else ():
            stack = first.state.params["lm"]["stack"]["repeat"]["sub"]["attention"][name]["dot"]
            np.testing.assert_allclose(stack[path], value["dot"][path], atol=1e-6)


@pytest.mark.slow
def test_adapters_of_peft_are_trained_further_on_4_bits(base: Path, tmp_path: Path):
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"], modules_to_save=["lm_head"])
    adapted = peft.get_peft_model(model, config)
    for value in (value for value in adapted.parameters() if value.requires_grad):
        value.data += 0.1 * torch.randn_like(value)
    adapted.save_pretrained(tmp_path / "adapter")
    fields = fields_of(base, tmp_path, ADAPTERS={str(tmp_path / "adapter"): 1.0})
    overrides = {"task.model.weight_format": "nf4:8"}
    job = tmp_path / "run"
    ended = layerkit_runner.train(FineTuneLora(**fields), job_log_dir=job, overrides=overrides)
    assert ended.metrics["loss"][-1] < ended.metrics["loss"][0]
    words = [f"--job_log_dir={job}", "--mode=export", "--adapters_only"]
    assert cli.main([*words, f"--export_dir={tmp_path / 'new'}"]) == 0
    # The model of PEFT has the floats that are rounded here.
    expected, result = logits_of_peft(base, tmp_path / "new"), ended.model.logits(IDS)
    assert np.abs(result - expected).max() < 0.2 * np.abs(expected).max()
    again = {str(tmp_path / "new"): 1.0}
    loaded = layerkit_runner.load(base, overrides={"ADAPTERS": again, "DTYPE": "float32"})
    assert_near(loaded.logits(IDS), expected)
