"""TrainProgram: what is reported, when, and how far the host may run ahead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import optax
import pytest

from layerkit_inputs.prefetch import Prefetch
from layerkit_runner.feeds.infeed import make_input
from layerkit_runner.observers import Observer, RunInfo, Throughput
from layerkit_runner.partitioning import SpmdPartitioner
from layerkit_runner.programs import TrainProgram


class Recorder(Observer):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.completed: list[int] = []
        self.metrics: dict[int, dict[str, float]] = {}
        self.weights: dict[int, dict[str, Any]] = {}

    def progress(self, step: int) -> None:
        self.completed.append(step)

    def train_metrics(self, step: int, scalars: Any) -> None:
        self.metrics[step] = dict(scalars)

    def histograms(self, step: int, histograms: Any) -> None:
        self.weights[step] = dict(histograms)


def started(tiny: SimpleNamespace, **train: Any) -> tuple[TrainProgram, Any, Recorder]:
    partitioner = SpmdPartitioner(ici_mesh_shape=[1, 1, 1])
    partitioner.start(jax.devices()[:1])
    learner = {"learning_rate": 0.01}
    task = tiny.task_config(learner=learner, train=train).Instantiate()
    partitioner.bind(task)
    points = tiny.Points.HParams.config(batch_size=1, is_training=True, shuffle=False)
    train_input = Prefetch(source=make_input(points, partitioner))
    program = TrainProgram(task, partitioner, train_input)
    state = partitioner.init_fn(task)()
    recorder = Recorder()
    info = RunInfo(
        job_log_dir=None,
        experiment="tiny",
        mode="train",
        num_params=2,
        num_train_steps=task.train.num_train_steps,
        start_step=0,
        tokens_per_step=0,
        examples_per_step=1,
        flops_per_step=None,
        num_devices=1,
        device_kind="cpu",
        peak_flops_per_device=None,
    )
    compiled = program.lower(partitioner.abstract_state(task)).compile()
    program.start(compiled, recorder, Throughput(info))
    return program, state, recorder


def test_losses_by_hand(tiny: SimpleNamespace):
    # Rows (0, 1) → 0 and (1, 1) → 1 with w = (1, 1): errors 1 and, after w₁ -= 0.01, 0.99.
    program, state, recorder = started(tiny, summary_interval_steps=1)
    for step in (1, 2):
        state = program.run_step(state, step)
    program.drain()
    assert recorder.metrics[1]["loss"] == pytest.approx(0.5)
    assert recorder.metrics[2]["loss"] == pytest.approx(0.5 * 0.99**2)
    assert int(state.step) == 2


def test_weights_after_the_steps_that_are_due(tiny: SimpleNamespace):
    program, state, recorder = started(tiny, weight_summary_interval_steps=2)
    for step in range(1, 5):
        state = program.run_step(state, step)
        if step == 2:
            norm = float(optax.tree.norm(state.params))
    program.drain()
    assert list(recorder.weights) == [2, 4]
    (spread,) = recorder.weights[2].values()
    assert spread.norm == pytest.approx(norm)


def test_the_first_step_is_reported_at_once_and_later_ones_behind(tiny: SimpleNamespace):
    program, state, recorder = started(tiny, max_inflight_steps=3)
    seen = []
    for step in range(1, 8):
        state = program.run_step(state, step)
        seen.append(list(recorder.completed))
    assert seen[0] == seen[1] == seen[2] == seen[3] == [1]
    assert seen[6] == [1, 2, 3, 4]
    program.drain()
    assert recorder.completed == [1, 2, 3, 4, 5, 6, 7]


def test_metrics_come_at_the_first_the_last_and_every_interval(tiny: SimpleNamespace):
    program, state, recorder = started(tiny, summary_interval_steps=4, num_train_steps=11)
    for step in range(3, 12):  # a resumed run
        state = program.run_step(state, step)
    program.drain()
    assert list(recorder.metrics) == [3, 4, 8, 11]
    assert recorder.metrics[8]["learning/lr"] == pytest.approx(0.01)
    assert {"loss", "learning/raw_grad_norm", "steps_per_sec"} <= recorder.metrics[8].keys()


def test_the_input_state_is_that_of_the_steps_started(tiny: SimpleNamespace):
    program, state, _ = started(tiny)
    for step in (1, 2, 3):
        assert program.input_state()["position"]["rows_done"] == step - 1
        state = program.run_step(state, step)
    assert program.input_state()["position"]["rows_done"] == 3
