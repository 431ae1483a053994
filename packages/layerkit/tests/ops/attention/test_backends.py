"""Backend selection: a table of calls and of the backend or error that each of them gives."""

from __future__ import annotations

import dataclasses

import pytest

from layerkit.errors import ConfigError
from layerkit.ops import triton
from layerkit.ops.attention import cudnn, tokamax
from layerkit.ops.attention.backends import (
    BACKEND_NAMES,
    AttentionCall,
    select_backend,
)
from layerkit.ops.attention.cudnn import find_missing_cudnn
from layerkit.ops.implementations import UnsupportedBackendError

# A call that every kernel supports; each row of the tables changes something about it.
FUSABLE = AttentionCall(
    platform="gpu",
    dtype="bfloat16",
    head_dim=64,
    value_dim=64,
    num_queries=128,
    num_keys=128,
    is_causal=True,
    device_kind="NVIDIA H100 80GB HBM3",
)
ON_TPU = {"platform": "tpu"}
RING = {"num_length_shards": 2, "uses_ring": True}
RING_ON_TPU = {**ON_TPU, "num_queries": 512, "num_keys": 512, **RING}

CUDNN_UNSUPPORTED = [
    {"platform": "cpu"},
    {"platform": "tpu"},
    {"dtype": "float32"},
    {"head_dim": 60, "value_dim": 60},
    {"head_dim": 256, "value_dim": 256},
    {"num_queries": 1},
    {"is_in_row_order": False},
    {"value_dim": 32},
    {"window": 8, "is_causal": False},
    {"window": 8, "bias_dtype": "bfloat16"},
    {"compute_capability": "7.5"},
    {"has_mixed_dtypes": True},
    {"bias_dtype": "float32"},
    {"bias_dtype": "bfloat16", "num_queries": 7, "num_keys": 7},
    {"has_sinks": True},
    {"has_segments": True},
    {"has_logit_cap": True},
    {"num_length_shards": 2},
    {"has_prefix": True},
    {"has_dropout": True},
    {"split_problem": "3 heads over 2 devices"},
]
TOKAMAX_UNSUPPORTED = [
    {"platform": "tpu"},
    {"device_kind": "NVIDIA A100-SXM4-40GB"},
    {"device_kind": "NVIDIA B200", "head_dim": 256, "value_dim": 256},
    {"device_kind": "NVIDIA B200", "value_dim": 128},
    {"dtype": "float32"},
    {"head_dim": 60},
    {"value_dim": 264},  # refused by a group of warps, which multiplies at most 256 columns
    {"num_queries": 48, "num_keys": 48},
    {"num_queries": 64},
    {"has_mixed_dtypes": True},
    {"has_segments": True, "segments_are_runs": False},
    {"is_in_row_order": False},
    {"num_length_shards": 2},
    {"has_prefix": True},
    {"has_dropout": True},
]
PALLAS_UNSUPPORTED = [
    {"platform": "cpu"},
    {"dtype": "int8"},
    {"compute_capability": "7.0"},
    {"has_mixed_dtypes": True},
    {**ON_TPU, "has_mixed_dtypes": True},
    {"head_dim": 320},
    {"value_dim": 320},
    {"num_queries": 24, "num_keys": 24},
    {"num_length_shards": 16},
    {"num_length_shards": 4, "num_queries": 1, "is_causal": False},
    {"bias_dtype": "float32"},
    {"bias_dtype": "float32", "has_distance_bias": True, "num_length_shards": 4},
    {"is_in_row_order": False},
    {"has_prefix": True},
    {"has_dropout": True},
    {"num_length_shards": 8, "uses_ring": True},  # two chunks of 8 queries on each device
    {"split_problem": "3 heads over 2 devices"},
    {**ON_TPU, "dtype": "float16"},
    {**ON_TPU, "num_queries": 64, "num_keys": 64},
    {**ON_TPU, "is_causal": False, "has_segments": True, "is_in_row_order": False},
    {**ON_TPU, "num_length_shards": 2},
    {**ON_TPU, "bias_dtype": "bfloat16"},
    {**ON_TPU, "has_prefix": True},
    {**ON_TPU, "has_dropout": True},
    {**ON_TPU, "num_queries": 256, "num_keys": 256, "num_length_shards": 2, "uses_ring": True},
    {**RING_ON_TPU, "window": 99},
]
RING_UNSUPPORTED = [
    {"num_queries": 1, "is_causal": False},
    {"bias_dtype": "float32"},
    {"has_dropout": True},
    {"is_in_row_order": False},
]


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Let cuDNN be installed and Tokamax not; return a function that changes both."""

    def install(*, cudnn_is_here, tokamax_is_here):
        for module, is_here in ((cudnn, cudnn_is_here), (tokamax, tokamax_is_here)):
            name = module.__name__.split(".")[-1]
            missing = "" if is_here else f"{name} is not installed"
            monkeypatch.setattr(module, f"find_missing_{name}", lambda missing=missing: missing)

    install(cudnn_is_here=True, tokamax_is_here=False)
    return install


def name_change(change):
    return ",".join(f"{name}={value}" for name, value in change.items()) or "none"


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"dtype": "float32"},
        {"dtype": "float16", "head_dim": 60, "value_dim": 256},
        {"window": 8, "has_segments": True, "has_sinks": True, "has_logit_cap": True},
        {"num_queries": 16, "is_in_row_order": False, "zeroes_empty_rows": True},
        {"num_queries": 16, "is_in_row_order": False, "has_sinks": True},
        {"num_queries": 16, "is_in_row_order": False, "is_causal": False},
        {"num_length_shards": 8},
        {"num_length_shards": 4, "uses_ring": True},
        {**ON_TPU},
        {**RING_ON_TPU, "has_segments": True},
        {**ON_TPU, "dtype": "float32", "head_dim": 576, "value_dim": 512},
        {**ON_TPU, "window": 8, "has_segments": True, "has_sinks": True, "has_logit_cap": True},
        {**ON_TPU, "num_queries": 256, "is_causal": False, "is_in_row_order": False},
    ],
)
def test_pallas_runs_supported_calls_if_selected_by_name(change):
    call = dataclasses.replace(FUSABLE, **change)
    assert select_backend("pallas", call).name == "pallas"


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize(
    "change",
    [
        {"has_segments": True},
        {"has_segments": True, "window": 8},
        {"is_causal": False, "has_segments": True},
        {"has_logit_cap": True},
        {"has_sinks": True},
        {"bias_dtype": "float32", "has_distance_bias": True},
        {"head_dim": 256, "value_dim": 256},
        {"head_dim": 192},  # latent attention: 128 coordinates without and 64 with positions
        {"num_length_shards": 4, "num_queries": 512, "num_keys": 512},
    ],
    ids=name_change,
)
def test_auto_selects_pallas_for_training_that_cudnn_does_not_support(platform, change):
    call = dataclasses.replace(FUSABLE, platform=platform, **{"value_dim": 128} | change)
    assert select_backend("auto", call).name == "pallas"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *(pytest.param("cudnn", c, id=f"cudnn,{name_change(c)}") for c in CUDNN_UNSUPPORTED),
        *(pytest.param("tokamax", c, id=f"tokamax,{name_change(c)}") for c in TOKAMAX_UNSUPPORTED),
        *(pytest.param("pallas", c, id=f"pallas,{name_change(c)}") for c in PALLAS_UNSUPPORTED),
    ],
)
def test_kernel_raises_for_an_unsupported_call(raises, name, change):
    with raises(UnsupportedBackendError, field="backend", value=name):
        select_backend(name, dataclasses.replace(FUSABLE, **change))


def test_auto_reports_a_missing_library_once_and_only_where_it_decides(raises, installed, caplog):
    caplog.set_level("INFO", "layerkit")
    for change in ({"has_segments": True}, {"has_segments": True, "bias_dtype": "float32"}):
        select_backend("auto", dataclasses.replace(FUSABLE, **change))
    installed(cudnn_is_here=False, tokamax_is_here=True)
    select_backend("auto", FUSABLE)
    packed, biased, causal = caplog.messages
    reason = "cudnn requires no segments or padding; tokamax is not installed"
    assert packed == f"attention backend: pallas (auto: {reason})"
    assert biased.startswith("attention backend: xla (auto: cudnn requires a bias of")
    assert biased.count("tokamax is not installed") == 1
    assert causal == "attention backend: tokamax (auto: cudnn is not installed)"
    with raises(UnsupportedBackendError, field="backend", value="cudnn"):
        select_backend("cudnn", FUSABLE)


def test_missing_cudnn_has_the_reason_of_jax(monkeypatch):
    reason = "Compute capability 10.3 requires cuDNN version >= 9.11"

    def fail(*arguments, **keywords):
        raise NotImplementedError(f"{reason}.")

    monkeypatch.setattr("jax.nn.dot_product_attention", fail)
    missing = find_missing_cudnn.__wrapped__()
    assert missing.startswith(f"cuDNN cannot run ({reason}): pip install -U nvidia-cudnn-cu13")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "cudnn"),
        ({"compute_capability": "10.0"}, "cudnn"),
        ({"compute_capability": "7.5", "device_kind": "Tesla T4"}, "xla"),
        ({"has_mixed_dtypes": True}, "xla"),
        ({"window": 8, "bias_dtype": "bfloat16"}, "tokamax"),
        ({"has_segments": True, "segments_are_runs": False}, "pallas"),
        ({"has_segments": True, "window": 8}, "tokamax"),
        ({"has_sinks": True, "has_logit_cap": True}, "tokamax"),
        ({"is_causal": False, "has_segments": True}, "tokamax"),
        ({"head_dim": 192, "value_dim": 128, "device_kind": "NVIDIA GB200"}, "tokamax"),
        ({"bias_dtype": "float32"}, "tokamax"),
        ({"bias_dtype": "float32", "has_distance_bias": True}, "pallas"),
        ({"has_segments": True, "device_kind": "NVIDIA A100-SXM4-40GB"}, "pallas"),
        ({"has_segments": True, "num_length_shards": 2, "uses_ring": True}, "pallas"),
    ],
    ids=str,
)
def test_auto_prefers_libraries_to_own_kernels(installed, change, expected):
    installed(cudnn_is_here=True, tokamax_is_here=True)
    assert select_backend("auto", dataclasses.replace(FUSABLE, **change)).name == expected


def test_auto_selects_tokamax_where_jax_has_no_triton(installed, monkeypatch):
    installed(cudnn_is_here=True, tokamax_is_here=True)
    monkeypatch.setattr(triton, "find_missing_triton", lambda: "no Triton")
    biased = dataclasses.replace(FUSABLE, bias_dtype="float32", has_distance_bias=True)
    assert select_backend("auto", biased).name == "tokamax"


@pytest.mark.parametrize("change", RING_UNSUPPORTED, ids=name_change)
def test_ring_raises_for_an_unsupported_call(raises, change):
    call = dataclasses.replace(FUSABLE, **RING)
    assert select_backend("auto", call).name == "pallas"
    with raises(UnsupportedBackendError, field="context_parallel", value="ring"):
        select_backend("auto", dataclasses.replace(call, **change))


def test_unknown_backend_raises(raises):
    with raises(ConfigError, field="backend", value="cudn", choices=BACKEND_NAMES):
        select_backend("cudn", FUSABLE)
