"""Histograms and images of layers: their values, and when they are computed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.base_layer import SUMMARIES, SUMMARY_ARRAYS, BaseLayer
from layerkit.base.step_reports import LOG_EDGES, BinCounts, Summary
from layerkit.config import sub_config_field
from layerkit.errors import ConfigError
from layerkit.layers.transformer.pipeline import Pipeline
from layerkit.layers.transformer.repeat import Repeat

X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


class Drawing(BaseLayer):
    """A layer that doubles its input and reports it."""

    def fprop(self, x):
        self.add_summary("mean", jnp.mean(x), verbosity=4)
        self.add_summary("x", x, kind="histogram")
        self.add_summary("picture", jnp.abs(x)[:, None, :, None], kind="image", verbosity=2)
        return 2 * x


def arrays_of(layer):
    variables = layer.init(jax.random.key(0))
    _, sown = layer.apply(variables, X, mutable=[SUMMARY_ARRAYS])
    return sown[SUMMARY_ARRAYS]


def assert_counts(counts, values):
    expected, _ = np.histogram(values, np.asarray(LOG_EDGES, np.float32))
    np.testing.assert_array_equal(counts, expected)


def test_counts_equal_those_of_numpy():
    edges = (-1.0, 0.0, 0.5, 2.0)
    result = BinCounts.of(X, edges, np.where(X > 1, 0.0, 2.0).astype(np.float32))
    kept = X[X <= 1]
    np.testing.assert_array_equal(
        result.counts, 2 * np.histogram(np.clip(kept, -1, None), edges)[0]
    )
    assert float(result.sum) == pytest.approx(2 * kept.sum(), rel=1e-5)
    assert float(result.sum_of_squares) == pytest.approx(2 * np.square(kept).sum(), rel=1e-5)


def test_nan_counts_in_the_last_bin_unless_its_weight_is_0():
    values = np.array([0.5, np.nan], np.float32)
    result = BinCounts.of(values, (0.0, 1.0, 2.0))
    np.testing.assert_array_equal(result.counts, [1, 1])
    assert np.isnan(result.sum) and np.isnan(result.sum_of_squares)
    assert float(BinCounts.of(values, (0.0, 1.0, 2.0), np.array([1.0, 0.0])).sum) == 0.5


def test_arrays_are_computed_if_their_collection_is_mutable():
    (x,), (picture,) = (arrays_of(Drawing())[name] for name in ("x", "picture"))
    assert_counts(x.value.counts, X)
    assert (x.kind, x.verbosity) == ("histogram", 3)
    # At most three rows, from 0 to 1 as bytes.
    np.testing.assert_array_equal(
        picture.value[:, 0, :, 0], np.round(np.clip(np.abs(X[:3]), 0, 1) * 255)
    )
    assert picture.value.dtype == jnp.uint8
    assert picture.verbosity == 2


def test_placeholders_without_arrays_are_reported_at_other_steps():
    _, sown = Drawing().apply({}, X, mutable=[SUMMARIES])
    assert sown[SUMMARIES]["x"] == (Summary(None, "histogram"),)
    assert sown[SUMMARIES]["mean"] == (Summary(X.mean(), "scalar", 4),)
    (mean,) = jax.tree.leaves(sown)
    assert mean == X.mean()
    # The program has no pass over the edges.
    program = jax.make_jaxpr(lambda x: Drawing().apply({}, x, mutable=[SUMMARIES])[1])(X)
    assert "scan" not in str(program)
    np.testing.assert_array_equal(Drawing().apply({}, X), 2 * X)


def test_repeated_layers_report_one_histogram_each():
    layer = Repeat.HParams.config(sub_tpl=Drawing.HParams.config(), num_repeats=3).Instantiate()
    (x,) = arrays_of(layer)["sub"]["x"]
    assert x.value.counts.shape == (3, len(LOG_EDGES) - 1)
    for depth in range(3):
        assert_counts(x.value.counts[depth], X * 2**depth)


@pytest.mark.parametrize("repeats", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_pipeline_stages_report_the_whole_batch(repeats):
    layer = Pipeline.HParams.config(
        stage_tpl=Drawing.HParams.config(),
        num_stages=2,
        num_microbatches=2,
        circular_repeats=repeats,
    ).Instantiate()
    result = arrays_of(layer)["stage"]
    counts, images = (np.asarray(jax.tree.leaves(result[name])[0]) for name in ("x", "picture"))
    counts, images = counts.reshape(2 * repeats, -1), images.reshape(2 * repeats, 2, 1, 3, 1)
    for depth in range(2 * repeats):
        assert_counts(counts[depth], X * 2**depth)
        of_first = np.clip(np.abs(X[::2] * 2**depth), 0, 1)  # microbatches are strided
        np.testing.assert_array_equal(images[depth, :, 0, :, 0], np.round(of_first * 255))


class Wrong(BaseLayer):
    sub_tpl: Any = sub_config_field(None)

    def fprop(self, x):
        self.add_summary("x", x, kind="image")
        return x


def test_image_of_another_shape_raises(raises):
    field = "shape of the image summary"
    with raises(ConfigError, owner="Wrong().x", field=field, value=[4, 3]):
        Wrong().apply({}, X, mutable=[SUMMARY_ARRAYS])
