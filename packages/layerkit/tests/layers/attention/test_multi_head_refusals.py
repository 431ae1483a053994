"""Errors of MultiHeadAttention, and its log of the selected backend."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import pytest

from layerkit.errors import ConfigError
from layerkit.layers.attention.multi_head import MultiHeadAttention
from layerkit.layers.basic.normalizations import RmsNorm
from layerkit.ops.attention.backends import UnsupportedBackendError
from layerkit.ops.attention.masks import AttentionMask

RMS_NORM = RmsNorm.HParams.config()


def make(**fields):
    return MultiHeadAttention(**{"input_dims": 8, "num_heads": 4, **fields})


def trace(layer):
    """Trace the layer without running it."""
    batch, length = 2, 6
    x = jax.ShapeDtypeStruct((batch, length, 8), jnp.float32)
    mask = AttentionMask.causal_mask(batch, length)
    weights = jax.eval_shape(make().init, jax.random.key(0))
    jax.eval_shape(
        lambda w, x: layer.apply(w, x, mask=mask, positions=mask.query_positions), weights, x
    )


def test_selected_backend_is_logged(caplog):
    def messages(**fields):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="layerkit"):
            trace(make(**fields))
        return caplog.messages

    assert messages() == ["attention backend: xla (auto: cpu has no fused kernel)"]
    assert messages(backend="xla") == ["attention backend: xla (as requested)"]


@pytest.mark.parametrize("train", [False, True])
def test_dropout_is_unsupported_in_training_only(raises, train):
    layer = make(backend="cudnn", dropout_rate=0.1, logit_cap=2.0).clone(train=train)
    with raises(UnsupportedBackendError, field="backend", value="cudnn") as error:
        trace(layer)
    assert ("no dropout" in error.value.expected) is train
    assert "no logit cap" in error.value.expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_heads", 3),
        ("num_kv_heads", 8),
        ("window", 0),
        ("backend", "cuddn"),
        ("kernel_blocks", (64, 48)),
    ],
)
def test_init_raises_for_an_invalid_field(raises, field, value):
    with raises(ConfigError, owner="MultiHeadAttention()", field=field, value=value):
        make(**{"qk_norm_tpl": RMS_NORM, field: value}).init(jax.random.key(0))
