"""`runner scaling` on LocalText: rungs, their fit, a prediction of a larger run, and its grade."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layerkit_experiments.lm.optimal_scaling import DepthDial
from layerkit_experiments.lm.quickstart import LocalText
from layerkit_runner import cli
from layerkit_runner.errors import UsageError
from layerkit_runner.observers import read_metrics
from layerkit_runner.run.resolve import resolve
from layerkit_runner.tools.scaling.command import run_scaling
from layerkit_runner.tools.scaling.ladder import Size, repeat_with_seeds, step_size
from layerkit_runner.tools.sweep import read_study_file

EXP = "--exp=lm.quickstart.LocalText"


class Decayed(LocalText):
    """LocalText with a decay between two steps."""

    DECAY_START = 400
    DECAY_END = 1000


@pytest.mark.parametrize(
    ("experiment", "size", "fields"),
    [
        # 2 heads of 2·20 dimensions; √(80/128) = 0.7906; 200 of 2000 steps.
        (
            LocalText(),
            20,
            {"MODEL_DIMS": 80, "HIDDEN_DIMS": 320, "LEARNING_RATE": 0.00253, "WARMUP_STEPS": 0.1}
            | {"PERCORE_BATCH_SIZE": 4},  # 8 · 0.625^1.3 = 4.34
        ),
        (
            LocalText(DIMS_PER_HEAD=64, NUM_HEADS=4, NUM_KV_HEADS=2, MODEL_DIMS=256),
            6,
            {"MODEL_DIMS": 384, "HIDDEN_DIMS": 768, "NUM_HEADS": 6, "NUM_KV_HEADS": 3}
            | {"LEARNING_RATE": 0.001633, "WARMUP_STEPS": 0.1}
            | {"PERCORE_BATCH_SIZE": 14},  # 8 · 1.5^1.3 = 13.6
        ),
        (
            # Of MODEL_DIMS=128, whose 12 heads have 1.5 times as many dimensions: half of all.
            LocalText(DIMS_PER_HEAD=16, NUM_HEADS=12, NUM_KV_HEADS=4, DECAY_END=500),
            4,
            {"MODEL_DIMS": 64, "HIDDEN_DIMS": 256, "NUM_HEADS": 6, "NUM_KV_HEADS": 2}
            | {"LEARNING_RATE": 0.002828, "WARMUP_STEPS": 0.1, "DECAY_END": 0.25}
            | {"PERCORE_BATCH_SIZE": 3},  # 8 · 0.5^1.3 = 3.25
        ),
        (
            # As many key heads as heads, and a decay beyond the run.
            LocalText(DIMS_PER_HEAD=32, NUM_HEADS=6, NUM_KV_HEADS=None, DECAY_END=300_000),
            3,
            {"MODEL_DIMS": 96, "HIDDEN_DIMS": 384, "NUM_HEADS": 4, "NUM_KV_HEADS": 4}
            | {"LEARNING_RATE": 0.002309, "WARMUP_STEPS": 0.1, "DECAY_END": 300_000}
            | {"PERCORE_BATCH_SIZE": 6},  # 8 · 0.75^1.3 = 5.5
        ),
        (DepthDial(), 8, {"DEPTH": 8}),
        *(
            # DECAY_START and DECAY_END are those of the class, and nothing reads them.
            (
                Decayed(**{field: value}),
                12,
                {"MODEL_DIMS": 48, "HIDDEN_DIMS": 192, "LEARNING_RATE": 0.003266}
                | {"WARMUP_STEPS": 0.1, "PERCORE_BATCH_SIZE": 2},  # 8 · 0.375^1.3 = 2.2
            )
            for field, value in (
                ("LEARNING_RATE_SCHEDULE", "inverse_sqrt"),
                ("OPTIMIZER", "schedule_free"),
            )
        ),
    ],
    ids=[
        "constant heads",
        "heads of one size",
        "more heads than MODEL_DIMS",
        "no groups",
        "DepthDial",
        "schedule without a decay",
        "optimizer that keeps the rate",
    ],
)
def test_size_fields_give_a_model_that_resolves(experiment, size, fields):
    assert experiment.size_fields(size) == fields
    resolve(type(experiment)(**{**experiment.overrides, **fields}))


def test_seeds_differ_in_initial_weights_and_in_the_order_of_the_data():
    base, size = resolve(LocalText(SEED=5)), Size(10, 20.0, 30.0)
    rungs = repeat_with_seeds((size, {"MODEL_DIMS": 64}), base, num_seeds=3)
    more = [{"task.train.random_seed": 5 + i, "datasets.0.input_random_seed": i} for i in range(3)]
    assert rungs == [(size, {"MODEL_DIMS": 64} | (more[i] if i else {})) for i in range(3)]


def words_of(fields: dict[str, Any], folder: Path) -> list[str]:
    return [EXP, f"--job_log_dir={folder}", *(f"--fdl.{n}={v}" for n, v in fields.items())]


@pytest.mark.slow
def test_ladder_is_planned_run_fitted_predicted_and_graded(tmp_path, capsys, raises):
    random = np.random.default_rng(0)
    corpus = tmp_path / "words.txt"
    lines = random.choice(["alpha", "beta", "gamma", "x", "y"], (8000, 8))
    corpus.write_text("\n".join(map(" ".join, lines)))
    job = tmp_path / "job"
    small = {"MAX_SEQ_LEN": 16, "NUM_LAYERS": 1, "PROMPT_LENGTH": 4, "MAX_DECODE_STEPS": 4}
    small |= {"EVAL_INTERVAL_STEPS": None, "PERCORE_BATCH_SIZE": 1.0, "TEXT_FILES": [str(corpus)]}
    words = [*words_of(small, job), "--flops=4e8,9e8,18e8", "--tokens_per_weight=3"]
    assert run_scaling(["plan", *words, "--predict=3e9"]) == 0
    file = read_study_file(str(job / "ladder.toml"))
    assert (file.metric, len(file.trials)) == ("heldout/loss", 3)
    text = (job / "ladder.toml").read_text()
    comments = [float(line.split()[1]) for line in text.splitlines() if line[:1] == "#"]
    for flops, expected in zip(comments, [4e8, 9e8, 18e8, 3e9], strict=True):
        assert flops == pytest.approx(expected, rel=0.05)  # within half a step
    with raises(UsageError, field="--job_log_dir", value=str(job)):
        run_scaling(["plan", *words])

    for index, fields in enumerate(file.trials):
        assert cli.main(words_of(fields, job / "trials" / f"{index:04d}")) == 0
        info = read_metrics(job / "trials" / f"{index:04d}").info
        flops = info["flops_per_step"] * info["num_train_steps"]
        assert flops == pytest.approx(comments[index], rel=1e-3)
    unfinished = job / "trials" / "0003"
    unfinished.mkdir()
    shutil.copy(job / "trials" / "0000" / "config.json", unfinished)
    capsys.readouterr()
    assert run_scaling(["fit", str(job)]) == 0
    printed = capsys.readouterr().out
    assert "L(C) = " in printed
    assert f"left out: {unfinished}: state='not started'" in printed
    told = json.loads((job / "prediction.json").read_text())
    with raises(UsageError, field="DIR", value=str(job / "larger")):
        run_scaling(["grade", str(job)])

    assert cli.main(words_of(file.larger, job / "larger")) == 0
    capsys.readouterr()
    assert run_scaling(["grade", str(job)]) == 0
    measured = read_metrics(job / "larger").evals["heldout"][-1]["loss"]
    error = told["prediction"] / measured - 1
    assert f"measured  {measured:.5g}: error {error:+.2%}" in capsys.readouterr().out
    with raises(UsageError, field="larger run"):
        run_scaling(["fit", str(job)])
    for change, field in ({"time": 9e9}, "time"), ({"config_sha256": "0"}, None):
        (job / "prediction.json").write_text(json.dumps(told | change))
        with raises(UsageError, field=field):
            run_scaling(["grade", str(job)])


def test_flops_of_a_rung_are_those_of_its_plan(tmp_path, capsys):
    small = {"MAX_SEQ_LEN": 16, "NUM_LAYERS": 1, "ICI_MESH_SHAPE": [1, 1, 1]}
    assert cli.main([*words_of(small, tmp_path), "--mode=plan", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    size = step_size(resolve(LocalText(**small)))
    assert size == (plan["num_params"], plan["batch"]["tokens"], plan["flops_per_step"])


@pytest.mark.parametrize(
    ("exp", "more", "field"),
    [("lm.optimal_scaling.DepthDial", (), "datasets.1.eval_loop_num_batches")]
    + [("lm.quickstart.LocalText", ("--metric=other/loss",), "--metric")],
)
def test_rungs_that_no_rows_score_alike_are_an_error(tmp_path, raises, exp, more, field):
    with raises(UsageError, field=field):
        run_scaling(["plan", f"--exp={exp}", f"--job_log_dir={tmp_path}", "--flops=1e12", *more])
    assert not [*tmp_path.iterdir()]


def test_ladder_of_an_experiment_without_sizes_is_an_error(tmp_path, raises):
    with raises(UsageError, owner="layerkit_experiments.vision.digits.Digits"):
        run_scaling(
            ["plan", "--exp=vision.digits.Digits", f"--job_log_dir={tmp_path}", "--flops=1e9"]
        )
    assert not [*tmp_path.iterdir()]
