"""Tests of requests that cannot run: exit code 2, one error message, and no file written.

The packages assert each rule; these tests run one case of each package and way of failing.
"""

from __future__ import annotations

import encodings
import shlex
from pathlib import Path
from typing import Any

import pytest

from layerkit_runner import cli
from layerkit_runner.observers import read_metrics

EXP = "lm.lm_cloud.LmCloudSpmdTest"
NAME = "layerkit_experiments.lm.lm_cloud.LmCloudSpmdTest"
ON_8 = {"ICI_MESH_SHAPE": "[8,1,1]"}


def error_of(job: Any, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """Return the printed error of a run that fails with exit code 2 and writes nothing."""
    before = {path: path.stat().st_mtime_ns for path in job.folder.rglob("*")}
    capsys.readouterr()
    assert job.run_here(*flags) == 2
    assert {path: path.stat().st_mtime_ns for path in job.folder.rglob("*")} == before
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("runner: ")
    return printed.err


@pytest.mark.parametrize(
    ("fields", "owner", "value"),
    [
        # Fields of experiments.
        ({"MODEL_DIMS": 0}, "LmCloudSpmdTest", "MODEL_DIMS=0"),
        ({"ACTIVATION": "geluu"}, "LmCloudSpmdTest", "ACTIVATION='geluu'"),
        ({"FPROP_DTYPE": "int32"}, "LmCloudSpmdTest", "FPROP_DTYPE='int32'"),
        ({"MAX_STEPS": 0}, "LmCloudSpmdTest", "MAX_STEPS=0"),
        ({"NUM_LAYERS": -1, "SCALE_RESIDUAL_INIT": True}, "LmCloudSpmdTest", "NUM_LAYERS=-1"),
        # Fields of layers, and what their devices cannot run.
        ({"CHECKPOINT_POLICY": "fulll"}, "StackedTransformerRepeated(lm/stack)", "remat='fulll'"),
        ({"ATTENTION_BACKEND": "cudnn", "ATTENTION_LOGIT_CAP": "None"}, "attention", "cudnn"),
        ({"ICI_MESH_SHAPE": "[1,1,8]", "PERCORE_BATCH_SIZE": 0.125}, "'output'", "'heads'=2"),
        # Fields of the task, the data and the partitioner.
        ({"CHECKPOINT_EVERY_N_STEPS": 0}, "LmCloudSpmdTest", "--fdl.CHECKPOINT_EVERY_N_STEPS=0"),
        ({"DECAY_END": 8}, "linear_warmup_exponential_decay", "(4, 8, 8)"),
        ({"PERCORE_BATCH_SIZE": 0.25}, "train", "rows of the global batch=2"),
        ({"PERCORE_BATCH_SIZE": 0.3}, "train", "--fdl.PERCORE_BATCH_SIZE=0.3"),
        ({"ICI_MESH_SHAPE": "[1,4,1]"}, "partitioner", "--fdl.ICI_MESH_SHAPE='[8,1,1]'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_invalid_field_is_an_error(
    jobs: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    fields: dict,
    owner: str,
    value: str,
):
    job = jobs.make(EXP, tmp_path / "job", **{**ON_8, **fields})
    error = error_of(job, capsys)
    assert owner in error
    assert value in error
    assert not job.folder.exists()


@pytest.mark.parametrize(
    ("fields", "value"),
    [
        ({"VOCAB_SIZE": 256}, "VOCAB_SIZE=256"),
        # One position too many: 8 of the prompt, 9 after it.
        ({"POSITIONS": "trainable", "MAX_DECODE_STEPS": 9}, "MAX_DECODE_STEPS=9"),
        ({"TEXT_FILES": "['/nowhere/*.txt']"}, "--fdl.TEXT_FILES="),
    ],
    ids=["vocabulary", "positions", "files"],
)
def test_model_that_does_not_fit_its_data_is_an_error(
    jobs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: dict, value: str
):
    job = jobs.make("lm.quickstart.LocalText", tmp_path / "job", **fields)
    assert value in error_of(job, capsys)
    assert not job.folder.exists()


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--restore_checkpoint_dir=/nowhere", "/nowhere/checkpoints"),
        ("--restore_checkpoint_step=3", "--restore_checkpoint_step="),
    ],
)
def test_invalid_flag_is_an_error(
    jobs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, value: str
):
    assert value in error_of(jobs.make(EXP, tmp_path / "job", **ON_8), capsys, flag)


def test_job_folder_that_is_a_file_is_an_error(
    jobs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "job").write_text("mine")
    job = jobs.make(EXP, tmp_path / "job", **ON_8)
    assert f"--job_log_dir='{job.folder}'" in error_of(job, capsys)
    assert job.folder.read_text() == "mine"


@pytest.mark.slow
def test_printed_next_commands_run(jobs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Run each of the printed commands, after overrides of the fields that they change."""
    fields = {
        "MAX_STEPS": 4,
        "PERCORE_BATCH_SIZE": 1.0,
        "ICI_MESH_SHAPE": "[4,2,1]",
        "TEXT_FILES": [str(Path(encodings.__file__).parent / "*.py")],
        "task.train.num_train_steps": 2,
        "task.model.lm_tpl.softmax_tpl.z_loss_weight": 0.1,
    }
    job = jobs.make("lm.quickstart.LocalText", tmp_path / "job", **fields)
    assert job.run_here() == 0
    output = capsys.readouterr().out
    # The reported metric is the cross-entropy without the z-loss.
    (record,) = read_metrics(job.folder).evals["heldout"]
    assert record["loss"] > record["xent"] + 0.1
    assert f"heldout: xent {record['xent']:.4f} nats per byte = " in output
    # Long commands are wrapped as a shell reads them.
    lines = output.replace("\\\n", "").splitlines()[-3:]
    inspect, longer, plan = (shlex.split(line)[1:] for line in lines)
    assert cli.main(inspect) == 0
    assert "task.train.num_train_steps = 2\n" in capsys.readouterr().out
    assert cli.main([*longer, "--mode=inspect"]) == 0
    printed = capsys.readouterr().out
    assert "task.train.num_train_steps = 4\n" in printed
    # The schedule ends with the run.
    assert "task.train.learner.learning_rate.decay_end = 4\n" in printed
    process = job.start_with(plan)
    page, _ = process.communicate(timeout=300)
    assert process.returncode == 0, page
    assert "data 8 × fsdp 1 × tensor 1" in page


@pytest.fixture(scope="module")
def finished(jobs: Any, tmp_path_factory: Any) -> Any:
    job = jobs.make(EXP, tmp_path_factory.mktemp("finished") / "job", MAX_STEPS=2, **ON_8)
    assert job.run_here() == 0
    return job


def test_folder_of_another_experiment_is_an_error(
    finished: Any, jobs: Any, capsys: pytest.CaptureFixture[str]
):
    other = jobs.make("lm.lm_cloud.LmCloudTransformerAdamLimitSteps", finished.folder)
    error = error_of(other, capsys)
    assert NAME in error
    assert f"--job_log_dir='{finished.folder}'" in error


def test_checkpoint_of_another_size_is_an_error(
    finished: Any, jobs: Any, capsys: pytest.CaptureFixture[str]
):
    error = error_of(jobs.make(EXP, finished.folder, MAX_STEPS=2, HIDDEN_DIMS=64, **ON_8), capsys)
    assert "  HIDDEN_DIMS: 32 → 64\n" in error
    assert "/lm/stack/repeat/sub/feed_forward/up/w: shape [1, 16, 32]" in error
    assert len(error.splitlines()) < 12  # few of the arrays that differ


def test_step_that_was_not_saved_is_an_error(
    finished: Any, jobs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    job = jobs.make(EXP, tmp_path / "job", **ON_8)
    flags = [f"--restore_checkpoint_dir={finished.folder}", "--restore_checkpoint_step=7"]
    error = error_of(job, capsys, *flags)
    assert str(finished.checkpoints) in error
    assert "step 7" in error


def test_other_data_than_that_of_the_checkpoint_is_an_error(
    finished: Any, jobs: Any, capsys: pytest.CaptureFixture[str]
):
    other = jobs.make(EXP, finished.folder, MAX_STEPS=4, MAX_SEQ_LEN=8, **ON_8)
    assert "seq_length" in error_of(other, capsys)


def test_run_without_saving_resumes_reports_changes_and_writes_no_checkpoint(
    finished: Any, jobs: Any, capsys: pytest.CaptureFixture[str]
):
    before = sorted(path.name for path in finished.checkpoints.iterdir())
    job = jobs.make(EXP, finished.folder, MAX_STEPS=5, **ON_8)
    capsys.readouterr()
    assert job.run_here("--noenable_checkpoint_saving") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("resuming from step") for line in lines)
    changed = "changed since this folder was last written: task.train.num_train_steps: 2 → 5"
    assert [line for line in lines if line.startswith("changed since")] == [changed]
    assert sorted(path.name for path in finished.checkpoints.iterdir()) == before
