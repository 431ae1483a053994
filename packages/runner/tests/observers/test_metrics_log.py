from __future__ import annotations

import json
import math

import pytest
from etils import epath

from layerkit.errors import ConfigError
from layerkit_runner.errors import UsageError
from layerkit_runner.observers import MetricsLog, read_metrics
from layerkit_runner.observers.metrics_log import metric_series


@pytest.fixture
def train(run_info):
    """Logs one training run, which evaluates every ten steps."""

    def train(folder, steps, *, start_step=0, loss=lambda step: 1.0 / step):
        log = MetricsLog(clock=lambda: 1_700_000_000.12345)
        log.start(run_info(job_log_dir=epath.Path(folder), start_step=start_step))
        for step in steps:
            log.train_metrics(step, {"loss": loss(step), "tokens_per_sec": 100.0})
            if step % 10 == 0:
                log.eval_metrics(step, "held_out", {"loss": loss(step) + 1})
        log.close()

    return train


def losses(records):
    return [(record["step"], record["loss"]) for record in records]


def test_metrics_log_writes_start_step_and_evaluation_lines(train, tmp_path):
    train(tmp_path, [10])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [
        {
            "event": "start",
            "step": 0,
            "time": 1_700_000_000.123,
            "experiment": "lm.Toy",
            "mode": "train",
            "num_params": 10,
            "num_train_steps": 100,
            "tokens_per_step": 64,
            "examples_per_step": 4,
            "flops_per_step": None,
            "num_devices": 1,
            "device_kind": "cpu",
            "peak_flops_per_device": None,
            "train_programs": [],
            "environment": {},
        },
        {"step": 10, "time": 1_700_000_000.123, "loss": 0.1, "tokens_per_sec": 100.0},
        {"step": 10, "time": 1_700_000_000.123, "dataset": "held_out", "loss": 1.1},
    ]


def test_read_metrics_returns_each_series_in_order(train, tmp_path):
    train(tmp_path, [1, 10, 20])
    metrics = read_metrics(tmp_path)
    assert losses(metrics.train) == [(1, 1.0), (10, 0.1), (20, 0.05)]
    assert losses(metrics.evals["held_out"]) == [(10, 1.1), (20, 1.05)]
    assert metrics.info["num_params"] == 10
    assert read_metrics(tmp_path / "metrics.jsonl") == metrics


def test_work_lost_before_a_resume_is_left_out_but_stays_in_the_file(train, tmp_path):
    train(tmp_path, [1, 10, 20, 30])
    train(tmp_path, [20], start_step=15, loss=lambda step: 7.0)
    metrics = read_metrics(tmp_path)
    # Step 30 was never reached again, step 20 was done anew, steps 1 and 10 stand.
    assert losses(metrics.train) == [(1, 1.0), (10, 0.1), (20, 7.0)]
    assert losses(metrics.evals["held_out"]) == [(10, 1.1), (20, 8.0)]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    trained = [line["step"] for line in lines if "loss" in line and "dataset" not in line]
    assert trained == [*(1, 10, 20, 30), 20]
    events = [(line["event"], line["step"]) for line in lines if "event" in line]
    assert events == [("start", 0), ("resume", 15)]


def test_end_line_is_an_event_and_leaves_the_facts_of_the_start(run_info, tmp_path):
    for reason in ("OSError: full", "finished"):
        log = MetricsLog()
        log.start(run_info(job_log_dir=epath.Path(tmp_path), start_step=3))
        log.end(reason)
        log.close()
    metrics = read_metrics(tmp_path)
    assert metrics.info["event"] == "resume"
    assert [e.get("reason") for e in metrics.events] == [None, "OSError: full", None, "finished"]


def test_read_metrics_keeps_the_later_value_of_a_metric_and_step(train, run_info, tmp_path, raises):
    train(tmp_path, [5])
    train(tmp_path, [], start_step=10)
    log = MetricsLog()
    log.start(run_info(job_log_dir=epath.Path(tmp_path), start_step=10))
    log.eval_metrics(10, "held_out", {"loss": 3.0, "score/f1": 0.5})
    log.eval_metrics(10, "held_out", {"loss": 2.0, "r2": 0.25})
    log.close()
    evals = read_metrics(tmp_path).evals
    assert losses(evals["held_out"]) == [(10, 2.0)]
    for name, value in {"r2": 0.25, "score/f1": 0.5}.items():
        assert metric_series(evals, f"held_out/{name}") == [(10, value)]
    assert metric_series(evals, "other/loss") == []
    with raises(UsageError, field="metric", value="held_out/time") as error:
        metric_series(evals, "held_out/time")
    assert error.value.choices == ("held_out/loss", "held_out/score/f1", "held_out/r2")


def test_non_finite_numbers_round_trip(train, tmp_path):
    values = {1: math.inf, 2: -math.inf, 3: math.nan}
    train(tmp_path, values, loss=values.get)
    read = [record["loss"] for record in read_metrics(tmp_path).train]
    assert read[:2] == [math.inf, -math.inf]
    assert math.isnan(read[2])


def test_read_metrics_ignores_an_incomplete_last_line_only(raises, train, tmp_path):
    train(tmp_path, [1, 2])
    path = tmp_path / "metrics.jsonl"
    whole = path.read_text()
    path.write_text(whole + '{"step": 3, "lo')
    assert losses(read_metrics(path).train) == [(1, 1.0), (2, 0.5)]
    for line, value in (
        (b'{"step": 1, "lo', '{"step": 1, "lo'),
        (b"null", "null"),
        (b"\xff", "\ufffd"),
    ):
        path.write_bytes(line + b"\n" + whole.encode())
        with raises(ConfigError, owner=f"{path}, line 1", value=value):
            read_metrics(path)


def test_evaluation_job_writes_a_separate_file(train, run_info, tmp_path):
    train(tmp_path, [1, 20])
    log = MetricsLog()
    log.start(run_info(job_log_dir=epath.Path(tmp_path), mode="eval", start_step=10))
    log.eval_metrics(10, "held_out", {"loss": 2.0})
    log.close()
    assert [record["step"] for record in read_metrics(tmp_path).train] == [1, 20]
    assert losses(read_metrics(tmp_path / "metrics_eval.jsonl").evals["held_out"]) == [(10, 2.0)]


def test_scalar_with_a_reserved_name_raises(raises, run_info, tmp_path):
    log = MetricsLog()
    log.start(run_info(job_log_dir=epath.Path(tmp_path)))
    with raises(ConfigError, field="scalar", value="time"):
        log.train_metrics(1, {"time": 3.0})
    log.close()
