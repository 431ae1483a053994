"""TrainProgram: what is reported, when, and how far the host may run ahead."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerkit.config.nested_map import NestedMap
from layerkit.layers.basic.linears import Linear
from layerkit_inputs.base.prefetch import Prefetch
from layerkit_runner.data.host_inputs import make_input
from layerkit_runner.data.train_inputs import TrainInput, TrainInputs
from layerkit_runner.errors import UsageError
from layerkit_runner.observers import Goodput, Throughput
from layerkit_runner.optim.spikes import IS_VALID
from layerkit_runner.partitioning import SpmdPartitioner
from layerkit_runner.run.programs.train_program import (
    StepReports,
    TrainProgram,
    TrainPrograms,
    trace_step,
)
from layerkit_runner.step.task_metrics import Histogram, Max, Mean


@pytest.fixture
def started(tiny: SimpleNamespace, make_recorder: Any) -> Any:
    """A function that makes programs, state and recorder."""

    def start(
        *,
        model: Any = None,
        metrics: Any = None,
        bad_steps: tuple[int, ...] = (),
        report: Callable[[Any], Any] = lambda reported: reported,
        **train: Any,
    ) -> tuple[TrainPrograms, Any, Any]:
        """`report` replaces the results of the compiled step."""
        partitioner = SpmdPartitioner(ici_mesh_shape=[1, 1, 1])
        partitioner.start(jax.devices()[:1])
        learner = {"learning_rate": 0.01}
        config = tiny.task_config(learner=learner, train=train, **(model or {}))
        task = config.set(metrics=metrics).Instantiate()
        partitioner.bind(task)
        points = tiny.Points.HParams.config(
            batch_size=1, is_training=True, shuffle=False, bad_rows=[step - 1 for step in bad_steps]
        )
        data = TrainInput(Prefetch(source=make_input(points, partitioner)), partitioner)
        abstract_state = partitioner.abstract_state(task)
        compiled = trace_step(task, partitioner, abstract_state, data.abstract_batch)()

        def run(state: Any, batch: Any) -> tuple[Any, Any]:
            state, reported = compiled.run(state, batch)
            return state, report(reported)

        replaced = dataclasses.replace(compiled, run=run)
        recorder = make_recorder()
        info = SimpleNamespace(examples_per_step=1, tokens_per_step=0, flops_per_step=None)
        goodput = Goodput()
        goodput.outermost("steps")
        reports = StepReports(recorder, Throughput(info, goodput))
        program = TrainProgram(replaced, data, None, reports)
        programs = TrainPrograms(TrainInputs([data]), [program], task.train)
        return programs, partitioner.init_fn(task)(), recorder

    return start


def run_step(program: TrainPrograms, state: Any, step: int) -> Any:
    """Return the state after a step; report the steps that are due."""
    state = program.start_step(state, step)
    program.report_due()
    return state


def run(program: TrainPrograms, state: Any, steps: Iterable[int]) -> Any:
    """Return the state after these steps, of which all is reported."""
    for step in steps:
        state = run_step(program, state, step)
    program.drain()
    return state


@given(turns=st.lists(st.integers(1, 7), min_size=1, max_size=5))
def test_data_sets_alternate_round_robin(turns: list[int]):
    # Only the number of steps counts here.
    inputs = TrainInputs([SimpleNamespace(steps=steps) for steps in turns])
    rounds = itertools.cycle([i for i, steps in enumerate(turns) for _ in range(steps)])
    for step, expected in zip(range(1, 40), rounds, strict=False):
        assert inputs.index_of_step(step) == expected
    assert inputs.num_turn_steps == sum(turns)


def test_losses_equal_computed_ones(started: Any):
    # Rows (0, 1) → 0 and (1, 1) → 1 with w = (1, 1): errors 1 and, after w₁ -= 0.01, 0.99.
    program, state, recorder = started(summary_interval_steps=1)
    state = run(program, state, (1, 2))
    losses = [recorder.metrics[step]["loss"] for step in (1, 2)]
    assert losses == pytest.approx([0.5, 0.5 * 0.99**2])
    assert int(state.step) == 2


def test_weight_summaries_at_their_interval(started: Any):
    program, state, recorder = started(weight_summary_interval_steps=2)
    for step in range(1, 5):
        state = run_step(program, state, step)
        if step == 2:  # It is reported later.
            norm = float(optax.tree.norm(state.params))
    program.drain()
    assert list(recorder.weights) == [2, 4]
    (spread,) = recorder.weights[2].values()
    assert spread.norm == pytest.approx(norm)


def test_first_step_is_reported_at_once_and_later_steps_with_a_delay(started: Any):
    program, state, recorder = started(max_inflight_steps=3)
    seen = []
    for step in range(1, 8):
        state = run_step(program, state, step)
        seen.append(list(recorder.completed))
    assert seen[0] == seen[1] == seen[2] == seen[3] == [1]
    assert seen[6] == [1, 2, 3, 4]
    program.drain()
    assert recorder.completed == [1, 2, 3, 4, 5, 6, 7]


def test_metrics_come_at_the_first_the_last_and_every_interval(started: Any):
    program, state, recorder = started(summary_interval_steps=4, num_train_steps=11)
    run(program, state, range(3, 12))  # a resumed run
    assert list(recorder.metrics) == [3, 4, 8, 11]
    assert recorder.metrics[8]["learning/lr"] == pytest.approx(0.01)
    assert {"loss", "learning/raw_grad_norm", "steps_per_sec"} <= recorder.metrics[8].keys()


class OnDevice:
    """An array of a step that records its copies to the host."""

    def __init__(self, array: jax.Array, name: str, reads: collections.Counter[str]) -> None:
        self._array, self._name, self._reads = array, name, reads
        self.is_copied_ahead = False

    def copy_to_host_async(self) -> None:
        self.is_copied_ahead = True

    def block_until_ready(self) -> OnDevice:
        self._array.block_until_ready()
        return self

    def is_ready(self) -> bool:
        return bool(self._array.is_ready())

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        assert self.is_copied_ahead  # `jax.device_get` does so for all arrays before it waits
        self._reads[self._name] += 1
        return np.asarray(self._array)


def test_between_summaries_the_host_reads_one_number_that_was_copied_ahead(started: Any):
    reads: list[collections.Counter[str]] = []

    def report(reported: Any) -> Any:
        reads.append(collections.Counter())

        def wrap(path: Any, array: jax.Array) -> OnDevice:
            return OnDevice(array, jax.tree_util.keystr(path), reads[-1])

        return jax.tree_util.tree_map_with_path(wrap, reported)

    program, state, _ = started(report=report, summary_interval_steps=4, num_train_steps=100)
    program.programs[0]._is_on_cpu = False  # On a CPU, results are in the memory of the host.
    run(program, state, range(1, 11))
    for step, result in enumerate(reads, 1):
        if step in (1, 4, 8):
            assert len(result) > 1
        else:
            assert result == {f"[1]['{IS_VALID}']": 1}


def test_bad_step_between_summaries_is_reported_with_its_number(started: Any):
    metrics = {"smooth": Mean.HParams.config(value="metrics/loss")}
    program, state, recorder = started(
        bad_steps=(4,), metrics=metrics, summary_interval_steps=3, max_inflight_steps=2
    )
    before = None
    for step in range(1, 8):
        if step == 4:
            before = jax.device_get(state.params)
        state = run_step(program, state, step)
        if step == 4:
            jax.tree.map(np.testing.assert_array_equal, state.params, before)
        if step == 4 + 2:
            # No more than the steps in flight later.
            assert recorder.messages
    program.drain()
    assert list(recorder.metrics) == [1, 3, 4, 6]
    assert np.isnan(recorder.metrics[4]["loss"])
    assert recorder.metrics[4]["learning/is_valid_step"] == 0.0
    skipped = {step: values["learning/skipped_steps"] for step, values in recorder.metrics.items()}
    assert skipped == {1: 0.0, 3: 0.0, 4: 1.0, 6: 1.0}
    # The mean since step 3 is over the steps that were taken, and the skipped one does not end it.
    assert "smooth" not in recorder.metrics[4]
    assert np.isfinite(recorder.metrics[6]["smooth"])
    [message] = recorder.messages
    assert "step 4" in message and "loss=nan" in message
    assert (program.skipped.in_a_row, program.skipped.in_all) == (0, 1)


def test_the_input_state_is_that_of_the_steps_started(started: Any):
    program, state, _ = started()
    for step in (1, 2, 3):
        assert program.input_states()["train/Points"]["position"]["rows_done"] == step - 1
        state = run_step(program, state, step)
    assert program.input_states()["train/Points"]["position"]["rows_done"] == 3


def test_metrics_of_the_task_cover_the_steps_since_the_last_summary(started: Any):
    """Row n mod 7 is x = (n mod 5, 1), y = n mod 3."""
    metrics = {
        "smooth": Mean.HParams.config(value="metrics/loss"),
        "worst": Max.HParams.config(value="metrics/loss"),
        "y": Histogram.HParams.config(value="batch/y", low=-0.5, high=2.5, num_bins=3),
    }
    program, state, recorder = started(metrics=metrics, summary_interval_steps=1)
    run(program, state, range(1, 8))
    each = [values["loss"] for values in recorder.metrics.values()]
    program, state, recorder = started(metrics=metrics, summary_interval_steps=3)
    run(program, state, range(1, 8))
    assert list(recorder.metrics) == [1, 3, 6]
    for result, span in zip(
        recorder.metrics.values(), (each[:1], each[1:3], each[3:6]), strict=True
    ):
        assert result["smooth"] == pytest.approx(sum(span) / len(span))
        assert result["worst"] == pytest.approx(max(span))
    counts = [list(recorder.weights[step]["y"].counts) for step in (1, 3, 6)]
    assert counts == [[1, 0, 0], [0, 1, 1], [1, 1, 1]]


class Drawn(Linear):
    """Reports its inputs, and each row as an image of one line."""

    def fprop(self, x: jax.Array) -> jax.Array:
        self.add_summary("inputs", x, kind="histogram")
        self.add_summary("rows", jnp.abs(x)[:, None, :, None], kind="image")
        return super().fprop(x)


def test_arrays_of_layers_come_with_the_summaries(started: Any):
    program, state, recorder = started(
        model={"linear_tpl": Drawn.HParams.config()}, summary_interval_steps=3
    )
    run(program, state, range(1, 5))
    assert list(recorder.weights) == list(recorder.pictures) == [1, 3]
    # The third row is (2, 1): the batch of step 3 itself.
    (spread,) = recorder.weights[3].values()
    assert (spread.sum, spread.counts.sum()) == (3.0, 2.0)
    (picture,) = recorder.pictures[3].values()
    assert picture.tolist() == [[[255], [255]]]


def test_batch_of_another_shape_is_an_error(raises: Any, started: Any):
    program, state, _ = started()
    state = run_step(program, state, 1)
    with raises(UsageError, field="x", value="float32[1, 1]", expected="float32[1, 2]"):
        _run_step_with_a_narrow_batch(program, state, 2)


def _run_step_with_a_narrow_batch(program: TrainPrograms, state: Any, step: int) -> None:
    feed = program.inputs.inputs[0].feed
    batch, _ = feed.take(lambda: True)
    wrong = NestedMap(x=batch.x[:, :1], y=batch.y, weights=batch.weights)
    feed._waiting.appendleft((wrong, feed.state()))
    program.start_step(state, step)
