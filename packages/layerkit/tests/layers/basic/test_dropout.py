"""Tests of dropout and droppath."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.base_layer import BaseLayer
from layerkit.config import sub_config_field
from layerkit.layers.basic.dropout import Dropout, StochasticResidual

ONES = np.ones((16, 8, 32), np.float32)


def dropped(layer, x=ONES, *, seed=0):
    return np.asarray(layer.apply({}, x, rngs={"random": jax.random.key(seed)}))


def test_evaluation_and_rate_zero_are_the_identity_without_a_key():
    np.testing.assert_array_equal(Dropout(rate=0.9).apply({}, ONES), ONES)
    np.testing.assert_array_equal(Dropout(rate=0.9, train=False).apply({}, ONES), ONES)
    np.testing.assert_array_equal(Dropout(rate=0.0, train=True).apply({}, ONES), ONES)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_drops_the_rate_and_scales_the_rest(rate):
    outputs = dropped(Dropout(rate=rate, train=True))
    kept = outputs != 0.0
    np.testing.assert_allclose(outputs[kept], 1.0 / (1.0 - rate), rtol=1e-6)
    # 4096 draws: four standard deviations of their mean.
    assert abs(kept.mean() - (1.0 - rate)) < 4.0 * np.sqrt(rate * (1.0 - rate) / ONES.size)


def test_mask_depends_on_the_key():
    layer = Dropout(rate=0.5, train=True)
    np.testing.assert_array_equal(dropped(layer), dropped(layer))
    assert np.any(dropped(layer) != dropped(layer, seed=1))


def test_dropped_nan_does_not_reach_the_outputs():
    layer = Dropout(rate=0.5, train=True)
    dead = dropped(layer) == 0.0
    outputs = dropped(layer, np.where(dead, np.nan, 1.0).astype(np.float32))
    assert np.all(np.isfinite(outputs))


@pytest.mark.parametrize("dims", [(1,), (-2,)])
def test_broadcast_dims_share_one_mask(dims):
    outputs = dropped(Dropout(rate=0.5, broadcast_dims=dims, train=True))
    assert outputs.shape == ONES.shape
    np.testing.assert_array_equal(outputs, np.repeat(outputs[:, :1], 8, axis=1))
    assert 0.0 < np.mean(outputs[:, 0] == 0.0) < 1.0
    assert np.any(dropped(Dropout(rate=0.5, train=True)) != outputs)


def test_dropout_keeps_the_compute_dtype():
    layer = Dropout(rate=0.5, train=True, fprop_dtype=jnp.bfloat16)
    outputs = layer.apply({}, ONES, rngs={"random": jax.random.key(0)})
    assert outputs.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(outputs == 0), dropped(layer) == 0)


class TwoDropouts(BaseLayer):
    first_tpl: Any = sub_config_field(Dropout.HParams, rate=0.5)
    second_tpl: Any = sub_config_field(Dropout.HParams, rate=0.5)

    def setup(self):
        self.create_child("first", self.first_tpl)
        self.create_child("second", self.second_tpl)

    def fprop(self, x):
        return self.first(x), self.first(x), self.second(x)


def test_layers_and_calls_have_different_masks():
    masks = TwoDropouts(train=True).apply({}, ONES, rngs={"random": jax.random.key(0)})
    assert not np.array_equal(masks[0], masks[1])
    assert not np.array_equal(masks[0], masks[2])
    assert not np.array_equal(masks[1], masks[2])


# StochasticResidual.


def add(layer, x, branch, seed=0, **fields):
    return layer.apply({}, x, branch, rngs={"random": jax.random.key(seed)}, **fields)


@pytest.mark.parametrize("by_argument", [False, True])
def test_droppath_drops_the_whole_branch_of_an_example(by_argument):
    layer = StochasticResidual(rate=0.0 if by_argument else 0.25, train=True)
    fields = {"rate": jnp.float32(0.25)} if by_argument else {}
    x = np.arange(4096, dtype=np.float32)[:, None, None] * np.ones((1, 2, 3), np.float32)
    found = np.asarray(add(layer, x, np.full_like(x, 3.0), **fields)) - x
    assert set(np.unique(found)) == {0.0, 4.0}  # 3 / (1 - 1/4)
    assert np.all(found == found[:, :1, :1])
    # The deviation of the share that is kept is √(3/16 / 4096) < 0.007.
    assert abs(np.mean(found == 4.0) - 0.75) < 0.03
    assert np.any(found != np.asarray(add(layer, x, np.full_like(x, 3.0), seed=1, **fields)) - x)


def test_droppath_is_a_sum_in_evaluation_or_at_rate_zero():
    x, branch = jnp.ones((4, 2)), jnp.full((4, 2), 3.0)
    for layer in (StochasticResidual(rate=0.5), StochasticResidual(rate=0.0, train=True)):
        np.testing.assert_array_equal(layer.apply({}, x, branch), x + branch)
    evaluated = StochasticResidual(rate=0.0).apply({}, x, branch, rate=jnp.float32(0.5))
    np.testing.assert_array_equal(evaluated, x + branch)
