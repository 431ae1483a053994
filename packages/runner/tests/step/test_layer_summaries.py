"""Histograms and images of layers: the same on every mesh, and computed at summary steps alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.step_reports import LOG_EDGES
from layerkit.config.nested_map import NestedMap
from layerkit.layers.basic.linears import Linear
from layerkit.layers.transformer.repeat import Repeat
from layerkit_runner.observers import Histogram
from layerkit_runner.step.layer_summaries import array_summaries, has_arrays, split_layers
from layerkit_runner.step.metrics import GLOBAL_BATCH


class Drawn(Linear):
    """Reports its inputs, and each row as an image of one line."""

    def fprop(self, x: jax.Array) -> jax.Array:
        self.add_summary("inputs", x, kind="histogram")
        self.add_summary("rows", jnp.abs(x)[:, None, :, None], kind="image", verbosity=2)
        return super().fprop(x)


def task_of(tiny: SimpleNamespace, *, verbosity: int = 3, **train: Any) -> Any:
    config = tiny.task_config(linear_tpl=Drawn.HParams.config(), train=train)
    return config.set(summary_verbosity=verbosity).Instantiate()


X = np.random.default_rng(3).normal(size=(16, 2)).astype(np.float32)
BATCH = NestedMap(x=X, y=np.zeros(16, np.float32), weights=np.ones(16, np.float32))


@pytest.mark.parametrize(
    ("kind", "microbatches"),
    [
        pytest.param("one device", 1, marks=pytest.mark.slow),
        ("mesh", 1),
        pytest.param("mesh", 2, marks=pytest.mark.slow),
        ("pmap", 2),
    ],
)
def test_summaries_are_equal_on_every_mesh(
    tiny: SimpleNamespace, start: Any, kind: str, microbatches: int
):
    task, partitioner = task_of(tiny, gradient_accumulation_steps=microbatches), start(kind)
    partitioner.bind(task)
    state = partitioner.init_fn(task)()
    result = partitioner.summary_step_fn(task)(state, partitioner.put_batch(BATCH))
    counts, images = split_layers(jax.device_get(result))
    histograms = {name: Histogram.of(bins).trimmed() for name, bins in counts.items()}
    (spread,) = histograms.values()
    counts, edges = np.histogram(X, np.asarray(LOG_EDGES, np.float32))
    filled = np.flatnonzero(counts)
    np.testing.assert_array_equal(spread.counts, counts[filled[0] : filled[-1] + 1])
    np.testing.assert_allclose(spread.edges, edges[filled[0] : filled[-1] + 2])
    assert spread.norm == pytest.approx(np.linalg.norm(X))
    assert list(images) == [f"summaries/linear/rows/{row}" for row in range(3)]
    # A microbatch takes every second row of the batch, or of each device's two.
    kept = X[:3] if microbatches == 1 else X[[0, 2, 4]]
    for image, row in zip(images.values(), kept, strict=True):
        np.testing.assert_array_equal(image[0, :, 0], np.round(np.clip(np.abs(row), 0, 1) * 255))


@pytest.mark.parametrize(("verbosity", "kinds"), [(3, (1, 1)), (2, (0, 1)), (0, (0, 0))])
def test_verbosity_of_the_task_selects_summaries(tiny: SimpleNamespace, verbosity: int, kinds: Any):
    task = task_of(tiny, verbosity=verbosity)
    state = task.init_state(jax.random.key(0))
    result = jax.eval_shape(lambda: task.summary_step(state, BATCH, GLOBAL_BATCH))
    assert tuple(map(len, result)) == kinds
    _, (_, scalars) = jax.eval_shape(lambda: task.train_step(state, BATCH, GLOBAL_BATCH))
    assert has_arrays(scalars) == any(kinds)
    assert ("summaries/mean_prediction" in scalars) == (verbosity == 3)


def test_each_repeated_layer_has_a_summary():
    layer = Repeat.HParams.config(
        sub_tpl=Drawn.HParams.config(input_dims=2, output_dims=2), num_repeats=2
    ).Instantiate()
    variables = layer.init(jax.random.key(0))

    def run(rows: Any, key: jax.Array) -> Any:
        del key
        return layer.apply(variables, rows, mutable=["summary_arrays"])[1]["summary_arrays"]

    result = jax.jit(
        lambda key: array_summaries(run, X, key, GLOBAL_BATCH, microbatches=1, verbosity=3)
    )(jax.random.key(0))
    counts, images = split_layers(jax.device_get(result))
    histograms = {name: Histogram.of(bins).trimmed() for name, bins in counts.items()}
    assert list(histograms) == [f"summaries/sub/inputs/layer_{layer}" for layer in range(2)]
    assert len(images) == 2 * 3
    after = X @ np.asarray(variables["params"]["sub"]["w"][0])
    second = images["summaries/sub/rows/layer_1/0"][0, :, 0]
    np.testing.assert_allclose(second, np.clip(np.abs(after[0]), 0, 1) * 255, atol=0.6)
    assert histograms["summaries/sub/inputs/layer_1"].norm == pytest.approx(np.linalg.norm(after))
