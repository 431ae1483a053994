"""What docs/experiments.md states of experiments that run anywhere, reached by their own commands.

Every run is a process of its own, as a user's would be.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import wave
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from layerkit.config import build
from layerkit.interop.hugging_face import export_model
from layerkit.interop.hugging_face.families.whisper import WHISPER
from layerkit_experiments.speech.spoken_digits import SpokenDigits
from layerkit_inputs import GeneratedDigits
from layerkit_inputs.testing.image_files import write_image_folder
from layerkit_runner.checkpointing import CheckpointManager
from layerkit_runner.checkpointing.handlers import stored_leaves

pytestmark = pytest.mark.experiments

TIMEOUT = 5400.0  # seconds; a run takes minutes where nothing else runs beside it
SIZES = ("--reduced", "--fdl.MAX_STEPS=60", "--fdl.CHECKPOINT_EVERY_N_STEPS=60")


def run(*words: str) -> None:
    """One command `runner`, on one device."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    command = [sys.executable, "-m", "layerkit_runner.cli", *words]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def metrics(folder: Path, *, dataset: str | None = None) -> list[dict[str, Any]]:
    """The lines of a job's metrics: of training steps, or of evaluations of a data set."""
    files = sorted(folder.glob("metrics*.jsonl"))
    records = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [r for r in records if "event" not in r and r.get("dataset") == dataset]


@pytest.mark.parametrize("name", ["Digits", "DigitsViT"])
def test_classifier_learns_the_digits(name: str, tmp_path: Path):
    run(f"--exp=vision.digits.{name}", f"--job_log_dir={tmp_path}")
    assert metrics(tmp_path, dataset="heldout")[-1]["accuracy"] > 0.95


def test_small_resnet_learns_from_image_files(tmp_path: Path):
    for split, seed, count in (("train", 1, 4000), ("val", 2, 500)):
        reader = GeneratedDigits(batch_size=count, is_training=True, input_random_seed=seed)
        batch = reader.get_next()
        pixels = np.uint8(np.clip(batch.inputs[..., 0], 0, 1) * 255)
        write_image_folder(tmp_path / split, pixels, batch.labels.tolist())
    words = (f"--fdl.DATA_FOLDER={tmp_path}", f"--job_log_dir={tmp_path}/run")
    run("--exp=vision.image_files.SmallImages", *words)
    assert metrics(tmp_path / "run", dataset="heldout")[-1]["accuracy"] > 0.95


def test_pictures_of_unseen_pairs_are_captioned(tmp_path: Path):
    run("--exp=vision.captions.Captions", f"--job_log_dir={tmp_path}")
    shares = metrics(tmp_path, dataset="decode/captions")[-1]
    assert min(shares[name] for name in ("color", "shape", "relation")) > 0.9


def test_spoken_digits_are_recognized(tmp_path: Path):
    run("--exp=speech.digits.Digits", f"--job_log_dir={tmp_path}")
    assert metrics(tmp_path, dataset="decode/transcripts")[-1]["word_error_rate"] < 0.1


def test_pre_training_on_sounds_lowers_the_errors_of_few_labels(tmp_path: Path):
    run("--exp=speech.digits.DigitsBestRq", f"--job_log_dir={tmp_path}/base")
    words = ["--exp=speech.digits.DigitsFewLabels", f"--job_log_dir={tmp_path}/"]
    run(*words[:1], f"{words[1]}tuned", f"--fdl.INIT_FROM={tmp_path}/base")
    run(*words[:1], f"{words[1]}scratch")
    tuned, scratch = (
        metrics(tmp_path / name, dataset="decode/transcripts")[-1]["word_error_rate"]
        for name in ("tuned", "scratch")
    )
    assert tuned < scratch


def test_a_folder_of_whisper_is_fine_tuned_on_recordings(tmp_path: Path):
    tokenizers = pytest.importorskip("tokenizers")
    for split, count in (("train", 128), ("heldout", 16)):
        sizes = {"batch_size": count, "num_examples": count, "max_samples": 44_800}
        source = SpokenDigits(**sizes, is_training=split == "train", sample_rate=16_000)
        (tmp_path / split).mkdir()
        for row, (sound, text) in enumerate(source._utterances(np.arange(count))):
            with wave.open(str(tmp_path / split / f"{row}.wav"), "wb") as file:
                file.setparams((1, 2, 16_000, 0, "NONE", ""))
                file.writeframes(np.int16(32767 * sound).tobytes())
            (tmp_path / split / f"{row}.txt").write_text(text)
    sizes = {"model_type": "whisper", "vocab_size": 16, "d_model": 32, "num_mel_bins": 40}
    sizes |= {"max_source_positions": 140, "max_target_positions": 16}
    sizes |= {"decoder_start_token_id": 10, "eos_token_id": 11, "pad_token_id": 11}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 1, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 64}
    config, folder = WHISPER.read_config(sizes), tmp_path / "whisper"
    export_model(folder, config, build(config).init(jax.random.key(0)))
    defaults = {"lang_to_id": {"<|en|>": 12}, "task_to_id": {"transcribe": 13}}
    defaults |= {"no_timestamps_token_id": 14, "eos_token_id": 11, "max_length": 16}
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    ids = {str(number): number for number in range(16)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="15"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "11"}')
    fields = {"WHISPER_FOLDER": folder, "DATA_FOLDER": tmp_path, "MAX_LABELS": 6, "MAX_STEPS": 60}
    fields |= {"FPROP_DTYPE": "float32", "LEARNING_RATE": 3e-3, "WARMUP_STEPS": 10}
    words = [f"--fdl.{name}={value}" for name, value in fields.items()]
    run("--exp=speech.whisper.FineTuneWhisper", *words, f"--job_log_dir={tmp_path}/run")
    losses = [record["loss"] for record in metrics(tmp_path / "run")]
    assert losses[-1] < losses[0] - 0.5
    (rate,) = metrics(tmp_path / "run", dataset="decode/transcripts")
    assert 0 <= rate["word_error_rate"] <= 1.5


def test_unseen_numbers_are_translated(tmp_path: Path):
    words = ["--exp=translation.numbers.EnglishToGermanNumbers", f"--job_log_dir={tmp_path}"]
    run(*words)
    run(*words, "--mode=decode_once")
    assert metrics(tmp_path, dataset="decode/translations")[-1]["exact_match"] > 0.95


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small LLaMA that knows Python's sources, as a job and in `exported` for Hugging Face."""
    folder = tmp_path_factory.mktemp("base")
    words = ["--exp=lm.llama.Llama7B", *SIZES, f"--job_log_dir={folder}"]
    run(*words)
    run(*words, "--mode=export", f"--export_dir={folder / 'exported'}")
    return folder


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A text of another kind."""
    folder = tmp_path_factory.mktemp("notes")
    for number in range(30):
        lines = [f"{n} times {number} is {n * number}.\n" for n in range(40)]
        (folder / f"{number}.txt").write_text("".join(lines))
    return f"--fdl.TEXT_FILES=['{folder}']"


@pytest.mark.parametrize("source", ["job", "hugging_face"])
def test_lora_trains_adapters_alone_and_learns(source: str, base: Path, notes: str, tmp_path: Path):
    folder = base if source == "job" else base / "exported"
    words = ["--exp=lm.llama.Llama7BLora", *SIZES, notes, "--fdl.LEARNING_RATE=0.01"]
    run(*words, f"--fdl.INIT_FROM={folder}", f"--job_log_dir={tmp_path}")
    before, after = leaves(base, 60), leaves(tmp_path, 60)
    adapters = {path for path in after if "lora_" in path}
    assert set(after) - adapters == set(before) and len(adapters) == 4
    for path, value in before.items():
        np.testing.assert_array_equal(after[path], value, err_msg=path)
    losses = [record["loss"] for record in metrics(tmp_path)]
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("name", ["FineTune", "FineTuneLora"])
def test_a_folder_of_hugging_face_is_fine_tuned(name: str, base: Path, notes: str, tmp_path: Path):
    run(
        f"--exp=lm.fine_tune.{name}",
        *SIZES,
        notes,
        "--fdl.TOKENIZER=bytes",
        "--fdl.LEARNING_RATE=0.01",
        f"--fdl.HF_FOLDER={base / 'exported'}",
        f"--job_log_dir={tmp_path}",
    )
    losses = [record["loss"] for record in metrics(tmp_path)]
    assert losses[-1] < losses[0] - 0.3


def leaves(folder: Path, step: int) -> dict[str, np.ndarray]:
    """The weights of a checkpoint, by path."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    directory = folder / "checkpoints"
    shapes = {
        path: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=device)
        for path, spec in stored_leaves(directory / f"checkpoint_{step:08d}" / "state").items()
    }
    with CheckpointManager(directory, read_only=True) as checkpoints:
        state = checkpoints.restore(step, unflatten_dict(shapes)).state
    return {
        "/".join(path): np.asarray(leaf) for path, leaf in flatten_dict(state["params"]).items()
    }
