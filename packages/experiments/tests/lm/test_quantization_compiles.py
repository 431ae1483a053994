"""The compilers of H100, B200 and TPU v5e multiply 8-bit or 4-bit numbers in all layers of GPT5B.

The head is no layer.

The devices are absent, so these tests run where the compilers are installed: `nox -s compilers`.
"""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from layerkit.config.nested_map import NestedMap
from layerkit_experiments.lm.pile import Synthetic5B
from layerkit_runner.run.job import build_parts
from layerkit_runner.run.resolve import resolve
from layerkit_runner.tools.plan.compiling import compile_step, tracing_for
from layerkit_runner.tools.plan.targets import planned_target, target_devices

CUDA = ("jax_cuda12_plugin", "jax_cuda13_plugin")
PLUGINS = {"h100x1": CUDA, "b200x1": CUDA, "b200x4": CUDA, "v5e:1x1": ("libtpu",)}
SMALL: dict[str, Any] = {
    "NUM_LAYERS": 2,
    "MODEL_DIMS": 256,
    "HIDDEN_DIMS": 512,
    "NUM_HEADS": 4,
    "DIMS_PER_HEAD": 64,
    "VOCAB_SIZE": 384,
    "MAX_SEQ_LEN": 128,
    "PERCORE_BATCH_SIZE": 4.0,
    "ICI_MESH_SHAPE": [1, 1, 1],
    "DCN_MESH_SHAPE": None,
}
E4, E5 = "f8e4m3fn", "f8e5m2"


def compiled_text(name: str, **fields: Any) -> str:
    """Return the compiled training step of a small GPT5B."""
    if not any(map(importlib.util.find_spec, PLUGINS[name])):
        pytest.skip(f"the compiler of {name} is not installed")
    resolved = resolve(Synthetic5B(**(SMALL | fields)))
    partitioner, task = build_parts(resolved)
    target = planned_target(partitioner, target=name)
    devices = target_devices(target)
    partitioner.start(devices)
    partitioner.bind(task)
    layout = partitioner.batch_sharding()
    rows = {
        key: jax.ShapeDtypeStruct((4, SMALL["MAX_SEQ_LEN"]), dtype, sharding=layout)
        for key, dtype in (("ids", jnp.int32), ("labels", jnp.int32), ("weights", jnp.float32))
    }
    with tracing_for(devices[0]):
        step = partitioner.train_step_fn(task)
        lowered = step.trace(partitioner.abstract_state(task), NestedMap(**rows)).lower()
    return compile_step(lowered, platform=devices[0].platform, is_here=False).hlo_text


def products(text: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (`head` or `layers`, dtypes of the factors) of each product with a weight.

    Products with a matrix of 16 × 16, such as the rotation of NVFP4, are left out.
    """
    for computation in re.split(r"\n(?=\S)", text):
        arrays = dict(re.findall(r"%?([\w.\-]+) = \(?(\w+\[[\d,]*\])", computation))
        for factors, rest in re.findall(r" (?:dot|convolution)\(([^)]*)\)(.*)", computation):
            names = [factor.split()[-1].lstrip("%") for factor in factors.split(", ")]
            where = "head" if "/softmax" in rest else "layers"
            factors = [arrays[name].partition("[") for name in names]
            if not any(shape == "16,16]" for _, _, shape in factors):
                yield where, tuple(dtype for dtype, _, _ in factors)


@pytest.mark.experiments
@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_current"])
def test_products_of_h100_are_in_fp8_but_for_the_head(name):
    result = Counter(products(compiled_text("h100x1", QUANTIZATION=name)))
    assert {dtypes for where, dtypes in result if where == "layers"} == {
        (E4, E4),
        (E5, E4),
        (E4, E5),
    }
    assert {dtypes for where, dtypes in result if where == "head"} == {("bf16", "bf16")}


@pytest.mark.experiments
def test_products_of_v5e_are_in_int8_but_for_gradients_of_weights_and_the_head():
    result = Counter(products(compiled_text("v5e:1x1", QUANTIZATION="int8")))
    # Query, key, value, output, up and down in the body of the loop over layers.
    assert result["layers", ("s8", "s8")] == 2 * 6
    assert result["layers", ("bf16", "bf16")] == 6
    assert result["head", ("bf16", "bf16")] == 3


@pytest.mark.experiments
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_products_of_b200_are_scaled_in_blocks_but_for_the_head(name):
    text = compiled_text("b200x1", QUANTIZATION=name)
    # Three products of query, key, value, output, up and down in the bodies of the loops.
    assert text.count('custom_call_target="__cudnn$blockScaledDot"') == 3 * 6
    assert Counter(products(text)) == {("head", ("bf16", "bf16")): 3}


# A device has 64 of the 256 rows or columns of a weight. A byte holds two numbers of NVFP4.
@pytest.mark.experiments
@pytest.mark.parametrize(
    ("name", "values", "scales"),
    [
        ("mxfp8", {"f8e4m3fn[64,256]", "f8e4m3fn[64,512]"}, "f8e8m0fnu[64,16]"),
        ("nvfp4", {"s8[64,128]", "s8[64,256]"}, "f8e4m3fn[64,32]"),
    ],
)
def test_shards_of_weights_are_gathered_after_rounding(name, values, scales):
    text = compiled_text("b200x4", QUANTIZATION=name, ICI_MESH_SHAPE=[1, 4, 1])
    gathered = "".join(re.findall(r" = (.*) all-gather-start\(", text))
    shards = set(re.findall(r"\w+\[64,(?:128|256|512)\]", gathered))
    assert shards - {"bf16[64,128]"} == values  # the embedding of positions is not rounded
    assert scales in gathered
