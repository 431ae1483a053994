"""Executor: intervals, signals, saves, early stopping and invalid steps."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from etils import epath

from layerkit_inputs.base.prefetch import Prefetch
from layerkit_runner.checkpointing import CheckpointManager, CheckpointPolicy
from layerkit_runner.checkpointing.folders import committed_steps
from layerkit_runner.data.host_inputs import make_input
from layerkit_runner.data.train_inputs import TrainInput, TrainInputs
from layerkit_runner.distributed.stop_signals import StopSignals
from layerkit_runner.errors import NonFiniteError, UsageError
from layerkit_runner.observers import Goodput, Observer, Throughput
from layerkit_runner.optim.early_stopping import EarlyStop, StoppingRule
from layerkit_runner.partitioning import SpmdPartitioner
from layerkit_runner.run.executor import Executor
from layerkit_runner.run.programs.decode_program import DecodeProgram
from layerkit_runner.run.programs.eval_program import EvalProgram
from layerkit_runner.run.programs.skipped_steps import SKIPPED_STEPS
from layerkit_runner.run.programs.train_program import (
    StepReports,
    TrainProgram,
    TrainPrograms,
    trace_step,
)


class Recorder(Observer):
    """Records events; sends a stop request at a step, and save requests at others."""

    def __init__(self, signals: StopSignals, stop_at: int | None, save_at: set[int]) -> None:
        self.events: list[str] = []
        self.messages: list[str] = []
        self._signals = signals
        self._stop_at = stop_at
        self._save_at = save_at

    def progress(self, step: int) -> None:
        self.events.append(f"step {step}")
        if step == self._stop_at:
            self._signals.request_stop(signal.SIGTERM)
        self._signals.save_received |= step in self._save_at

    def message(self, text: str) -> None:
        self.messages.append(text)

    def eval_metrics(self, step: int, dataset: str, scalars: Any) -> None:
        assert dataset == "points"
        self.events.append(f"eval {step}")

    def text(self, step: int, name: str, text: str) -> None:
        self.events.append(f"decode {step}")

    def flush(self) -> None:
        self.events.append("save")


@pytest.fixture
def make(tiny: SimpleNamespace, tmp_path: Any) -> Any:
    """Return a function that makes an executor, its first state and its recorder."""

    def build(
        *,
        saves: bool = True,
        stop_at: int | None = None,
        save_at: set[int] = frozenset(),
        exits_then: bool = False,
        eval_batches: int | None = None,
        rule: StoppingRule | None = None,
        bad_steps: Sequence[int] = (),
        unreadable: dict[str, Any] | None = None,
        learner: dict[str, Any] | None = None,
        **train: Any,
    ) -> Any:
        partitioner = SpmdPartitioner()
        partitioner.start()
        task = tiny.task_config(
            learner=learner,
            train={"eval_interval_steps": None, "max_inflight_steps": 1, **train},
        ).Instantiate()
        partitioner.bind(task)

        def dataset(kind: Any, **fields: Any) -> Any:
            return make_input(kind.HParams.config(percore_batch_size=1.0, **fields), partitioner)

        # Step n reads the rows from 8(n - 1) on.
        fields = {"num_rows": 800, "shuffle": False} if bad_steps or unreadable else {}
        fields |= unreadable or {}
        bad_rows = [8 * (step - 1) for step in bad_steps]
        train_input = Prefetch(
            source=dataset(tiny.Points, is_training=True, bad_rows=bad_rows, **fields)
        )
        data = TrainInput(train_input, partitioner)
        points = dataset(tiny.Points, eval_loop_num_batches=eval_batches)
        signals = StopSignals()
        recorder = Recorder(signals, stop_at, save_at)
        info = SimpleNamespace(examples_per_step=8, tokens_per_step=0, flops_per_step=None)
        throughput = Throughput(info, Goodput())
        abstract_state = partitioner.abstract_state(task)
        compiled = trace_step(task, partitioner, abstract_state, data.abstract_batch)()
        program = TrainProgram(compiled, data, None, StepReports(recorder, throughput))
        policy = CheckpointPolicy(
            save_interval_steps=task.train.save_interval_steps,
            max_to_keep=task.train.save_max_to_keep,
            keep_interval=None,
            best_metric=task.train.save_best_metric,
        )
        folder = epath.Path(tmp_path)
        executor = Executor(
            train=task.train,
            train_programs=TrainPrograms(TrainInputs([data]), [program], task.train),
            eval_programs=[EvalProgram(task, partitioner, points, "points")],
            decode_programs=[
                DecodeProgram(task, partitioner, dataset(tiny.Prompts), "prompts", folder)
            ],
            checkpoints=CheckpointManager(folder / "checkpoints", policy=policy) if saves else None,
            metadata={},
            observers=recorder,
            throughput=throughput,
            signals=signals,
            goodput=throughput.goodput,
            exit_after_ondemand_checkpoint=exits_then,
            early_stop=None if rule is None else EarlyStop(rule),
            decode_interval_steps=task.train.decode_interval_steps,
        )
        return SimpleNamespace(
            executor=executor,
            state=partitioner.init_fn(task)(),
            recorder=recorder,
            abstract=partitioner.abstract_state(task),
        )

    return build


def restore(job: Any, *steps: int) -> list[Any]:
    """What a run saved at these steps; it can save nothing more."""
    with job.executor.checkpoints as checkpoints:
        checkpoints.wait_until_finished()
        return [checkpoints.restore(step, job.abstract) for step in steps]


def saved_steps(folder: Any) -> list[int]:
    return committed_steps(epath.Path(folder) / "checkpoints")


def test_run_saves_evaluates_and_decodes_at_their_intervals(make: Any):
    job = make(
        num_train_steps=6, eval_interval_steps=2, decode_interval_steps=3, save_interval_steps=4
    )
    state, step = job.executor.run(job.state, 0)
    # Evaluation and decoding after the last step are the end report's.
    assert job.recorder.events == [
        *("step 1", "step 2", "eval 2", "step 3", "decode 3", "step 4", "eval 4", "save"),
        *("step 5", "step 6", "save"),
    ]
    assert (int(state.step), step) == (6, 6)
    restored = restore(job, 4, 6)
    assert [int(saved.state.step) for saved in restored] == [4, 6]
    rows = [saved.input_states["train/Points"]["position"]["rows_done"] for saved in restored]
    assert rows == [8 * 4, 8 * 6]


@pytest.mark.parametrize(
    ("fields", "kind", "exit_code"),
    [
        ({"unreadable_row": 40}, UsageError, 74),
        ({"unreadable_row": 40, "error": ValueError}, UsageError, 1),
        ({"unreadable_row": 40, "error": KeyError}, KeyError, None),
        ({"wide_row": 40}, UsageError, 1),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_run_saves_its_steps_if_no_batch_follows(
    make: Any, tmp_path: Any, fields: dict[str, Any], kind: type, exit_code: int | None
):
    # The batch of step 6.
    job = make(num_train_steps=9, unreadable=fields)
    with pytest.raises(kind) as caught:
        job.executor.run(job.state, 0)
    assert getattr(caught.value, "exit_code", None) == exit_code
    [restored] = restore(job, 5)
    assert saved_steps(tmp_path) == [5]
    assert int(restored.state.step) == 5
    assert restored.input_states["train/Points"]["position"]["rows_done"] == 8 * 5


@pytest.mark.parametrize(
    ("failing", "saved", "exit_code"),
    [("evaluation", 3, 74), ("report of step 2", 3, 1), ("report of step 9", 9, 1), ("save", 9, 1)],
)
def test_failure_after_a_step_saves_the_steps_until_then(
    make: Any, tmp_path: Any, failing: str, saved: int, exit_code: int
):
    job = make(num_train_steps=9, eval_interval_steps=3)
    failures = [UsageError("no")]

    def fail_once(step: int | None = None) -> None:
        if failures and failing == ("save" if step is None else f"report of step {step}"):
            raise failures.pop()

    if failing == "evaluation":
        job.executor.eval_programs[0].dataset.unreadable_row = 0
    else:  # step 2 is reported when step 3 has started
        job.recorder.flush = job.recorder.progress = fail_once
    with pytest.raises(UsageError) as caught:
        job.executor.run(job.state, 0)
    assert caught.value.exit_code == exit_code
    assert int(restore(job, saved)[0].state.step) == saved
    assert saved_steps(tmp_path) == [saved]


def test_data_that_are_unreadable_before_the_first_step_save_nothing(make: Any, tmp_path: Any):
    job = make(num_train_steps=9, unreadable={"unreadable_row": 8})
    with pytest.raises(UsageError) as caught:
        job.executor.run(job.executor.train_programs.start_step(job.state, 1), 1)
    assert caught.value.exit_code == UsageError.exit_code
    assert saved_steps(tmp_path) == []


def test_program_that_is_refused_after_the_first_step_saves_nothing(make: Any, tmp_path: Any):
    job = make(num_train_steps=9)

    def refuse() -> None:
        raise UsageError("no")

    job.executor.after_first_step = refuse
    with pytest.raises(UsageError) as caught:
        job.executor.run(job.state, 0)
    assert caught.value.exit_code == UsageError.exit_code
    assert saved_steps(tmp_path) == []


SMALL_STEPS = {"learning_rate": 0.01}


def test_run_ends_after_too_many_bad_steps_in_a_row_and_keeps_the_work(make: Any, tmp_path: Any):
    job = make(
        num_train_steps=50,
        save_interval_steps=20,
        bad_steps=[3, *range(6, 40)],
        max_consecutive_skipped_steps=4,
        learner=SMALL_STEPS,
    )
    with pytest.raises(NonFiniteError) as caught:
        job.executor.run(job.state, 0)
    assert caught.value.exit_code == 65
    message = str(caught.value)
    assert "after step 9" in message and "max_consecutive_skipped_steps=4" in message
    job.executor.checkpoints.wait_until_finished()
    [step] = saved_steps(tmp_path)
    [restored] = restore(job, step)
    # Steps that were under way when step 9 was reported are saved too.
    assert step in (9, 10)
    assert restored.metadata[SKIPPED_STEPS] == {"in_a_row": step - 5, "in_all": step - 4}
    # The weights are those of a run that never saw the later steps.
    short = make(num_train_steps=5, saves=False, bad_steps=[3], learner=SMALL_STEPS)
    expected, _ = short.executor.run(short.state, 0)
    jax.tree.map(np.testing.assert_array_equal, restored.state.params, expected.params)


def test_run_that_fails_at_its_last_step_fails_again_when_it_is_repeated(make: Any):
    options = {"bad_steps": [4, 5, 6], "learner": SMALL_STEPS}
    job = make(num_train_steps=6, max_consecutive_skipped_steps=3, **options)
    with pytest.raises(NonFiniteError):
        job.executor.run(job.state, 0)
    [restored] = restore(job, 6)

    def repeat(limit: int) -> int:
        limits = {"num_train_steps": 6, "max_consecutive_skipped_steps": limit}
        again = make(saves=False, **limits, **options)
        again.executor.train_programs.skipped.restore(restored.metadata[SKIPPED_STEPS])
        return again.executor.run(restored.state, 6)[1]

    with pytest.raises(NonFiniteError) as caught:
        repeat(3)
    assert caught.value.exit_code == 65
    assert repeat(4) == 6


@pytest.mark.parametrize("num_train_steps", [100, 3])
def test_run_without_any_valid_step_ends_early_and_saves_nothing(
    make: Any, tmp_path: Any, num_train_steps: int
):
    steps = {"num_train_steps": num_train_steps, "save_interval_steps": 50}
    job = make(bad_steps=range(1, 100), learner=SMALL_STEPS, **steps)
    with pytest.raises(NonFiniteError):
        job.executor.run(job.state, 0)
    assert len(job.recorder.events) <= 12
    job.executor.checkpoints.close()
    assert not saved_steps(tmp_path)


def test_state_that_is_not_finite_ends_the_run_and_no_checkpoint_is_replaced(
    make: Any, tmp_path: Any
):
    """A step that is applied although its gradient is NaN, and checkpoints of which one is kept."""
    learner = {**SMALL_STEPS, "on_nonfinite": None}
    intervals = {"save_interval_steps": 4, "save_max_to_keep": 1}
    job = make(num_train_steps=50, bad_steps=[6], learner=learner, **intervals)
    with pytest.raises(NonFiniteError, match="step 8.*params/linear/w"):
        job.executor.run(job.state, 0)
    job.executor.checkpoints.close()
    assert saved_steps(tmp_path) == [4]


def test_a_signal_ends_training_with_a_save(make: Any):
    job = make(num_train_steps=50, save_interval_steps=20, stop_at=3)
    state, step = job.executor.run(job.state, 0)
    # The flag goes up when step 3 is reported, at most one step behind.
    assert step in (3, 4)
    assert job.recorder.events[-1] == "save"
    [restored] = restore(job, step)
    assert step == int(state.step) == int(restored.state.step)


def test_save_request_saves_between_the_intervals(make: Any, tmp_path: Any):
    job = make(num_train_steps=8, save_interval_steps=6, save_at={2})
    _, step = job.executor.run(job.state, 0)
    assert step == 8
    job.executor.checkpoints.close()
    # The flag goes up when step 2 is reported, at most one step behind.
    [on_demand] = set(saved_steps(tmp_path)) - {6, 8}
    assert on_demand in (2, 3)
    assert job.recorder.messages == [f"saved step {on_demand} on SIGUSR1"]


def test_save_request_can_end_the_run(make: Any, tmp_path: Any):
    job = make(num_train_steps=50, save_interval_steps=20, save_at={2}, exits_then=True)
    _, step = job.executor.run(job.state, 0)
    job.executor.checkpoints.close()
    assert step in (2, 3)
    assert saved_steps(tmp_path) == [step]
    assert job.executor.signals.exit_code == 0


def test_save_request_without_checkpoints_saves_nothing_and_is_reported(make: Any, tmp_path: Any):
    job = make(saves=False, num_train_steps=5, save_interval_steps=1, save_at={2}, exits_then=True)
    job.executor.run(job.state, 0)
    assert job.recorder.events == [f"step {step}" for step in range(1, 6)]
    assert not (tmp_path / "checkpoints").exists()
    assert job.recorder.messages == ["not saved: the run has --noenable_checkpoint_saving"]


@pytest.mark.parametrize(("eval_batches", "rows"), [(1, {"eval/points": 8}), (None, {})])
def test_evaluation_of_some_batches_saves_its_position_and_that_of_all_does_not(
    make: Any, eval_batches: int | None, rows: dict[str, int]
):
    intervals = {"eval_interval_steps": 2, "save_interval_steps": 2}
    job = make(num_train_steps=4, eval_batches=eval_batches, **intervals)
    job.executor.run(job.state, 0)
    states = restore(job, 2)[0].input_states
    result = {name: state["position"]["rows_done"] for name, state in states.items()}
    # One batch of 8 rows was evaluated, after step 2.
    assert result == {"train/Points": 16, **rows}


def test_decoding_starts_after_n_steps(make: Any):
    job = make(
        num_train_steps=6, saves=False, decode_interval_steps=2, decode_start_after_n_steps=3
    )
    state, _ = job.executor.run(job.state, 0)
    assert [event for event in job.recorder.events if "decode" in event] == ["decode 4"]
    assert job.executor.decode(state, 2) == {}
    job.executor.train.decode_start_after_n_steps = 100
    assert job.executor.decode(state, 5) == {}
    assert job.executor.decode(state, 6)  # the last step


class StopsAt(StoppingRule):
    """Stops at a step, and keeps what it was shown."""

    step: int
    sees: str = "points/loss"

    def should_stop(self, metrics: Any, step: int) -> bool:
        assert self.sees in metrics
        return step == self.step


class FallsBelow(StoppingRule):
    """Stops when the loss of a training step falls below a limit; keeps the losses."""

    limit: float
    losses: Any = None

    def asks_each_step(self) -> bool:
        return True

    def should_stop(self, metrics: Any, step: int) -> bool:
        self.losses = {**(self.losses or {}), step: metrics["train_step/loss"]}
        return metrics["train_step/loss"] < self.limit


def test_early_stopping_with_the_metrics_of_each_training_step(make: Any):
    job = make(num_train_steps=9, summary_interval_steps=1, saves=False, learner=SMALL_STEPS)
    losses: dict[int, float] = {}
    job.recorder.train_metrics = lambda step, result: losses.update({step: result["loss"]})
    job.executor.run(job.state, 0)
    lowest = min(range(1, 9), key=losses.__getitem__)
    assert lowest > 1
    rule = FallsBelow(limit=losses[lowest] * 1.0001)
    job = make(num_train_steps=9, saves=False, learner=SMALL_STEPS, rule=rule)
    _, step = job.executor.run(job.state, 0)
    assert step == lowest
    assert rule.losses == pytest.approx({step: losses[step] for step in range(1, lowest + 1)})


def test_early_stopping_ends_a_run_with_a_save(make: Any, tmp_path: Any):
    intervals = {"eval_interval_steps": 2, "save_interval_steps": 30}
    job = make(num_train_steps=50, rule=StopsAt(step=4), **intervals)
    state, step = job.executor.run(job.state, 0)
    assert (int(state.step), step) == (4, 4)
    assert job.executor.has_stopped_early
    assert job.recorder.messages == ["stopped early after step 4: StopsAt says so"]
    metadata = restore(job, 4)[0].metadata
    assert saved_steps(tmp_path) == [4]
    assert metadata["early_stopping"]["stopped_at"] == 4
    # The same run again has nothing left to do.
    again = make(num_train_steps=50, saves=False, rule=StopsAt(step=4))
    again.executor.early_stop.restore(metadata["early_stopping"], report=print)
    assert again.executor.run(again.state, 4)[1] == 4
