"""MultiHeadAttention tells which backend it takes, and refuses what does not fit before it runs."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import pytest

from layerkit.errors import ConfigError
from layerkit.layers.attention.backends import BackendRefusal
from layerkit.layers.attention.multi_head import MultiHeadAttention
from layerkit.layers.masks import AttentionMask
from layerkit.layers.normalizations import RmsNorm

RMS_NORM = RmsNorm.HParams.config()


def make(**fields):
    return MultiHeadAttention(**{"input_dims": 8, "num_heads": 4, **fields})


def trace(layer):
    """Everything but the computation."""
    batch, length = 2, 6
    x = jax.ShapeDtypeStruct((batch, length, 8), jnp.float32)
    mask = AttentionMask.causal_mask(batch, length)
    weights = jax.eval_shape(make().init, jax.random.key(0))
    jax.eval_shape(
        lambda w, x: layer.apply(w, x, mask=mask, positions=mask.query_positions), weights, x
    )


def test_backend_is_chosen_reported_and_refused(caplog):
    def reported(**fields):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="layerkit"):
            trace(make(**fields))
        return caplog.messages

    assert reported() == ["attention backend: xla (auto: cpu has no fused kernel)"]
    assert reported(backend="xla") == ["attention backend: xla (as asked)"]
    refusal = (
        "attention backend 'cudnn' cannot do what is asked: it needs a GPU, not cpu; it needs"
        " bfloat16 or float16, not float32; it needs heads of a multiple of 8 and at most 128, not"
        " 2. Use backend='xla' or 'auto'."
    )
    with pytest.raises(BackendRefusal) as error:
        trace(make(backend="cudnn"))
    assert str(error.value) == refusal


def test_dropout_is_an_obstacle_in_training_only():
    layer = make(backend="cudnn", dropout_rate=0.1, logit_cap=2.0)
    for train in (False, True):
        with pytest.raises(BackendRefusal) as error:
            trace(layer.clone(train=train))
        assert ("our dropout" in str(error.value)) is train
        assert "a logit cap" in str(error.value)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"num_heads": 3},
            "num_heads=3 does not divide input_dims=8; set dim_per_head, or num_heads=2",
        ),
        (
            {"num_kv_heads": 3},
            "num_kv_heads=3 does not divide num_heads=4; the nearest that does is 2",
        ),
        (
            {"num_kv_heads": 8},
            "num_kv_heads=8 does not divide num_heads=4; the nearest that does is 4",
        ),
        (
            {"backend": "cuddn"},
            "backend='cuddn' is not an attention backend; did you mean 'cudnn'?"
            " Backends: auto, xla, cudnn, pallas.",
        ),
        (
            {"context_parallel": "rings"},
            "context_parallel='rings' is not a way of context parallelism; did you mean 'ring'?"
            " Ways: all_gather, ring.",
        ),
        (
            {"window": 0},
            "window=0 must be at least 1, a query's own position, or None for no window",
        ),
        (
            {"qk_norm_tpl": RMS_NORM, "qk_norm_over": "heads"},
            "qk_norm_over='heads' is not an extent; did you mean 'head'?"
            " Extents: head, projection.",
        ),
    ],
)
def test_wrong_fields_are_refused(fields, text):
    with pytest.raises(ValueError) as error:
        make(**fields).init(jax.random.key(0))
    assert str(error.value) == f"MultiHeadAttention(): {text}"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_heads", 0),
        ("num_kv_heads", 0),
        ("dim_per_head", 0),
        ("logit_cap", 0.0),
        ("logit_scale", 0.0),
    ],
)
def test_init_raises_for_an_invalid_field(raises, field, value):
    with raises(ConfigError, owner="MultiHeadAttention()", field=field, value=value):
        make(**{field: value}).init(jax.random.key(0))
