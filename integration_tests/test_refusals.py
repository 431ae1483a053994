"""What cannot run is refused with one sentence and exit code 2, and nothing is written."""

from __future__ import annotations

import encodings
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from layerkit_runner import cli
from layerkit_runner.observers import read_metrics

EXP = "lm.lm_cloud.LmCloudSpmdTest"
NAME = "layerkit_experiments.lm.lm_cloud.LmCloudSpmdTest"
ON_8 = {"ICI_MESH_SHAPE": "[8,1,1]"}


def refusal(job: Any, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """What is said, without `runner: `; nothing may be written."""
    before = {path: path.stat().st_mtime_ns for path in job.folder.rglob("*")}
    assert job.run_here(*flags) == 2
    assert {path: path.stat().st_mtime_ns for path in job.folder.rglob("*")} == before
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("runner: ")
    return said.err.removeprefix("runner: ").rstrip("\n")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"ICI_MESH_SHAPE": "[1,4,1]"},
            "partitioner: the mesh needs 4 devices, but there are 8 (cpu): (ici_mesh_shape,"
            " dcn_mesh_shape)=([1, 4, 1], [1, 1, 1]). For these devices, use"
            " --fdl.ICI_MESH_SHAPE=[8,1,1]",
        ),
        (
            {"PERCORE_BATCH_SIZE": 0.25},
            "train: rows of the global batch=2. Expected a positive multiple of 8, the number of"
            " devices of data × fsdp.",
        ),
        (
            {"PERCORE_BATCH_SIZE": 0.3},
            "train: percore_batch_size=0.3. Expected an integer number of rows on 8 devices, not"
            " 2.4.",
        ),
        (
            {"CHECKPOINT_POLICY": "fulll"},
            f"{NAME}: StackedTransformerRepeated(lm/stack): remat='fulll'. Did you mean 'full'?",
        ),
        (
            {"ACTIVATION": "geluu"},
            "LmCloudSpmdTest: ACTIVATION='geluu'; did you mean 'gelu'? It is"
            " one of relu, gelu, gelu_exact, silu.",
        ),
        (
            {"FPROP_DTYPE": "bfloat15"},
            "LmCloudSpmdTest: FPROP_DTYPE='bfloat15'. Expected a dtype. Did you"
            " mean 'bfloat16' or 'float16'?",
        ),
        (
            {"FPROP_DTYPE": "int32"},
            "LmCloudSpmdTest: FPROP_DTYPE='int32' is not a floating dtype, such as bfloat16",
        ),
        (
            {"MODEL_DIMS": 0},
            "LmCloudSpmdTest: MODEL_DIMS=0 must be at least 1",
        ),
        (
            {"MAX_STEPS": 0},
            "LmCloudSpmdTest: MAX_STEPS=0: expected a positive integer",
        ),
        (
            {"NUM_LAYERS": -1, "SCALE_RESIDUAL_INIT": True},
            "LmCloudSpmdTest: NUM_LAYERS=-1 must be at least 1",
        ),
        (
            {"task.loss_name": "xentt"},
            f"{NAME}: task: loss_name='xentt'. Expected a metric of the model. Did you mean"
            " 'xent'?",
        ),
        (
            {"ICI_MESH_SHAPE": "[1,1,8]", "PERCORE_BATCH_SIZE": 0.125},
            f"{NAME}: .params['lm']['stack']['repeat']['sub']['attention']['key']['w']: cannot be"
            " split evenly: dimension 'kv_heads'=2. Expected a multiple of 8, the size of mesh axes"
            " ('tensor',). Use another mesh, another size, or"
            " ShardingRules.replace(kv_heads=None).",
        ),
        (
            {"ATTENTION_BACKEND": "cudnn", "ATTENTION_LOGIT_CAP": "None"},
            f"{NAME}: MultiHeadAttention(",
        ),
        (
            {"CHECKPOINT_EVERY_N_STEPS": 0},
            f"{NAME}: task.train: save_interval_steps=0. Expected a positive integer.",
        ),
        (
            {"DECAY_END": 8},
            f"{NAME}: linear_warmup_exponential_decay: (warmup_steps, decay_start, decay_end)=(4,"
            " 8, 8). Expected 0 <= warmup_steps <= decay_start < decay_end. A shorter run needs a"
            " shorter warmup, such as warmup_steps=1, decay_start=1. Flags: --fdl.WARMUP_STEPS=1"
            " --fdl.DECAY_START=1",
        ),
    ],
)
def test_fields_that_do_not_fit(
    jobs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: dict, text: str
):
    job = jobs.make(EXP, tmp_path / "job", **{**ON_8, **fields})
    # A layer that refuses is named after what it says.
    assert refusal(job, capsys).startswith(text)
    assert not job.folder.exists()


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--restore_checkpoint_dir=/nowhere"], "/nowhere/checkpoints: found no checkpoint"),
        (["--restore_checkpoint_step=3"], "--restore_checkpoint_step=(3,)"),
    ],
)
def test_flags_that_do_not_fit(
    jobs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], text: str
):
    assert text in refusal(jobs.make(EXP, tmp_path / "job", **ON_8), capsys, *flags)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"VOCAB_SIZE": 256},
            "LocalText: VOCAB_SIZE=256 is less than the 259 ids of"
            " TOKENIZER='bytes', special ones included",
        ),
        (
            # One position too many: 8 of the prompt, 9 after it.
            {"POSITIONS": "trainable", "MAX_DECODE_STEPS": 9},
            "LocalText: MAX_DECODE_STEPS=9 after prompts of 8 ids need 17"
            " positions, and POSITIONS='trainable' has MAX_SEQ_LEN=16",
        ),
        (
            {"datasets.1.batch_padding_size": 1},
            "heldout with batch_padding_size=1: rows of the global batch=9. Expected a positive"
            " multiple of 8, the number of devices of data × fsdp. Change batch_size or"
            " percore_batch_size of the input.",
        ),
    ],
)
def test_a_model_that_does_not_fit_its_data(
    jobs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: dict, text: str
):
    job = jobs.make("lm.quickstart.LocalText", tmp_path / "job", **fields)
    assert refusal(job, capsys) == text
    assert not job.folder.exists()


def test_a_folder_that_is_a_file(jobs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "job").write_text("mine")
    job = jobs.make(EXP, tmp_path / "job", **ON_8)
    assert f"--job_log_dir='{job.folder}'" in refusal(job, capsys)
    assert job.folder.read_text() == "mine"


@pytest.mark.slow
def test_what_a_run_recommends_is_not_refused(
    jobs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Each of the next commands runs as it is printed, also after overrides of what it changes."""
    fields = {
        "MAX_STEPS": 4,
        "PERCORE_BATCH_SIZE": 1.0,
        "ICI_MESH_SHAPE": "[8,1,1]",
        "TEXT_FILES": [str(Path(encodings.__file__).parent / "*.py")],
        "task.train.num_train_steps": 2,
        "task.model.lm_tpl.softmax_tpl.z_loss_weight": 0.1,
    }
    job = jobs.make("lm.quickstart.LocalText", tmp_path / "job", **fields)
    assert job.run_here() == 0
    output = capsys.readouterr().out
    # What is reported is the cross-entropy, and not the objective.
    (record,) = read_metrics(job.folder).evals["heldout"]
    assert record["loss"] > record["xent"] + 0.1
    assert f"heldout: xent {record['xent']:.4f} nats per byte = " in output
    inspect, longer, plan = (shlex.split(line)[1:] for line in output.splitlines()[-3:])
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
    assert "data 2 × fsdp 4 × tensor 1" in page


def test_text_that_is_not_there(jobs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    job = jobs.make(
        "lm.quickstart.LocalText", tmp_path / "job", TEXT_FILES="['/nowhere/*.txt']", NUM_HEADS=2
    )
    text = refusal(job, capsys)
    assert "nothing to read at '/nowhere/*.txt'" in text
    assert text.endswith("""Flags: --fdl.TEXT_FILES='["FILE_OR_PATTERN"]'""")


@pytest.fixture(scope="module")
def finished(jobs: Any, tmp_path_factory: Any) -> Any:
    job = jobs.make(EXP, tmp_path_factory.mktemp("finished") / "job", MAX_STEPS=2, **ON_8)
    assert job.run_here() == 0
    return job


def test_the_folder_of_another_experiment(
    finished: Any, jobs: Any, capsys: pytest.CaptureFixture[str]
):
    capsys.readouterr()
    other = jobs.make("lm.lm_cloud.LmCloudTransformerAdamLimitSteps", finished.folder)
    assert f"holds a run of {NAME}: --job_log_dir='{finished.folder}'" in refusal(other, capsys)


def test_a_checkpoint_of_another_size(finished: Any, jobs: Any, capsys: pytest.CaptureFixture[str]):
    capsys.readouterr()
    other = jobs.make(EXP, finished.folder, MAX_STEPS=2, HIDDEN_DIMS=64, **ON_8)
    said = refusal(other, capsys)
    assert "params/lm/stack/repeat/sub/feed_forward/down/w: shape [1, 32, 16]" in said
    assert said.startswith(
        f"{finished.folder} was written with other fields (recorded → now):\n"
        "  HIDDEN_DIMS: 32 → 64\n"
    )
    assert len(said.splitlines()) < 12  # few of the arrays that differ


def test_a_step_that_was_not_saved(
    finished: Any, jobs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    capsys.readouterr()
    job = jobs.make(EXP, tmp_path / "job", **ON_8)
    flags = [f"--restore_checkpoint_dir={finished.folder}", "--restore_checkpoint_step=7"]
    assert refusal(job, capsys, *flags) == (
        f"{finished.checkpoints} has no checkpoint of step 7; it has 2."
    )


def test_other_data_than_the_run_began_with(
    finished: Any, jobs: Any, capsys: pytest.CaptureFixture[str]
):
    capsys.readouterr()
    other = jobs.make(EXP, finished.folder, MAX_STEPS=4, MAX_SEQ_LEN=8, **ON_8)
    assert "seq_length was 16 and is 8" in refusal(other, capsys)


def test_changes_that_do_fit_are_reported(
    finished: Any, jobs: Any, capsys: pytest.CaptureFixture[str]
):
    capsys.readouterr()
    changed = jobs.make(EXP, finished.folder, MAX_STEPS=3, **ON_8)
    assert changed.run_here() == 0
    lines = capsys.readouterr().out.splitlines()
    begin = "changed since this folder was last written: "
    assert [line.removeprefix(begin) for line in lines if line.startswith(begin)] == [
        "task.train.num_train_steps: 2 → 3"
    ]
    recorded = json.loads((finished.folder / "config.json").read_text())
    assert recorded["fields"]["MAX_STEPS"] == 3


def test_run_without_saving_resumes_and_changes_no_checkpoint(
    finished: Any, jobs: Any, capsys: pytest.CaptureFixture[str]
):
    before = sorted(path.name for path in finished.checkpoints.iterdir())
    job = jobs.make(EXP, finished.folder, MAX_STEPS=5, **ON_8)
    capsys.readouterr()
    assert job.run_here("--noenable_checkpoint_saving") == 0
    assert "resuming from step" in capsys.readouterr().out
    assert sorted(path.name for path in finished.checkpoints.iterdir()) == before
