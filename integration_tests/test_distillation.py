"""A small student of text learns from the model of an earlier job, by the command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from layerkit.config import build
from layerkit.interop.hugging_face import import_model
from layerkit_experiments.lm.distill import Distilled
from layerkit_experiments.lm.quickstart import LocalText
from layerkit_inputs.base.errors import MissingFileError
from layerkit_runner import cli
from layerkit_runner.errors import UsageError
from layerkit_runner.run.resolve import resolve
from layerkit_runner.run_options import RunOptions
from layerkit_runner.tools import top_logits

pytest.importorskip("safetensors")

SIZES = {"NUM_HEADS": 2, "NUM_KV_HEADS": 1, "MAX_SEQ_LEN": 32, "PERCORE_BATCH_SIZE": 1.0}
RUN = {"WARMUP_STEPS": 2, "SUMMARY_INTERVAL_STEPS": 1, "NUM_PROMPTS": 8, "PROMPT_LENGTH": 8}
TEACHER = {"NUM_LAYERS": 2, "MODEL_DIMS": 32, "HIDDEN_DIMS": 64, "MAX_STEPS": 60}
SMALL = {"NUM_LAYERS": 1, "MODEL_DIMS": 16, "HIDDEN_DIMS": 32, "MAX_DECODE_STEPS": 4}
Train = Callable[..., list[dict[str, Any]]]


class Student(Distilled, LocalText):
    """A model of bytes, which learns from another one."""


STUDENT = f"{__name__}.Student"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text in which a word determines the next one."""
    folder = tmp_path_factory.mktemp("distillation")
    words = ["anna likes tea", "ben likes cake", "carl likes rice", "dora likes fish", ""]
    order = np.random.default_rng(0).integers(0, 4, 4000)
    (folder / "text.txt").write_text("\n".join(words[i] for i in order))
    return folder


@pytest.fixture(scope="module")
def train(folder: Path, jobs: Any) -> Train:
    """A function that trains an experiment in a folder of this name; it returns the records."""

    def run(name: str, exp: str, *words: str, **fields: Any) -> list[dict[str, Any]]:
        fields = {"TEXT_FILES": [str(folder / "text.txt")], **SIZES, **RUN, **fields}
        flags = [f"--fdl.{field}={value}" for field, value in fields.items()]
        job = folder / name
        command = [f"--exp={exp}", *flags, *words, f"--job_log_dir={job}"]
        assert cli.main([*command, f"--jax_compilation_cache={jobs.cache}"]) == 0
        return [json.loads(line) for line in (job / "metrics.jsonl").read_text().splitlines()]

    return run


@pytest.fixture(scope="module")
def teacher(folder: Path, train: Train) -> Path:
    train("teacher", "lm.quickstart.LocalText", **TEACHER)
    return folder / "teacher"


def fields_of(teacher: Path, **fields: Any) -> dict[str, Any]:
    return {**SMALL, "TEACHER": str(teacher), "MAX_STEPS": 6, **fields}


def losses(records: list[dict[str, Any]]) -> list[float]:
    return [r["loss"] for r in records if "loss" in r and "dataset" not in r]


def weights_of(jobs: Any, job: Path, step: int) -> dict[str, np.ndarray]:
    return jobs.read_checkpoint(SimpleNamespace(checkpoints=job / "checkpoints"), step).leaves


@pytest.mark.slow
def test_student_approaches_its_teacher_and_is_exported_alone(
    folder: Path, train: Train, teacher: Path, jobs: Any
):
    fields = fields_of(teacher, MAX_STEPS=120, EVAL_INTERVAL_STEPS=1, LEARNING_RATE=1e-2)
    records = train("student", STUDENT, **fields)
    divergences = [r["divergence"] for r in records if r.get("dataset") == "heldout"]
    assert divergences[-1] < 0.2 * divergences[0]
    saved, expected = weights_of(jobs, folder / "student", 120), weights_of(jobs, teacher, 60)
    names = [name for name in saved if name.startswith("['params']['teacher']")]
    assert len(names) == 11
    for name in names:
        np.testing.assert_array_equal(saved[name], expected[name.replace("teacher", "lm")])
    exported = folder / "exported"
    words = [f"--job_log_dir={folder / 'student'}", "--mode=export", f"--export_dir={exported}"]
    assert cli.main(words) == 0
    model, variables = import_model(exported)
    assert build(model).lm_tpl.model_dims == SMALL["MODEL_DIMS"]
    assert len(jax.tree.leaves(variables)) == 11


def write_tokens(teacher: Path, folder: Path, k: int, **fields: Any) -> Path:
    text = [str(folder / "text.txt")]
    fields = fields_of(teacher, TEXT_FILES=text, TEACHER_LOGITS=str(folder / f"top{k}"), **fields)
    resolved = resolve(Student(**SIZES, **RUN, **fields))
    assert top_logits.write_top_logits(resolved, RunOptions(extra={"k": k})) == 0
    return folder / f"top{k}"


@pytest.mark.slow
def test_a_schedule_free_teacher_is_not_read_in_silence(
    folder: Path, train: Train, capfd: pytest.CaptureFixture, raises: Any
):
    train("free", "lm.quickstart.LocalText", **SMALL, MAX_STEPS=2, OPTIMIZER="schedule_free")
    free = folder / "free"
    with raises(UsageError, field="TEACHER", value=str(free)):
        write_tokens(free, folder, 3)
    capfd.readouterr()
    train("pupil", STUDENT, **fields_of(free, MAX_STEPS=1))
    assert "free/checkpoints:2 is of a schedule-free optimizer" in capfd.readouterr().out


@pytest.mark.slow
def test_stored_tokens_equal_the_live_teacher_and_stale_ones_raise(
    folder: Path, train: Train, teacher: Path, raises: Any, tmp_path: Path
):
    stored = write_tokens(teacher, folder, 259)
    fields = fields_of(teacher, KL_BETA=0.5)
    live = train("live", STUDENT, **fields)
    read = train("read", STUDENT, TEACHER_LOGITS=stored, **fields)
    np.testing.assert_allclose(losses(read), losses(live), rtol=1e-4)
    other = tmp_path / "teacher"
    shutil.copytree(teacher, other)
    about = next((other / "checkpoints").glob("*/integrity/*.json"))
    about.write_text(about.read_text().replace('"digest": "', '"digest": "0'))
    for changes in (
        {"MAX_SEQ_LEN": 16},
        {"KL_TEMPERATURE": 2.0},
        {"TEACHER": str(other)},
        {"VOCAB_SIZE": 272, "TEACHER_LOGITS": str(tmp_path)},
    ):
        words = {**fields, "TEACHER_LOGITS": stored, **changes}
        with raises((UsageError, MissingFileError), field="file"):
            _open(folder, words)


def _open(folder: Path, fields: dict[str, Any]) -> None:
    """Read a row of the training data of an experiment."""
    values = {**SIZES, **RUN, "TEXT_FILES": [str(folder / "text.txt")], **fields}
    values["TEACHER_LOGITS"] = str(values["TEACHER_LOGITS"])
    config = resolve(Student(**values)).datasets[0]
    config.clone().set(batch_size=1).Instantiate().get_next()


def test_teacher_with_another_tokenizer_raises_before_files_are_written(
    folder: Path, train: Train, raises: Any
):
    fields = {**SMALL, "MAX_STEPS": 1, "task.train.eval_at_end": False}
    train("of_bytes", "lm.quickstart.LocalText", **fields)
    teacher = folder / "of_bytes"
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"<s>": 0, "tea": 1}, unk_token="<s>")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    fields = fields_of(teacher, TOKENIZER=str(folder / "tokenizer.json"), EOS_ID=None)
    with raises(UsageError, field="TEACHER", value=str(teacher)):
        resolve(Student(**SIZES, **RUN, **fields))


@pytest.mark.slow
def test_resumed_run_with_samples_and_features_equals_the_uninterrupted_one(
    folder: Path, train: Train, teacher: Path, jobs: Any, capsys: pytest.CaptureFixture[str]
):
    fields = fields_of(
        teacher, ON_POLICY_FRACTION=0.5, KL_BETA=1.0, FEATURES={0: 1}, CHECKPOINT_EVERY_N_STEPS=3
    )
    train("whole", STUDENT, **fields)
    shutil.copytree(folder / "whole", folder / "resumed")
    (last,) = (folder / "resumed" / "checkpoints").glob("*06")
    shutil.rmtree(last)
    for record in (folder / "resumed" / "checkpoints").glob("*.json"):
        record.unlink()
    train("resumed", STUDENT, "--allow_restart_from_scratch", **fields)
    assert "resuming from step 3" in capsys.readouterr().out
    whole, resumed = (weights_of(jobs, folder / name, 6) for name in ("whole", "resumed"))
    for name, value in whole.items():
        assert value.tobytes() == resumed[name].tobytes(), name


@pytest.mark.slow
def test_sharded_networks_compute_as_replicated_ones(folder: Path, train: Train, teacher: Path):
    fields = fields_of(teacher, ON_POLICY_FRACTION=0.5, KL_BETA=0.5, FEATURES={0: 1}, ALPHA=0.7)
    replicated = train("replicated", STUDENT, **fields)
    sharded = train(
        "sharded",
        STUDENT,
        ICI_MESH_SHAPE=[2, 2, 2],
        TEACHER_RULES={"embed": "data", "mlp": None},
        **fields,
    )
    np.testing.assert_allclose(losses(sharded), losses(replicated), rtol=1e-3)
