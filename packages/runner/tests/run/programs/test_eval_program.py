"""EvalProgram: means over a whole data set, each row once, and scores by example."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.base_model import WeightedScalar
from layerkit_runner.data.host_inputs import make_input
from layerkit_runner.errors import UsageError
from layerkit_runner.observers import Observer
from layerkit_runner.partitioning import Partitioner, PmapPartitioner, SpmdPartitioner
from layerkit_runner.run.programs.eval_program import EvalProgram


def make_program(
    tiny: SimpleNamespace, partitioner: Partitioner, points: Any, model: Any = None
) -> tuple[EvalProgram, Any]:
    """A program over these points, and a state."""
    partitioner.start()
    config = tiny.task_config()
    if model is not None:
        config.model = model.HParams.config()
    config.model.linear_tpl.weight_axes = (None, None)
    task = config.Instantiate()
    partitioner.bind(task)
    dataset = make_input(points.set(percore_batch_size=1.0), partitioner)
    program = EvalProgram(task, partitioner, dataset, "points")
    return program, partitioner.init_fn(task)()


def losses_of(num_rows: int) -> np.ndarray:
    rows = np.arange(num_rows)
    return 0.5 * np.square(rows % 5 + 1 - rows % 3)


@pytest.mark.parametrize("num_rows", [5, 8, 19])
@pytest.mark.parametrize("partitioner", [SpmdPartitioner, PmapPartitioner])
def test_every_row_counts_once(
    tiny: SimpleNamespace, recorder: Any, partitioner: Any, num_rows: int
):
    points = tiny.Points.HParams.config(num_rows=num_rows)
    program, state = make_program(tiny, partitioner(), points)
    for step in (3, 4):
        means = program.run(state, step, recorder)
        assert recorder.evals[-1] == (step, "points", means)
        loss = pytest.approx(losses_of(num_rows).mean(), rel=1e-6)
        assert means == {"loss": loss, "total_weight": num_rows}


@pytest.mark.parametrize("reset_for_eval", [True, False])
@pytest.mark.parametrize("partitioner", [SpmdPartitioner, PmapPartitioner])
def test_tracing_keeps_the_position_of_the_data_set(
    tiny: SimpleNamespace, partitioner: Any, reset_for_eval: bool
):
    reads = {} if reset_for_eval else {"repeat": True, "eval_loop_num_batches": 1}
    points = tiny.Points.HParams.config(num_rows=19, reset_for_eval=reset_for_eval, **reads)
    program, state = make_program(tiny, partitioner(), points)
    expected, _ = make_program(tiny, partitioner(), points.clone())
    abstract_state = program.partitioner.abstract_state(program.task)
    for step in (1, 2):
        before = program.dataset.get_state()
        names = program.trace(abstract_state)
        if step == 2 and reset_for_eval:
            assert names is None  # the data set has ended
        else:
            assert names == {"loss", "total_weight", "skipped_records"}
        assert program.dataset.get_state() == before
        assert program.run(state, step, Observer()) == expected.run(state, step, Observer())


@pytest.mark.parametrize("partitioner", [SpmdPartitioner, PmapPartitioner])
def test_metrics_of_the_data_set_see_the_score_of_each_example_once(
    tiny: SimpleNamespace, recorder: Any, partitioner: Any
):
    seen: list[dict[int, float]] = []

    class Rated(tiny.Points):
        """Its metric is the sum of the scores."""

        has_score_metrics = True

        def score_metrics(self, scores: Any) -> dict[str, float]:
            seen.append(dict(scores))
            return {"total": np.float64(sum(scores.values()))}

    points = Rated.HParams.config(num_rows=13, batch_padding_size=8)
    program, state = make_program(tiny, partitioner(), points)
    means = program.run(state, 3, recorder)
    assert list(seen[0]) == list(range(13))
    np.testing.assert_allclose(list(seen[0].values()), -losses_of(13), rtol=1e-6)
    assert means == {
        "loss": pytest.approx(losses_of(13).mean(), rel=1e-6),
        "total_weight": 13.0,
        "score/total": pytest.approx(-losses_of(13).sum(), rel=1e-6),
    }
    assert recorder.evals == [(3, "points", means)]


def test_model_without_scores_is_an_error_for_score_metrics(raises, tiny: SimpleNamespace):
    class Silent(tiny.Regression):
        """Says nothing of single examples."""

        def compute_loss(self, predictions: Any, batch: Any) -> Any:
            metrics, outputs = super().compute_loss(predictions, batch)
            del outputs.scores
            return metrics, outputs

    class Rated(tiny.Points):
        """Wants scores."""

        has_score_metrics = True

    program, state = make_program(tiny, SpmdPartitioner(), Rated.HParams.config(), model=Silent)
    with raises(UsageError, field="outputs", value=["errors"]):
        program.run(state, 3, Observer())


def test_skipped_records_are_reported_and_counted(tiny: SimpleNamespace, recorder: Any):
    class Holed(tiny.Points):
        """As if two of its records could not be read."""

        num_skipped = 2

    program, state = make_program(tiny, SpmdPartitioner(), Holed.HParams.config())
    assert program.run(state, 3, recorder)["skipped_records"] == 2.0
    assert recorder.messages == ["points: skipped 2 unreadable records so far"]


def make_careless(tiny: SimpleNamespace, weight: Any) -> Any:
    """A model whose `error` has the weight that `weight(batch)` returns."""

    class Careless(tiny.Regression):
        """Averages over all rows."""

        def compute_loss(self, predictions: Any, batch: Any) -> Any:
            metrics, outputs = super().compute_loss(predictions, batch)
            return {**metrics, "error": WeightedScalar.of(1.0, weight(batch))}, outputs

    return Careless


@pytest.mark.parametrize("partitioner", [SpmdPartitioner, PmapPartitioner])
def test_eval_program_with_metric_that_counts_padding_warns_once(
    tiny: SimpleNamespace, recorder: Any, partitioner: Any
):
    model = make_careless(tiny, lambda batch: len(batch.y))
    points = tiny.Points.HParams.config(num_rows=13)
    program, state = make_program(tiny, partitioner(), points, model=model)
    program.run(state, 3, recorder)
    program.run(state, 4, recorder)
    [warning] = recorder.messages
    for fact in ("points", " error ", "example_weights(batch", "Careless.compute_loss"):
        assert fact in warning
    assert "loss " not in warning


@pytest.mark.parametrize(
    ("num_rows", "weight"),
    [
        (16, lambda batch: len(batch.y)),  # no row of padding
        (13, lambda batch: 2 * len(batch.y)),  # not the number of rows
        # 8 + 5 + 3: the number of all rows by chance.
        (13, lambda batch: jnp.sum(batch.weights) + 3 * (jnp.sum(batch.weights) == 5)),
        (13, lambda batch: jnp.sum(batch.weights)),
    ],
)
def test_eval_program_with_sound_weights_does_not_warn(
    tiny: SimpleNamespace, recorder: Any, num_rows: int, weight: Any
):
    points = tiny.Points.HParams.config(num_rows=num_rows)
    model = make_careless(tiny, weight)
    program, state = make_program(tiny, SpmdPartitioner(), points, model=model)
    program.run(state, 3, recorder)
    assert recorder.messages == []
