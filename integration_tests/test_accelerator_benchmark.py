"""Tests of `benchmarks/accelerators.py`, reduced: timed on a CPU, and compiled for others."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SIZES = {
    "NUM_LAYERS": 2,
    "MODEL_DIMS": 128,
    "HIDDEN_DIMS": 256,
    "NUM_HEADS": 2,
    "DIMS_PER_HEAD": 64,
    "VOCAB_SIZE": 256,
    "MAX_SEQ_LEN": 64,
}
REDUCED = [f"--fdl.{name}={value}" for name, value in SIZES.items()]
# Query, key, value, attention output and two feed-forward products; forward and both gradients.
# Layers are unrolled on GPUs, and the body of a loop on TPUs.
PRODUCTS_OF_LAYERS = 6 * 3

pytestmark = pytest.mark.slow


def run(script, *arguments, **environment):
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def forward_flops_of_a_row():
    """Return the model FLOPs of a row; causal attention counts half of the attention matrix."""
    dims, length = SIZES["MODEL_DIMS"], SIZES["MAX_SEQ_LEN"]
    heads = SIZES["NUM_HEADS"] * SIZES["DIMS_PER_HEAD"]
    projections = 2 * length * dims * (4 * heads + 2 * SIZES["HIDDEN_DIMS"])
    attention = 2 * 2 * length * length * heads / 2
    return SIZES["NUM_LAYERS"] * (projections + attention) + 2 * length * dims * SIZES["VOCAB_SIZE"]


@pytest.mark.parametrize("dtype", ["bf16", "fp8_delayed", "int8"])
def test_case_on_cpu_reports_time_and_loss(dtype):
    case = {"model": "126m", "dtype": dtype, "backend": "auto", "remat": "full", "rows": 2}
    sizes = ["--case", json.dumps(case), "--steps=2", "--groups=3"]
    done = run("accelerator_case.py", *sizes, *REDUCED, JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.splitlines()[-1])
    assert row["status"] == "measured"
    assert row["attention"] == "xla (auto: cpu has no fused kernel)"
    assert row["flops_per_device"] == 3 * 2 * forward_flops_of_a_row()
    ms = row["ms"]
    assert 0 < ms["quartile_1"] <= ms["median"] <= ms["quartile_3"]
    tokens = 2 * SIZES["MAX_SEQ_LEN"]
    assert row["tokens_per_second_per_device"] == pytest.approx(1e3 * tokens / ms["median"])
    # An untrained model predicts all tokens with equal probability.
    assert row["first_loss"] == pytest.approx(math.log(SIZES["VOCAB_SIZE"]), rel=0.02)
    assert row["last_loss"] < row["first_loss"]


def test_cases_compile_for_an_h100(tmp_path):
    if not any(map(importlib.util.find_spec, ["jax_cuda12_plugin", "jax_cuda13_plugin"])):
        pytest.skip("JAX's CUDA plugin is not installed: pip install 'layerkit-runner[plan-cuda]'")
    file = tmp_path / "rows.jsonl"
    flags = ["--compile_only", "--models=126m", "--backends=pallas", "--remat=none", "--rows=1"]
    done = run("accelerators.py", *flags, f"--json={file}", *REDUCED)
    assert done.returncode == 0, done.stderr
    environment, *rows = map(json.loads, file.read_text().splitlines())
    assert environment["devices"] == ["NVIDIA H100 80GB HBM3"]
    assert [row["case"]["dtype"] for row in rows] == ["bf16", "fp8_delayed"]
    products = PRODUCTS_OF_LAYERS * SIZES["NUM_LAYERS"]
    assert [row["products"]["8-bit"] for row in rows] == [0, products]
    for row in rows:
        assert row["status"] == "compiled", row
        assert row["attention"] == "pallas (as requested)"
        assert row["custom_calls"]["__gpu$xla.gpu.triton"] > 0
        assert row["state_bytes"] < row["predicted_bytes"] < row["usable_bytes"]


def test_step_for_an_h100_has_no_large_copies(tmp_path):
    if not any(map(importlib.util.find_spec, ["jax_cuda12_plugin", "jax_cuda13_plugin"])):
        pytest.skip("JAX's CUDA plugin is not installed: pip install 'layerkit-runner[plan-cuda]'")
    file = tmp_path / "rows.jsonl"
    sizes = {"NUM_LAYERS": 4, "MODEL_DIMS": 128, "HIDDEN_DIMS": 512, "MAX_SEQ_LEN": 1024}
    flags = ["--compile_only", "--models=126m", "--dtypes=bf16", "--backends=auto", "--rows=8"]
    flags += ["--remat=none", f"--json={file}", *REDUCED]
    done = run("accelerators.py", *flags, *(f"--fdl.{name}={size}" for name, size in sizes.items()))
    assert done.returncode == 0, done.stderr
    _, row = map(json.loads, file.read_text().splitlines())
    assert row["largest_copies"][0]["bytes"] < 0.01 * row["accessed_bytes"]


def test_packed_126m_compiles_for_an_h100_without_triton_below_12_gb(tmp_path):
    for module, name in [("tokamax", "layerkit[kernels]"), ("jax_cuda13_plugin", "jax[cuda13]")]:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {name}")
    file = tmp_path / "rows.jsonl"
    flags = ["--compile_only", "--models=126m", "--dtypes=bf16", "--backends=auto", "--packed"]
    done = run("accelerators.py", *flags, "--remat=none", "--rows=8", f"--json={file}")
    assert done.returncode == 0, done.stderr
    row = json.loads(file.read_text().splitlines()[-1])
    assert row["attention"] == "tokamax (auto: cudnn requires no segments or padding)"
    assert not any("triton" in target for target in row["custom_calls"])
    assert row["predicted_bytes"] < 12e9


def test_cases_compile_for_a_tpu(tmp_path):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: pip install 'layerkit-runner[plan-tpu]'")
    file = tmp_path / "rows.jsonl"
    flags = ["--compile_only", "--target=v5e:1x1", "--models=126m", "--dtypes=bf16,int8"]
    flags += ["--backends=xla", "--remat=none", "--rows=1", f"--json={file}"]
    done = run("accelerators.py", *flags, *REDUCED)
    assert done.returncode == 0, done.stderr
    environment, *rows = map(json.loads, file.read_text().splitlines())
    assert environment["devices"] == ["TPU v5 lite"]
    # The gradients of weights are bfloat16 products.
    assert [row["products"]["8-bit"] for row in rows] == [0, PRODUCTS_OF_LAYERS * 2 // 3]
    assert {row["status"] for row in rows} == {"compiled"}


def test_missing_gpu_exits_2_with_one_line():
    done = run("accelerators.py", JAX_PLATFORMS="cpu")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("accelerators.py: JAX found no GPU or TPU.")
    assert "--compile_only" in done.stderr and done.stderr.count("\n") == 1
