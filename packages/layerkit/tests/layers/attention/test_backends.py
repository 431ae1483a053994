"""The choice of a backend is a table: what is asked on the left, what comes of it on the right."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest

from layerkit.layers.attention.backends import (
    AttentionCall,
    Backend,
    BackendRefusal,
    check_backend_name,
    select_backend,
)

# What cuDNN can do; each row of the tables changes one thing about it.
FUSABLE = AttentionCall(
    platform="gpu",
    dtype=jnp.bfloat16,
    head_dim=64,
    num_queries=128,
    num_keys=128,
    is_causal=True,
)

OBSTACLES = [
    ({"platform": "cpu"}, "it needs a GPU, not cpu"),
    ({"platform": "tpu"}, "it needs a GPU, not tpu"),
    ({"dtype": jnp.float32}, "it needs bfloat16 or float16, not float32"),
    ({"head_dim": 60}, "it needs heads of a multiple of 8 and at most 128, not 60"),
    ({"head_dim": 256}, "it needs heads of a multiple of 8 and at most 128, not 256"),
    ({"num_queries": 1}, "it needs as many queries as keys when causal, not 1 and 128"),
    ({"has_segments": True}, "it does not know segments or padding"),
    ({"has_logit_cap": True}, "it does not know a logit cap"),
    ({"has_dropout": True}, "it does not know our dropout"),
]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"platform": "cuda"},
        {"dtype": jnp.float16},
        {"head_dim": 128},
        {"is_causal": False},
        {"is_causal": False, "num_queries": 1},
    ],
)
def test_cudnn_is_taken_by_name_where_it_is_right(change):
    assert select_backend("cudnn", dataclasses.replace(FUSABLE, **change)) == Backend(
        "cudnn", "as asked"
    )


@pytest.mark.parametrize(("change", "reason"), OBSTACLES)
def test_cudnn_is_refused_with_the_reason(change, reason):
    with pytest.raises(BackendRefusal) as refusal:
        select_backend("cudnn", dataclasses.replace(FUSABLE, **change))
    assert str(refusal.value) == (
        f"attention backend 'cudnn' cannot do what is asked: {reason}. Use backend='xla' or 'auto'."
    )


def test_a_refusal_gives_every_reason():
    call = dataclasses.replace(FUSABLE, platform="cpu", has_segments=True)
    with pytest.raises(BackendRefusal) as refusal:
        select_backend("cudnn", call)
    assert str(refusal.value) == (
        "attention backend 'cudnn' cannot do what is asked: it needs a GPU, not cpu; it does not"
        " know segments or padding. Use backend='xla' or 'auto'."
    )


@pytest.mark.parametrize("change", [{}, *(change for change, _ in OBSTACLES)])
def test_xla_does_everything(change):
    assert select_backend("xla", dataclasses.replace(FUSABLE, **change)).name == "xla"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"platform": "cpu"}, "attention backend: xla (auto: cpu has no fused kernel)"),
        ({"platform": "tpu"}, "attention backend: xla (auto: tpu has no fused kernel)"),
        ({}, "attention backend: xla (auto: cudnn could, but is taken only by name)"),
        (
            {"has_segments": True},
            "attention backend: xla (auto: cudnn cannot, it does not know segments or padding)",
        ),
    ],
)
def test_auto_says_what_it_chose(change, line):
    assert select_backend("auto", dataclasses.replace(FUSABLE, **change)).describe() == line


def test_a_choice_by_name_says_so():
    assert select_backend("xla", FUSABLE).describe() == "attention backend: xla (as asked)"


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ValueError) as error:
        select_backend("cudn", FUSABLE)
    assert str(error.value) == (
        "backend='cudn' is not an attention backend; did you mean 'cudnn'?"
        " Backends: auto, xla, cudnn."
    )
    with pytest.raises(ValueError) as error:
        check_backend_name("flash", owner="Attention(lm)")
    assert str(error.value) == (
        "Attention(lm): backend='flash' is not an attention backend. Backends: auto, xla, cudnn."
    )
