"""Weights: distributions of the initializers, their fans and dtypes, and boxes."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import meta

from layerkit.base.weights import (
    WeightBox,
    WeightHParams,
    WeightInit,
    draw_boxed,
    floating_dtype,
    is_box,
    logical_axes,
    unbox,
)
from layerkit.errors import ConfigError

KEY = jax.random.key(0)
SHAPE = (100, 400)
WEIGHT = WeightHParams(SHAPE, axes=("embed", "mlp"))


def draw(init, weight=WEIGHT, dtype=jnp.float32):
    return np.asarray(
        draw_boxed(KEY, weight=weight, init=init, dtype=dtype, is_factor=True).value, np.float64
    )


def test_xavier_is_uniform_within_its_bound():
    values = draw(WeightInit.Xavier(2.0))
    bound = 2.0 * math.sqrt(6.0 / (100 + 400))
    assert np.abs(values).max() <= bound
    assert np.abs(values).max() > 0.999 * bound
    # A uniform distribution in ±b has the standard deviation b/√3; 40,000 draws.
    assert values.std() == pytest.approx(bound / math.sqrt(3.0), rel=0.02)
    assert abs(values.mean()) < 4.0 * bound / math.sqrt(3.0 * values.size)


@pytest.mark.parametrize(
    ("shape", "last_axes"),
    [
        # A projection of 6 dims to 2 heads of 4, as Praxis stores it and as this library stores
        # that of the output.
        ((6, 2, 4), None),
        ((2, 4, 6), (0, 1)),
    ],
)
def test_fans_of_the_last_axes_are_those_of_praxis(shape, last_axes):
    weight = WeightHParams(shape, axes=("x",) * 3, fan_in_dims=(0,), last_axes=last_axes)
    # Sizes of the last two axes in Praxis, 2 and 4, times that of the first, 6.
    assert weight.fans(WeightInit.XavierLastAxes()) == (12, 24)
    assert weight.fans(WeightInit.Xavier()) == (shape[0], shape[2])
    values = draw(WeightInit.XavierLastAxes(2.0), weight)
    bound = 2.0 * math.sqrt(6.0 / 36)
    assert 0.8 * bound < np.abs(values).max() <= bound


def test_gaussian_has_its_standard_deviation_and_tails():
    values = draw(WeightInit.Gaussian(0.5))
    assert values.std() == pytest.approx(0.5, rel=0.02)
    # 4.55 % of a normal distribution lie beyond two standard deviations.
    assert np.mean(np.abs(values) > 1.0) == pytest.approx(0.0455, abs=0.005)


def test_truncated_gaussian_is_cut_at_two_standard_deviations():
    values = draw(WeightInit.TruncatedGaussian(0.5))
    assert np.abs(values).max() <= 1.0
    assert np.abs(values).max() > 0.99
    # Cut at ±2σ a normal distribution keeps 0.8796 of its standard deviation.
    assert values.std() == pytest.approx(0.5 * 0.8796, rel=0.02)


def test_uniform_is_within_its_bound():
    values = draw(WeightInit.Uniform(0.3))
    assert 0.999 * 0.3 < np.abs(values).max() <= 0.3
    assert values.std() == pytest.approx(0.3 / math.sqrt(3.0), rel=0.02)


@pytest.mark.parametrize(
    ("shape", "fan_in_dims", "fan_out_dims", "fans"),
    [
        ((), None, None, (1, 1)),
        ((7,), None, None, (7, 7)),
        ((3, 5), None, None, (3, 5)),
        # A convolution: height and width count as input.
        ((3, 3, 16, 32), None, None, (144, 32)),
        # A query projection [embed, heads, head_dim] and its way back.
        ((64, 4, 16), (0,), (1, 2), (64, 64)),
        ((4, 16, 64), (0, 1), (2,), (64, 64)),
        # An embedding [vocab, embed], seen from the output side.
        ((1000, 8), (1,), (0,), (8, 1000)),
    ],
)
def test_fans_count_the_named_dimensions(shape, fan_in_dims, fan_out_dims, fans):
    weight = WeightHParams(
        shape, axes=(None,) * len(shape), fan_in_dims=fan_in_dims, fan_out_dims=fan_out_dims
    )
    assert weight.fans() == fans


def test_values_are_drawn_in_float32_and_cast():
    init = WeightInit.Gaussian()
    low, full = draw(init, dtype=jnp.bfloat16), draw(init)
    np.testing.assert_array_equal(low, full.astype(jnp.bfloat16))


@pytest.mark.parametrize("method", ["xavier", "gaussian", "truncated_gaussian", "uniform"])
def test_values_do_not_depend_on_x64_mode(method):
    init = WeightInit(method)
    plain = draw(init)
    with jax.enable_x64(new_val=True):
        np.testing.assert_array_equal(draw(init), plain)


def test_unknown_dtype_raises(raises):
    for value in ("bfloat61", "int8"):
        with raises(ConfigError, owner="Linear()", field="dtype", value=value):
            floating_dtype(value, field="dtype", owner="Linear()")


@pytest.mark.parametrize(
    ("shape", "init", "declared", "is_factor", "decays"),
    [
        ((2, 3), WeightInit.Xavier(), None, False, True),
        ((2, 3), WeightInit.Constant(0.0), None, False, False),
        ((2, 3), WeightInit.Constant(0.0), None, True, True),
        ((2, 3), WeightInit.Constant(0.0), True, False, True),
        ((2, 3), WeightInit.Xavier(), False, True, False),
        ((3,), WeightInit.Xavier(), None, False, False),
    ],
)
def test_matrices_decay_unless_the_declaration_says_otherwise(
    shape, init, declared, is_factor, decays
):
    weight = WeightHParams(shape, (None,) * len(shape), decays=declared)
    box = draw_boxed(KEY, weight=weight, init=init, dtype=jnp.float32, is_factor=is_factor)
    assert box.decays is decays


def test_unbox_and_logical_axes_of_a_tree():
    tree = {"a": WeightBox(jnp.zeros(2), ("norm",)), "b": {"c": jnp.ones(3)}}
    assert logical_axes(tree) == {"a": ("norm",), "b": {"c": None}}
    plain = unbox(tree)
    assert [is_box(leaf) for leaf in (tree["a"], plain["a"])] == [True, False]
    assert jax.tree.map(jnp.shape, plain) == {"a": (2,), "b": {"c": (3,)}}


def test_stacking_adds_the_axis_name_and_unstacking_removes_it():
    box = WeightBox(jnp.zeros((4, 2)), ("embed", "mlp"), WeightInit.FanIn(), (4, 2))
    params = {meta.PARTITION_NAME: "layers"}
    stacked = box.add_axis(0, params)
    assert stacked.axes == ("layers", "embed", "mlp")
    assert stacked.remove_axis(0, params).axes == ("embed", "mlp")
    assert stacked.replace_boxed(jnp.ones((3, 4, 2))).axes == stacked.axes
    # Each layer of a stack is drawn separately.
    assert (stacked.init, stacked.fans) == (WeightInit.FanIn(), (4, 2))
