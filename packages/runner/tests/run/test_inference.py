"""Evaluation and decoding of checkpoints: what is done, and when it ends.

Jobs side by side are the business of `test_checkpoint_watcher.py`.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from layerkit.errors import UserError
from layerkit_runner import UsageError, cli
from layerkit_runner.observers import metrics_path, read_metrics
from layerkit_runner.optim.early_stopping import EarlyStopping
from layerkit_runner.run.inference import CheckpointReader, run_inference
from layerkit_runner.run.job import start_job
from layerkit_runner.run.programs.build_programs import eval_programs
from layerkit_runner.run.resolve import resolve
from layerkit_runner.run.training_run import run_train
from layerkit_runner.run_options import RunOptions


@pytest.fixture(scope="module")
def gated() -> ModuleType:
    """The module of the experiment, as a process that starts beside it finds it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        import gated_experiment

        return gated_experiment


@pytest.fixture(scope="module")
def trained(gated: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished job of six steps, saved and evaluated at 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("trained") / "job"
    assert run_train(resolve(gated.Gated()), options(folder)) == 0
    return folder


@pytest.fixture
def job(trained: Path, tmp_path: Path) -> Path:
    """The same, to be spoilt."""
    return shutil.copytree(trained, tmp_path / "job")


def options(folder: Path, **more: Any) -> RunOptions:
    return RunOptions(job_log_dir=str(folder), jax_compilation_cache="off", **more)


@pytest.fixture
def infer(gated: ModuleType, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs a mode in a folder and returns what it printed."""

    def run(mode: str, folder: Path, *, resolved: Any = None, **more: Any) -> str:
        capsys.readouterr()
        resolved = resolved or resolve(gated.Gated())
        assert run_inference(mode, resolved, options(folder, **more)) == 0
        return capsys.readouterr().out

    return run


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"checkpoint_{step:08d}"


def record(folder: Path, step: int) -> Path:
    return folder / "eval" / "heldout" / f"step_{step:08d}.json"


def recorded(folder: Path, step: int) -> dict[str, float]:
    return json.loads(record(folder, step).read_text())["metrics"]


def by_training(folder: Path) -> dict[int, dict[str, float]]:
    names = ("loss", "total_weight")
    return {
        line["step"]: {name: line[name] for name in names}
        for line in read_metrics(folder).evals["heldout"]
    }


def test_a_finished_job_is_evaluated_once(infer: Any, gated: ModuleType, job: Path):
    said = infer("eval", job)
    loss = by_training(job)[6]["loss"]
    assert "step 6 is the newest; skipped older steps: 2, 4" in said
    assert f"heldout: loss {loss:.4f}" in said.splitlines()
    assert recorded(job, 6) == by_training(job)[6]
    (line,) = read_metrics(metrics_path(job, mode="eval")).evals["heldout"]
    assert (line["step"], line["loss"]) == (6, loss)

    assert infer("eval", job, resolved=resolve(gated.Gated(MAX_STEPS=9))).splitlines()[-1] == (
        "step 6 is the last: config.json of the training job has task.train.num_train_steps=6, this"
        " command 9"
    )


def test_steps_of_the_flag_are_evaluated(raises: Any, infer: Any, job: Path):
    with raises(UserError, field="--restore_checkpoint_step", value=3, choices=(2, 4, 6)):
        infer("eval_once", job, restore_checkpoint_step=(2, 3))
    assert not (job / "eval").exists()
    infer("eval_once", job, restore_checkpoint_step=(4, 2))
    for step in (2, 4):
        assert recorded(job, step) == by_training(job)[step]
    assert not record(job, 6).exists()


def test_each_checkpoint_is_evaluated_on_the_same_batches(
    infer: Any, gated: ModuleType, job: Path, tmp_path: Path
):
    resolved = resolve(gated.Gated())
    resolved.datasets[1].eval_loop_num_batches = 1
    infer("eval_once", job, resolved=resolved, restore_checkpoint_step=(4, 2))
    alone = shutil.copytree(job, tmp_path / "alone", ignore=shutil.ignore_patterns("eval"))
    infer("eval_once", alone, resolved=resolved, restore_checkpoint_step=(2,))
    assert recorded(alone, 2) == recorded(job, 2)


def test_records_are_replaced(infer: Any, gated: ModuleType, job: Path):
    resolved = resolve(gated.Gated())
    infer("eval_once", job, resolved=resolved)
    resolved.datasets[1].eval_loop_num_batches = 1
    infer("eval_once", job, resolved=resolved)
    assert recorded(job, 6)["total_weight"] == 8.0


def test_eval_during_decode_records_both(infer: Any, job: Path):
    shutil.rmtree(job / "decode")
    infer("decode_once", job, eval_during_decode=True, restore_checkpoint_step=(2, 6))
    outputs = {step: job / f"decode/prompts/step_{step:08d}.jsonl" for step in (2, 6)}
    scores = [json.loads(path.read_text().split("\n")[0])["log_prob"] for path in outputs.values()]
    assert scores[0] != scores[1]
    assert recorded(job, 2) == by_training(job)[2]


def test_wait_for_a_checkpoint_ends_after_the_timeout(
    raises: Any, infer: Any, gated: ModuleType, job: Path, capsys: pytest.CaptureFixture[str]
):
    folder = job / "checkpoints"
    shutil.rmtree(checkpoint(job, 6))
    # The last step in the folder takes precedence over that of this command.
    said = infer("eval", job, resolved=resolve(gated.Gated(MAX_STEPS=4)), follow_timeout_secs=1)
    assert said.splitlines()[-2:] == [
        f"waiting for a checkpoint after step 4 in {folder} (training ends at step 6)",
        f"found no new checkpoint in {folder} within --follow_timeout_secs=1; the last was step 4",
    ]
    shutil.rmtree(folder)
    (job / "config.json").unlink()
    with raises(UsageError, field="--follow_timeout_secs", value=1):
        infer("eval", job, follow_timeout_secs=1)
    waiting = f"waiting for the first checkpoint in {folder} (training ends at step 6)"
    assert waiting in capsys.readouterr().out
    with raises(UsageError, owner=str(folder)):
        infer("eval_once", job)


def test_checkpoint_of_step_0_is_evaluated(infer: Any, gated: ModuleType, tmp_path: Path):
    folder = tmp_path / "from_0"
    resolved = resolve(gated.Gated())
    resolved.task.train.save_step_zero = True
    assert run_train(resolved, options(folder)) == 0
    for step in (2, 4, 6):
        shutil.rmtree(checkpoint(folder, step))
    said = infer("eval", folder, resolved=resolved, follow_timeout_secs=1)
    assert "; the last was step 0" in said
    first, later = recorded(folder, 0), by_training(folder)[2]
    assert first["total_weight"] == later["total_weight"]
    assert first["loss"] > later["loss"]


def test_training_that_stopped_early_has_no_later_checkpoint(
    infer: Any, gated: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    resolved = resolve(gated.Gated(MAX_STEPS=20))
    resolved.task.early_stopping = EarlyStopping.HParams.config(
        metric="heldout/loss", patience=1, min_delta=1e6
    )
    assert run_train(resolved, options(tmp_path / "job")) == 0
    assert "next: print all settings\n" in capsys.readouterr().out
    said = infer("eval", tmp_path / "job", resolved=resolved, follow_timeout_secs=60)
    assert len(list((tmp_path / "job/eval/heldout").iterdir())) == 1
    last = said.splitlines()[-1]
    assert last == "step 4 is the last: early stopping ended the training job"


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_read(infer: Any, job: Path):
    spoil(checkpoint(job, 6))
    said = infer("eval", job, follow_timeout_secs=1)
    assert said.count("CHECKPOINT DAMAGED: step 6") == 1
    assert "waiting for a checkpoint after step 4" in said
    assert recorded(job, 4) == by_training(job)[4]
    assert checkpoint(job, 6).exists()  # it is the training job's to move


def spoil(folder: Path) -> None:
    files = [path for path in (folder / "state").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[0] ^= 1
    largest.write_bytes(content)


def test_checkpoint_deleted_while_it_is_verified_is_left_out(infer: Any, job: Path):
    file = next(path for path in (checkpoint(job, 4) / "state").rglob("*") if path.is_file())
    newer = checkpoint(job, 6).rename(job / "newer")

    def go_on_training(event: str, arguments: Any) -> None:
        if event == "open" and arguments[0] == str(file) and newer.exists():
            newer.rename(checkpoint(job, 6))
            file.unlink()

    sys.addaudithook(go_on_training)
    said = infer("eval", job)
    assert not file.exists()
    assert "DAMAGED" not in said
    assert recorded(job, 6) == by_training(job)[6]


def test_checkpoint_deleted_while_it_is_restored_is_left_out(
    raises: Any, gated: ModuleType, job: Path, capsys: pytest.CaptureFixture[str]
):
    started = start_job("eval", resolve(gated.Gated()), options(job))
    reader = CheckpointReader(started, eval_programs(started), [])
    with reader.open() as checkpoints:
        shutil.rmtree(checkpoint(job, 4))
        assert reader.process(checkpoints, 4) is False
        said = "the training job deleted step 4 while it was read; step 6 is the newest"
        assert said in capsys.readouterr().out
        shutil.rmtree(checkpoint(job, 6))
        with pytest.raises(UsageError):
            reader.process(checkpoints, 6)
    started.observers.close()


def test_flags_that_turn_off_evaluation_and_turn_on_decoding(
    raises: Any, gated: ModuleType, tmp_path: Path
):
    resolved = resolve(gated.Gated())
    flags = {"eval_on_test": False, "decode_during_train": True}
    assert run_train(resolved, options(tmp_path / "job", **flags)) == 0
    assert read_metrics(tmp_path / "job").evals == {}
    outputs = sorted(path.name for path in (tmp_path / "job/decode/prompts").glob("*.jsonl"))
    assert outputs == [f"step_0000000{step}.jsonl" for step in (2, 4, 6)]
    resolved.task.train.save_best_metric = "heldout/loss"
    with raises(UsageError, field="task.train.save_best_metric", value="heldout/loss"):
        run_train(resolved, options(tmp_path / "new", **flags))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("mode", ["eval", "decode"])
def test_mode_without_data_sets_is_an_error(
    raises: Any, infer: Any, gated: ModuleType, tmp_path: Path, mode: str
):
    resolved = resolve(gated.Gated())
    resolved.datasets.pop()
    resolved.decode_datasets.clear()
    owner = f"{resolved.name}.{'datasets' if mode == 'eval' else 'decode_datasets'}()"
    with raises(UsageError, owner=owner):
        infer(mode, tmp_path / "job", resolved=resolved)
    assert not (tmp_path / "job").exists()


def test_experiment_is_read_from_the_job_folder(
    gated: ModuleType, job: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.syspath_prepend(str(Path(gated.__file__ or "").parent))
    words = ["--mode=eval_once", f"--job_log_dir={job}", "--jax_compilation_cache=off"]
    assert cli.main(words) == 0
    said = capsys.readouterr()
    assert "--exp=gated_experiment.Gated" in said.err
    assert recorded(job, 6) == by_training(job)[6]
