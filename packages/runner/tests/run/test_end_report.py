"""The report at the end of training, and what is left of it where a part of it fails."""

from __future__ import annotations

import json
import shlex
import signal
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.base_model import BaseModel, WeightedScalar
from layerkit.config import Config
from layerkit.config.nested_map import NestedMap
from layerkit_runner import BaseExperiment, cli
from layerkit_runner.config.requests import ResolvedExperiment
from layerkit_runner.errors import UsageError
from layerkit_runner.observers import read_metrics
from layerkit_runner.observers.loss_curve import draw_loss_curve
from layerkit_runner.partitioning import PmapPartitioner, SpmdPartitioner
from layerkit_runner.run import job as run_job
from layerkit_runner.run.end_report import LossCurve
from layerkit_runner.run.inference import run_inference
from layerkit_runner.run.job import start_job
from layerkit_runner.run.resolve import resolve
from layerkit_runner.run.training_run import run_train
from layerkit_runner.run_options import RunOptions

NUM_ROWS = 7  # one less than devices, so one row of each batch is padding


class Measuring(BaseModel):
    """½·(x·w − y)², reported as `error`; decoding gives numbers and no ids."""

    reported_metric = "error"
    fails: bool = False

    def setup(self) -> None:
        from layerkit.layers.basic.linears import Linear

        self.create_child("linear", Linear.HParams.config(input_dims=2, output_dims=1))

    def compute_predictions(self, batch: NestedMap) -> Any:
        return self.linear(batch.x)[:, 0]

    def compute_loss(self, predictions: Any, batch: NestedMap) -> Any:
        errors = 0.5 * jnp.square(predictions - batch.y)
        weight = jnp.sum(batch.weights)
        loss = WeightedScalar.of(jnp.sum(errors * batch.weights) / jnp.maximum(weight, 1), weight)
        return {"loss": loss, "error": loss}, NestedMap(scores=-errors)

    def decode(self, batch: NestedMap) -> NestedMap:
        if self.fails:
            raise ValueError("no such output")
        predictions = self.compute_predictions(batch)
        return NestedMap(
            y=batch.y,
            image=jnp.broadcast_to(batch.x[:, :1], (len(predictions), 2000)),
            of=NestedMap(double=2 * batch.x),
        )


@pytest.fixture(scope="module")
def experiment(tiny: SimpleNamespace) -> type[BaseExperiment]:
    class Unscored(tiny.Points):
        """Points whose metric over scores fails."""

        has_score_metrics = True

        def score_metrics(self, scores: Any) -> dict[str, float]:
            raise KeyError("no such score")

    class Unreadable(tiny.Points):
        """Points whose second batch cannot be read."""

        def _read_rows(self, rows: np.ndarray) -> NestedMap:
            if rows.max() >= NUM_ROWS + 1:
                raise KeyError("no such row")
            return super()._read_rows(rows)

    class Measured(BaseExperiment):
        FAILS: str = ""
        PMAP: bool = False
        LEARNING_RATE: float = 0.01

        def task(self) -> Config:
            train = {"num_train_steps": 3, "summary_interval_steps": 1, "save_interval_steps": 10}
            task = tiny.task_config(learner={"learning_rate": self.LEARNING_RATE}, train=train)
            model = Measuring.HParams.config(fails=self.FAILS == "model")
            return task.set(model=model)

        def datasets(self) -> list[Config]:
            held_out = Unscored if self.FAILS == "evaluation" else tiny.Points
            rows = {"num_rows": NUM_ROWS, "percore_batch_size": 1.0}
            return [
                tiny.Points.HParams.config(name="train", is_training=True, **rows),
                held_out.HParams.config(name="heldout", **rows),
            ]

        def decode_datasets(self) -> list[Config]:
            points, num_rows = tiny.Points, NUM_ROWS
            if self.FAILS == "decoding":
                points, num_rows = Unreadable, NUM_ROWS + 2
            rows = {"num_rows": num_rows, "percore_batch_size": 1.0}
            return [points.HParams.config(name="points", **rows)]

        def partitioner(self) -> Config:
            return (PmapPartitioner if self.PMAP else SpmdPartitioner).HParams.config()

    return Measured


def options(folder: Path) -> RunOptions:
    return RunOptions(job_log_dir=str(folder), jax_compilation_cache="off")


def records(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("decode/points/*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_records(folder: Path) -> None:
    """Row n is x = (n mod 5, 1), y = n mod 3; the large array is in the file beside."""
    result = records(folder)
    assert [record["example"] for record in result] == list(range(NUM_ROWS))
    assert [record["y"] for record in result] == [n % 3 for n in range(NUM_ROWS)]
    assert [record["of.double"] for record in result] == [[2 * (n % 5), 2] for n in range(NUM_ROWS)]
    place = result[-1]["image"]
    arrays = np.load(folder / "decode" / "points" / place["npz"])
    assert arrays[place["array"]][place["row"]].tolist() == [(NUM_ROWS - 1) % 5] * 2000


@pytest.mark.usefixtures("matplotlib")
def test_outputs_without_ids_are_decoded_and_the_loss_curve_names_the_metric(
    experiment: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "job"
    assert run_train(resolve(experiment()), options(folder)) == 0
    check_records(folder)
    drawn = (folder / "loss_curve.png").read_bytes()
    expected = draw_loss_curve(folder, tmp_path / "expected.png", key="error", y_label="error")
    assert drawn == expected.read_bytes()
    out = capsys.readouterr().out
    assert 'sample (points): {"example": 0, ' in out
    for mode in ("decode", "decode_once"):
        (path,) = folder.glob("decode/points/*.jsonl")
        path.unlink()
        assert run_inference(mode, resolve(experiment()), options(folder)) == 0
        check_records(folder)
        assert 'sample (points): {"example": 0, ' in capsys.readouterr().out


def test_drawing_that_has_begun_ends_with_the_run(experiment: Any, tmp_path: Path):
    job = start_job("train", resolve(experiment()), options(tmp_path / "job"))
    curve = LossCurve(job, "token", interval=0)
    curve.redraw()
    curve.close()
    assert curve._drawing is not None and curve._drawing.returncode is not None


@pytest.mark.slow  # another test draws the whole curve
@pytest.mark.usefixtures("matplotlib")
def test_another_process_redraws_the_curve_and_its_failure_has_no_effect(
    experiment: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "job"
    picture = folder / "loss_curve.png"
    assert run_train(resolve(experiment()), options(folder)) == 0
    expected = picture.read_bytes()
    picture.unlink()
    job = start_job("train", resolve(experiment()), options(folder))
    curve = LossCurve(job, "token", interval=0)
    curve.redraw()
    assert curve._drawing is not None and curve._drawing.wait() == 0
    assert picture.read_bytes() == expected
    monkeypatch.setattr(sys, "executable", "/no/such/program")
    curve.redraw()
    early = LossCurve(job, "token")
    early.redraw()
    assert early._drawing is None
    curve.finish({"table": 2.2})
    assert picture.read_bytes() != expected


@pytest.mark.usefixtures("matplotlib")
@pytest.mark.parametrize("part", ["evaluation", pytest.param("decoding", marks=pytest.mark.slow)])
def test_failed_part_is_reported_and_the_others_are_made(
    experiment: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], part: str
):
    folder = tmp_path / "job"
    resolved: ResolvedExperiment = resolve(experiment(FAILS=part))
    assert run_train(resolved, options(folder)) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    (failure,) = [line for line in lines if line.startswith(f"{part} failed: ")]
    assert "KeyError" in failure and "no such" in failure
    assert f"--mode={'eval' if part == 'evaluation' else 'decode'}_once" in failure
    assert "raise KeyError(" in printed.err
    assert f"loss curve: {folder / 'loss_curve.png'}" in lines
    (first,) = [n for n, line in enumerate(lines) if line.startswith("next: ")]
    commands = lines[first + 1 :]
    assert [shlex.split(command)[0] for command in commands] == ["runner"] * 2
    assert "--exp" not in commands[0] and "--mode=inspect" in commands[0]
    other = "sample (points): " if part == "evaluation" else "heldout: error "
    assert any(line.startswith(other) for line in lines)
    # The same command neither trains nor fails.
    assert run_train(resolved, options(folder)) == 0


def test_commands_to_try_next_are_short_and_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "tools"))
    monkeypatch.chdir(tmp_path)
    # Other tests of this process have no cache.
    monkeypatch.setattr(run_job, "enable_compilation_cache", lambda flag: None)

    def run(*words: str) -> list[str]:
        assert cli.main(words) == 0
        return capsys.readouterr().out.splitlines()

    folder = "--job_log_dir=runs/slope"
    fields = ("--fdl.RATE=0.2", "--fdl.WIDTH=3", "--fdl.BATCH_SIZE=8")
    lines = run("--exp=slope_experiment.Slope", *fields, folder)
    (first,) = [n for n, line in enumerate(lines) if line.startswith("next: ")]
    inspect, train = lines[first + 1 :]
    assert max(map(len, lines[first:])) <= 100
    assert inspect == f"  runner {folder} --mode=inspect"
    assert train == f"  runner {folder} --fdl.MAX_STEPS=12"
    assert "experiment.WIDTH = 3" in run(*inspect.split()[1:])
    lines = run(*train.split()[1:])
    assert any(line.startswith("resuming from step 6") for line in lines)
    # The learning rate is the recorded one: w = 3·(1 − 0.8¹²).
    last = read_metrics(tmp_path / "runs/slope").evals["heldout"][-1]
    assert last["step"] == 12
    assert last["loss"] == pytest.approx(4.5 * 0.8**24, rel=1e-4)


@pytest.mark.parametrize("pmap", [False, True])
def test_decode_that_fails_is_found_before_a_file_is_written(
    experiment: Any, tmp_path: Path, pmap: bool
):
    resolved: ResolvedExperiment = resolve(experiment(FAILS="model", PMAP=pmap))
    with pytest.raises(UsageError, match="no such output"):
        run_train(resolved, options(tmp_path / "job"))
    assert not (tmp_path / "job" / "config.json").exists()


@pytest.mark.parametrize(
    ("number", "num_processes"),
    [
        (signal.SIGTERM, 1),
        pytest.param(signal.SIGINT, 1, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 2, marks=pytest.mark.slow),
    ],
)
def test_a_signal_during_the_last_decoding_ends_the_job_with_its_checkpoint(
    processes: Any, number: signal.Signals, num_processes: int
):
    exp = "gated_experiment.EndlessDecoding"
    started = [processes.start(exp=exp)] if num_processes == 1 else processes.start_two(exp=exp)
    first, *others = started
    processes.said(first, "decoding begins")
    first.send_signal(number)
    assert f"{number.name}: leaving at once" in processes.ended(first, 128 + number)
    for other in others:
        said = processes.ended(other, 128 + number)
        assert f"process 0 of 2 (host {socket.gethostname()}, pid {first.pid})" in said
        assert f"stopped by {number.name}" in said
    folder = processes.folder
    assert (folder / "checkpoints" / "checkpoint_00000002").is_dir()
    assert not list(folder.glob("decode/*/*.jsonl"))
    assert (folder / "metrics.jsonl").read_text().endswith("\n")


@pytest.mark.slow
def test_rows_that_fill_up_the_batches_of_two_processes_are_left_out(processes: Any):
    for process in processes.start_two(exp="gated_experiment.UnmarkedRows"):
        processes.ended(process)
    # Process 0 has five batches of one row and process 1 three.
    result = [record["twice"] for record in records(processes.folder)]
    assert sorted(result) == [2, 4, 6, 8, 10, 202, 204, 206]
