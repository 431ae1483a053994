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

# What every kernel can do; each row of the tables changes one thing about it.
FUSABLE = AttentionCall(
    platform="gpu",
    dtype=jnp.bfloat16,
    head_dim=64,
    value_dim=64,
    num_queries=128,
    num_keys=128,
    is_causal=True,
)
ON_TPU = {"platform": "tpu"}

CUDNN_OBSTACLES = [
    ({"platform": "cpu"}, "it needs a GPU, not cpu"),
    ({"platform": "tpu"}, "it needs a GPU, not tpu"),
    ({"has_cudnn": False}, "cuDNN is not installed here"),
    ({"dtype": jnp.float32}, "it needs bfloat16 or float16, not float32"),
    (
        {"head_dim": 60, "value_dim": 60},
        "it needs heads of a multiple of 8 and at most 128, not 60",
    ),
    (
        {"head_dim": 256, "value_dim": 256},
        "it needs heads of a multiple of 8 and at most 128, not 256",
    ),
    ({"num_queries": 1}, "it needs as many queries as keys when causal, not 1 and 128"),
    (
        {"is_in_row_order": False},
        "it takes causal to mean the order of the row, and these positions may differ from it",
    ),
    ({"value_dim": 32}, "it needs values as large as keys, not 32 and 64"),
    ({"window": 8, "is_causal": False}, "it knows windows in causal attention only"),
    ({"bias_dtype": "float32"}, "it would round the bias, float32, to bfloat16"),
    (
        {"bias_dtype": "bfloat16", "num_queries": 7, "num_keys": 7},
        "it needs even lengths with a bias, not 7 and 7",
    ),
    ({"has_sinks": True}, "it does not know sinks"),
    ({"has_segments": True}, "it does not know segments or padding"),
    ({"has_logit_cap": True}, "it does not know a logit cap"),
    ({"length_parts": 2}, "it does not know rows split over devices"),
    ({"has_prefix": True}, "it does not know prefixes"),
    ({"has_dropout": True}, "it does not know our dropout"),
    ({"is_in_a_ring": True}, "it does not know context_parallel='ring'"),
    ({"split_obstacle": "3 heads over 2 devices"}, "3 heads over 2 devices"),
]

NO_KEY_READS_0 = (
    "a query that sees no key reads 0 there, for which zero_fully_masked_rows must be set"
)
PALLAS_OBSTACLES = [
    ({"platform": "cpu"}, "it needs a GPU or a TPU, not cpu"),
    ({"dtype": jnp.int8}, "it needs a float type, not int8"),
    ({"head_dim": 320}, "it needs heads of at most 256, not 320 and 64"),
    ({"value_dim": 320}, "it needs heads of at most 256, not 64 and 320"),
    (
        {"num_queries": 24, "num_keys": 24},
        "it needs lengths of a multiple of 16, not 24 and 24",
    ),
    ({"length_parts": 16}, "it needs lengths of a multiple of 16, not 8 and 128"),
    (
        {"length_parts": 4, "num_queries": 1, "is_causal": False},
        "it needs lengths of a multiple of 16, not 1 and 128",
    ),
    ({"bias_dtype": "float32"}, "it does not know a bias"),
    ({"is_in_row_order": False}, NO_KEY_READS_0),
    ({"has_prefix": True}, "it does not know prefixes"),
    ({"has_dropout": True}, "it does not know our dropout"),
    ({"is_in_a_ring": True}, "it does not know context_parallel='ring'"),
    ({"split_obstacle": "3 heads over 2 devices"}, "3 heads over 2 devices"),
    ({**ON_TPU, "dtype": jnp.float16}, "it needs bfloat16 or float32, not float16"),
    (
        {**ON_TPU, "num_queries": 64, "num_keys": 64},
        "it needs lengths of a multiple of 128, not 64 and 64",
    ),
    (
        {**ON_TPU, "is_causal": False, "has_segments": True, "is_in_row_order": False},
        "it needs as many keys as queries where keys are hidden, the same tokens in row order",
    ),
    (
        {**ON_TPU, "length_parts": 2},
        "it needs lengths of a multiple of 128, not 64 and 128",
    ),
    ({**ON_TPU, "bias_dtype": "bfloat16"}, "it does not know a bias"),
    ({**ON_TPU, "has_prefix": True}, "it does not know prefixes"),
    ({**ON_TPU, "has_dropout": True}, "it does not know our dropout"),
    ({**ON_TPU, "is_in_a_ring": True}, "it does not know context_parallel='ring'"),
]

RING = {"length_parts": 2, "is_in_a_ring": True}
RING_OBSTACLES = [
    (
        {"num_queries": 1, "is_causal": False},
        "it needs rows that can be split, not 1 queries and 128 keys",
    ),
    ({"bias_dtype": "float32"}, "it does not know a bias"),
    ({"has_dropout": True}, "it does not know dropout"),
    ({"is_in_row_order": False}, NO_KEY_READS_0),
]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"platform": "cuda"},
        {"dtype": jnp.float16},
        {"head_dim": 128, "value_dim": 128},
        {"is_causal": False},
        {"is_causal": False, "num_queries": 1},
        {"window": 8},
        {"bias_dtype": "bfloat16"},
    ],
)
def test_cudnn_is_taken_where_it_is_right(change):
    call = dataclasses.replace(FUSABLE, **change)
    assert select_backend("cudnn", call) == Backend("cudnn", "as asked")
    assert select_backend("auto", call).name == "cudnn"


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"dtype": jnp.float32},
        {"dtype": jnp.float16, "head_dim": 60, "value_dim": 256},
        {"window": 8, "has_segments": True, "has_sinks": True, "has_logit_cap": True},
        {"num_queries": 16, "is_in_row_order": False, "zeroes_empty_rows": True},
        {"num_queries": 16, "is_in_row_order": False, "has_sinks": True},
        {"num_queries": 16, "is_in_row_order": False, "is_causal": False},
        {"length_parts": 8},
        {"has_cudnn": False},
        {**ON_TPU},
        {**ON_TPU, "dtype": jnp.float32, "head_dim": 576, "value_dim": 512},
        {**ON_TPU, "window": 8, "has_segments": True, "has_sinks": True, "has_logit_cap": True},
        {**ON_TPU, "num_queries": 256, "is_causal": False, "is_in_row_order": False},
    ],
)
def test_pallas_is_taken_by_name_where_it_is_right(change):
    call = dataclasses.replace(FUSABLE, **change)
    assert select_backend("pallas", call) == Backend("pallas", "as asked")


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        *(("cudnn", *obstacle) for obstacle in CUDNN_OBSTACLES),
        *(("pallas", *obstacle) for obstacle in PALLAS_OBSTACLES),
    ],
)
def test_a_kernel_is_refused_with_the_reason(name, change, reason):
    with pytest.raises(BackendRefusal) as refusal:
        select_backend(name, dataclasses.replace(FUSABLE, **change))
    assert str(refusal.value) == (
        f"attention backend {name!r} cannot do what is asked: {reason}."
        " Use backend='xla' or 'auto'."
    )


def test_a_refusal_gives_every_reason():
    call = dataclasses.replace(FUSABLE, platform="cpu", has_segments=True)
    with pytest.raises(BackendRefusal) as refusal:
        select_backend("cudnn", call)
    assert str(refusal.value) == (
        "attention backend 'cudnn' cannot do what is asked: it needs a GPU, not cpu; it does not"
        " know segments or padding. Use backend='xla' or 'auto'."
    )


@pytest.mark.parametrize("change", [{}, *(change for change, _ in CUDNN_OBSTACLES)])
def test_xla_does_everything(change):
    assert select_backend("xla", dataclasses.replace(FUSABLE, **change)).name == "xla"


@pytest.mark.parametrize("name", ["auto", "xla"])
def test_a_ring_is_array_code_and_says_what_it_cannot(name):
    call = dataclasses.replace(FUSABLE, **RING)
    assert select_backend(name, call).describe() == "attention backend: xla (in a ring)"
    for change, reason in RING_OBSTACLES:
        with pytest.raises(BackendRefusal) as refusal:
            select_backend(name, dataclasses.replace(call, **change))
        assert str(refusal.value) == (
            f"context_parallel='ring' cannot do what is asked: {reason}."
            " Use context_parallel='all_gather'."
        )


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"platform": "cpu"}, "xla (auto: cpu has no fused kernel)"),
        ({}, "cudnn (auto: cudnn can do it on gpu)"),
        ({"platform": "cuda"}, "cudnn (auto: cudnn can do it on cuda)"),
        (
            {"has_segments": True},
            "xla (auto: cudnn cannot, it does not know segments or padding)",
        ),
        ({"has_cudnn": False}, "xla (auto: cudnn cannot, cuDNN is not installed here)"),
        (ON_TPU, "pallas (auto: pallas can do it on tpu)"),
        (
            {**ON_TPU, "has_dropout": True},
            "xla (auto: pallas cannot, it does not know our dropout)",
        ),
    ],
)
def test_auto_says_what_it_chose(change, line):
    chosen = select_backend("auto", dataclasses.replace(FUSABLE, **change))
    assert chosen.describe() == f"attention backend: {line}"


def test_a_choice_by_name_says_so():
    assert select_backend("xla", FUSABLE).describe() == "attention backend: xla (as asked)"


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ValueError) as error:
        select_backend("cudn", FUSABLE)
    assert str(error.value) == (
        "backend='cudn' is not an attention backend; did you mean 'cudnn'?"
        " Backends: auto, xla, cudnn, pallas."
    )
    with pytest.raises(ValueError) as error:
        check_backend_name("flash", owner="Attention(lm)")
    assert str(error.value) == (
        "Attention(lm): backend='flash' is not an attention backend."
        " Backends: auto, xla, cudnn, pallas."
    )
