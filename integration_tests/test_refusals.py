"""Requests that cannot run: exit code 2, one error with its data, and no file written.

The packages assert each rule; the tables here have one case of each package and way of failing.
"""

from __future__ import annotations

import encodings
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from layerkit import errors
from layerkit_runner import cli
from layerkit_runner.observers import read_metrics

EXP = "lm.lm_cloud.LmCloudSpmdTest"
TEXT = "lm.quickstart.LocalText"
ON_8 = {"ICI_MESH_SHAPE": "[8,1,1]"}
NO_EVALUATION = {"task.train.eval_at_end": False}
DATA = "--fdl.datasets.0"
MESH = "--fdl.partitioner.ici_mesh_shape"

Refusal = Callable[..., errors.UserError]


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Return a function that runs a job, and returns the error of which it prints the message."""
    rendered: list[errors.UserError] = []
    render = errors.render

    def record(error: errors.UserError) -> str:
        rendered.append(error)
        return render(error)

    monkeypatch.setattr(errors, "render", record)

    def run(job: Any, *flags: str) -> errors.UserError:
        before = {path: path.stat().st_mtime_ns for path in job.folder.rglob("*")}
        capsys.readouterr()
        assert job.run_here(*flags) == 2
        assert {path: path.stat().st_mtime_ns for path in job.folder.rglob("*")} == before
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err == f"runner: {render(rendered[-1])}\n"
        return rendered[-1]

    return run


def assert_names(
    error: errors.UserError,
    *,
    field: str | None = None,
    value: Any = errors.MISSING,
    near: str | None = None,
) -> None:
    """Check the field and value of an error, and that it says what to do."""
    place = ": ".join(filter(None, (error.owner, error.field)))
    assert field is None or place.lower().endswith(field), str(error)
    assert value is errors.MISSING or error.value == value, str(error)
    if near is not None:
        assert errors.find_near_names(str(error.value), map(str, error.choices))[0] == near
    assert error.problem or error.expected or error.choices or error.settings, str(error)


@pytest.mark.parametrize(
    ("exp", "fields", "data"),
    [
        # Fields of experiments.
        (EXP, {"NUM_LAYRES": 2}, {"value": "NUM_LAYRES", "near": "NUM_LAYERS"}),
        (EXP, {"NUM_LAYERS": "two"}, {"field": "num_layers", "value": "two"}),
        (EXP, {"MODEL_DIMS": 0}, {"field": "model_dims", "value": 0}),
        (EXP, {"ACTIVATION": "geluu"}, {"value": "geluu", "near": "gelu"}),
        (EXP, {"FPROP_DTYPE": "int32"}, {"value": "int32"}),
        (EXP, {"MAX_STEPS": 0}, {"value": 0}),
        # Paths into configs.
        (EXP, {"task.model.lm_tpl.num_layerz": 2}, {"value": "num_layerz", "near": "num_layers"}),
        (EXP, {"tsk.model": 2}, {"value": "tsk", "near": "task"}),
        (EXP, {"task.train.num_train_steps": "x"}, {"field": "num_train_steps", "value": "x"}),
        # Fields of layers, and what their devices cannot run.
        (EXP, {"CHECKPOINT_POLICY": "fulll"}, {"field": "remat", "value": "fulll", "near": "full"}),
        (EXP, {"ATTENTION_BACKEND": "cudnn", "ATTENTION_LOGIT_CAP": "None"}, {"value": "cudnn"}),
        (EXP, {"ICI_MESH_SHAPE": "[1,1,8]", "PERCORE_BATCH_SIZE": 0.125}, {}),
        # Fields of the task, the data and the partitioner.
        (EXP, {"CHECKPOINT_EVERY_N_STEPS": 0}, {"field": "save_interval_steps", "value": 0}),
        (EXP, {"PERCORE_BATCH_SIZE": 0.25}, {"field": f"{DATA}.percore_batch_size", "value": 0.25}),
        (EXP, {"PERCORE_BATCH_SIZE": 0.3}, {"field": f"{DATA}.percore_batch_size", "value": 0.3}),
        (EXP, {"ICI_MESH_SHAPE": "[1,4,1]"}, {"field": MESH, "value": [1, 4, 1]}),
        # Models that do not fit their data; one position too many: 8 of the prompt, 9 after it.
        (TEXT, {"VOCAB_SIZE": 256}, {}),
        (TEXT, {"POSITIONS": "trainable", "MAX_DECODE_STEPS": 9}, {}),
        # Files.
        (TEXT, {"TEXT_FILES": "['/nowhere/*.txt']"}, {"value": "/nowhere/*.txt"}),
        (TEXT, {"TOKENIZER": "/nowhere/t.json"}, {"value": "/nowhere/t.json"}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_wrong_field_is_an_error(
    refusal: Refusal, jobs: Any, tmp_path: Path, exp: str, fields: dict, data: dict[str, Any]
):
    job = jobs.make(exp, tmp_path / "job", **({**ON_8, **fields} if exp == EXP else fields))
    assert_names(refusal(job), **data)
    assert not job.folder.exists()


@pytest.mark.parametrize(
    ("content", "data"),
    [
        (b"", {}),
        (b"caf\xe9 au lait " * 100, {}),
    ],
    ids=["empty", "latin-1"],
)
def test_unreadable_text_file_is_an_error(
    refusal: Refusal, jobs: Any, tmp_path: Path, content: bytes, data: dict[str, Any]
):
    (tmp_path / "text.txt").write_bytes(content)
    job = jobs.make(TEXT, tmp_path / "job", TEXT_FILES=f"['{tmp_path}/text.txt']")
    assert_names(refusal(job), **data)


@pytest.mark.parametrize(
    ("flag", "data"),
    [
        ("--restore_checkpoint_dir=/nowhere", {"field": "/nowhere/checkpoints"}),
        ("--restore_checkpoint_step=3", {"field": "--restore_checkpoint_step", "value": (3,)}),
        (
            "--restore_cast_dtype",
            {"value": "--restore_cast_dtype", "near": "--restore_cast_dtypes"},
        ),
        ("--init_from=/nowhere", {"value": "/nowhere"}),
        ("--mode=evil", {"field": "--mode", "value": "evil", "near": "eval"}),
    ],
)
def test_wrong_flag_is_an_error(
    refusal: Refusal, jobs: Any, tmp_path: Path, flag: str, data: dict[str, Any]
):
    assert_names(refusal(jobs.make(EXP, tmp_path / "job", **ON_8), flag), **data)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("class Mine(:\n", "mine.py:1"),
        ("import nowhere\n", "mine"),
        ("x = undefined\n", "mine.py:1"),
        ("from layerkit_runner import BaseExperiment\n\nclass Mine(BaseExperiment):\n  N = 1\n", 3),
    ],
    ids=["syntax", "import", "undefined name", "undeclared field"],
)
def test_module_that_fails_is_an_error(
    refusal: Refusal,
    jobs: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    place: str | int,
):
    name = f"mine_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    error = refusal(jobs.make(f"{name}.Mine", tmp_path / "job"))
    place = f"{name}.py:3" if place == 3 else str(place).replace("mine", name)
    assert place in str(error.owner)


def test_job_folder_that_is_a_file_is_an_error(refusal: Refusal, jobs: Any, tmp_path: Path):
    (tmp_path / "job").write_text("mine")
    job = jobs.make(EXP, tmp_path / "job", **ON_8)
    assert_names(refusal(job), field="--job_log_dir", value=str(job.folder))
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
    lines = output.replace("\\\n", "").splitlines()[-2:]
    inspect, longer = (shlex.split(line)[1:] for line in lines)
    assert cli.main(inspect) == 0
    assert "task.train.num_train_steps = 2\n" in capsys.readouterr().out
    assert cli.main([*longer, "--mode=inspect"]) == 0
    printed = capsys.readouterr().out
    assert "task.train.num_train_steps = 4\n" in printed
    # The schedule ends with the run.
    assert "task.train.learner.learning_rate.decay_end = 4\n" in printed


@pytest.fixture(scope="module")
def finished(jobs: Any, tmp_path_factory: Any) -> Any:
    job = jobs.make(
        EXP, tmp_path_factory.mktemp("finished") / "job", MAX_STEPS=2, **ON_8, **NO_EVALUATION
    )
    assert job.run_here() == 0
    return job


@pytest.mark.parametrize(
    ("exp", "fields", "texts"),
    [
        ("lm.lm_cloud.LmCloudTransformerAdamLimitSteps", {}, [EXP]),
        # Few of the arrays that differ, and the fields that explain it.
        (
            EXP,
            {"HIDDEN_DIMS": 64},
            [
                "  HIDDEN_DIMS: 32 → 64\n",
                "/lm/stack/repeat/sub/feed_forward/up/w: shape [1, 16, 32]",
            ],
        ),
        (EXP, {"MAX_STEPS": 4, "MAX_SEQ_LEN": 8}, ["seq_length"]),
    ],
)
def test_folder_of_another_experiment_model_or_data_set_is_an_error(
    finished: Any, refusal: Refusal, jobs: Any, exp: str, fields: dict, texts: list[str]
):
    size = {} if exp != EXP else {"MAX_STEPS": 2, **ON_8, **fields}
    message = str(refusal(jobs.make(exp, finished.folder, **size)))
    assert all(text in message for text in texts)
    assert len(message.splitlines()) < 12


def test_step_that_was_not_saved_is_an_error(
    finished: Any, refusal: Refusal, jobs: Any, tmp_path: Path
):
    job = jobs.make(EXP, tmp_path / "job", **ON_8)
    flags = [f"--restore_checkpoint_dir={finished.folder}", "--restore_checkpoint_step=7"]
    message = str(refusal(job, *flags))
    assert str(finished.checkpoints) in message and "step 7" in message


def test_run_without_saving_resumes_reports_changes_and_writes_no_checkpoint(
    finished: Any, jobs: Any, capsys: pytest.CaptureFixture[str]
):
    before = sorted(path.name for path in finished.checkpoints.iterdir())
    job = jobs.make(EXP, finished.folder, MAX_STEPS=5, **ON_8, **NO_EVALUATION)
    capsys.readouterr()
    assert job.run_here("--noenable_checkpoint_saving") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("resuming from step") for line in lines)
    changed = "changed since this folder was last written: task.train.num_train_steps: 2 → 5"
    assert [line for line in lines if line.startswith("changed since")] == [changed]
    assert sorted(path.name for path in finished.checkpoints.iterdir()) == before
