"""Weights in integers, compared with NumPy, with Qwix and with exact products."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.weight_formats import NF4_VALUES, WeightFormat, quantize
from layerkit.errors import ConfigError

FORMATS = ["int8", "int8:4", "int4", "int4:8", "nf4", "nf4:8"]


def draw(*shape):
    # Rows of very different sizes, and a group of zeros.
    rng = np.random.default_rng(0)
    w = (rng.normal(size=shape) * rng.uniform(0.1, 3, shape[:-1] + (1,))).astype(np.float32)
    w[:8, 0] = 0
    return w


def stored(w, text, contracted=(0,)):
    form = WeightFormat.parse(text)
    return quantize(
        jnp.asarray(w),
        kind=form.kind,
        scale_shape=form.scale_shape(w.shape, contracted),
        packed_axis=None if form.kind == "int8" else contracted[-1],
    )


def integers(weight):
    """Return the integers of `[in, out]`, unpacked."""
    values = np.asarray(weight.values)
    if weight.kind == "int8":
        return values
    assert values.dtype == np.uint8
    pairs = np.stack([values % 16, values // 16], axis=1).reshape(weight.shape).astype(int)
    return pairs if weight.kind == "nf4" else pairs - 8


def expected(w, text):
    """Return the rounded values of `[in, out]` by the definition, one group after the other."""
    kind, _, group = text.partition(":")
    size, result = int(group or len(w)), np.zeros(w.shape)
    for start in range(0, len(w), size):
        for out in range(w.shape[1]):
            part = w[start : start + size, out].astype(np.float64)
            largest = np.abs(part).max()
            if largest == 0:
                continue
            if kind == "nf4":
                values = np.array(NF4_VALUES) * largest
                nearest = np.abs(part[:, None] - values).argmin(axis=1)
                result[start : start + size, out] = values[nearest]
            else:
                most = {"int8": 127, "int4": 7}[kind]
                scale = largest / (most + 0.5)
                q = np.clip(np.round(part / scale), -most, most)
                result[start : start + size, out] = q * scale
    return result


@pytest.mark.parametrize("text", FORMATS)
def test_restored_weight_equals_numpy(text):
    w = draw(16, 6)
    np.testing.assert_allclose(
        stored(w, text).restored(jnp.float32), expected(w, text), rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("text", FORMATS)
def test_integers_and_scales_equal_those_of_qwix(text):
    qwix = pytest.importorskip("qwix")
    w = draw(16, 6)
    kind, _, group = text.partition(":")
    theirs = qwix.quantize(
        w,
        "nf4" if kind == "nf4" else getattr(jnp, kind),
        channelwise_axes=[1],
        tiled_axes={0: int(group)} if group else {},
    )
    ours = stored(w, text)
    # Qwix rounds an input of the largest size to -128 or -127, by the last bit of a division.
    least = 0 if kind == "nf4" else -jnp.iinfo(kind).max
    np.testing.assert_array_equal(integers(ours), np.maximum(theirs.qvalue, least))
    np.testing.assert_allclose(ours.scale, theirs.scale, rtol=1e-6)


@pytest.mark.parametrize(
    ("text", "shape", "contracted", "scales"),
    [
        ("int8", (16, 6), (0,), (1, 6)),
        ("int4:4", (16, 6), (0,), (4, 6)),
        ("int8", (4, 8, 6), (0, 1), (1, 1, 6)),
        ("int4:4", (4, 8, 6), (0, 1), (4, 2, 6)),
        ("int4:8", (4, 8, 6), (0, 1), (4, 1, 6)),
        ("int4:16", (4, 8, 6), (0, 1), (2, 1, 6)),
        ("nf4:2", (3, 4, 6), (1,), (3, 2, 6)),
    ],
)
def test_scales_are_shared_by_consecutive_inputs(text, shape, contracted, scales):
    form = WeightFormat.parse(text)
    assert form.scale_shape(shape, contracted) == scales
    w = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    if contracted[0] == 0:
        merged, result = jax.jit(
            lambda: (
                stored(w.reshape(-1, shape[-1]), text).restored(jnp.float32),
                stored(w, text, contracted).restored(jnp.float32),
            )
        )()
        np.testing.assert_array_equal(result.reshape(merged.shape), merged)


@pytest.mark.parametrize("text", ["int3", "int8:0", "int4:", "fp8", 8])
def test_unknown_format_is_an_error(raises, text):
    with raises(ConfigError, field="weight_format", value=text):
        WeightFormat.parse(text)


@pytest.mark.parametrize(("group", "shape"), [(5, (16, 6)), (32, (16, 6)), (12, (4, 8, 6))])
def test_group_that_does_not_divide_the_inputs_is_an_error(raises, group, shape):
    form = WeightFormat.parse(f"int4:{group}")
    with raises(ConfigError, field="group size of weight_format", value=group):
        form.scale_shape(shape, tuple(range(len(shape) - 1)), owner="Linear(up).w")


def test_compute_dtype_is_that_of_the_layer():
    restored = jax.eval_shape(lambda: stored(draw(16, 6), "int4").restored(jnp.bfloat16))
    assert restored.dtype == jnp.bfloat16
