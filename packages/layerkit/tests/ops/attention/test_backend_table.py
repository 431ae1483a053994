"""The table of attention backends and the kinds of attention that they support.

The tests write docs/attention_backends.md from these cells and prove each "equals xla": the kernel
runs in interpret mode on the CPU, and its values and gradients are compared with `xla`. Rewrite the
page with

    REWRITE_BACKEND_TABLE=1 python -m pytest packages/layerkit/tests -k test_page_equals_table
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.sharding import BoundSharding
from layerkit.ops.attention.backends import unmet_requirements
from layerkit.ops.attention.distance_bias import DistanceBias
from layerkit.ops.attention.dot_product import (
    AttentionOptions,
    describe_call,
    dot_product_attention,
)
from layerkit.ops.attention.masks import AttentionMask, first_tokens
from layerkit.ops.attention.tokamax import find_missing_tokamax

PAGE = Path(__file__).parents[5] / "docs" / "attention_backends.md"
BATCH = 2


@dataclasses.dataclass(frozen=True)
class Cell:
    """One kind of attention. The default of each field is that of causal attention of two heads."""

    mask: Callable[[int, int], AttentionMask | None] = lambda q, k: AttentionMask.causal_mask(
        BATCH, q
    )
    heads: int = 2
    kv_heads: int = 2
    head_dim: int | None = None
    value_dim: int | None = None
    dtype: Any = None
    queries: int | None = None
    length: int | None = None
    bias_dtype: Any = None
    distance_bias: bool = False
    sinks: bool = False
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Column:
    """A backend on a platform, with the sizes that the tests use."""

    backend: str
    platform: str
    length: int
    head_dim: int = 8
    dtype: Any = jnp.float32
    ring: bool = False


COLUMNS = {
    "xla": Column("xla", "cpu", length=16),
    "cudnn (GPU)": Column("cudnn", "gpu", length=128, head_dim=64, dtype=jnp.bfloat16),
    "tokamax (GPU)": Column("tokamax", "gpu", length=128, head_dim=64, dtype=jnp.bfloat16),
    "pallas (GPU)": Column("pallas", "gpu", length=48),
    "pallas (TPU)": Column("pallas", "tpu", length=256),
    "ring": Column("xla", "cpu", length=16, ring=True),
    "ring, pallas (GPU)": Column("pallas", "gpu", length=64, ring=True),
    "ring, pallas (TPU)": Column("pallas", "tpu", length=512, ring=True),
}


def segments(length):
    """Return segment ids of two rows of unequal documents; the first row ends in padding."""
    bounds = np.array([[3, 6, 7], [2, 5, 8]]) * length // 8
    position = np.arange(length)
    ids = 1 + (position[None, :, None] >= bounds[:, None, :]).sum(axis=-1)
    return jnp.asarray(np.where(ids > 3, 0, ids), jnp.int32)


def packed(q, k):
    return AttentionMask.causal_mask(BATCH, q, segment_ids=segments(q))


def add_gaps(q, k):
    """Return the mask of documents that padding splits."""
    ids = jnp.where(jnp.arange(q) % 5 == 1, 0, segments(q))
    return AttentionMask.causal_mask(BATCH, q, segment_ids=ids, segments_are_runs=False)


def cross(q, k):
    """Return the mask of a memory whose rows have different lengths."""
    rows = [jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (BATCH, n)) for n in (q, k)]
    has_memory = (rows[1] < jnp.array([[k], [k // 2]])).astype(jnp.int32)
    return AttentionMask(*rows, jnp.ones_like(rows[0]), has_memory)


def unknown_positions(q, k):
    positions = jnp.broadcast_to(jnp.arange(q, dtype=jnp.int32)[::-1], (BATCH, q))
    return AttentionMask(positions, positions, causal=True)


def drop_some(probabilities):
    return probabilities * (jnp.arange(probabilities.shape[-1]) % 3 > 0)


CELLS = {
    "no mask": Cell(mask=lambda q, k: None),
    "causal": Cell(),
    "causal, window of 5": Cell(mask=lambda q, k: AttentionMask.causal_mask(BATCH, q).within(5)),
    "window of 5 both ways": Cell(
        mask=lambda q, k: AttentionMask.bidirectional_mask(BATCH, q).within(5)
    ),
    "packed rows with padding, causal": Cell(mask=packed),
    "padded rows, not causal": Cell(
        mask=lambda q, k: AttentionMask.bidirectional_mask(BATCH, q, segment_ids=segments(q))
    ),
    "packed, window of 5": Cell(mask=lambda q, k: packed(q, k).within(5)),
    "documents with gaps of padding": Cell(mask=add_gaps),
    "prefix": Cell(
        mask=lambda q, k: AttentionMask.causal_mask(
            BATCH, q, in_prefix=first_tokens(jnp.array([3, 7]), q)
        )
    ),
    "grouped queries": Cell(heads=4),
    "multi-query": Cell(heads=4, kv_heads=1),
    "logit cap": Cell(options={"logit_cap": 1.5}),
    "bias, float32": Cell(bias_dtype=jnp.float32),
    "bias, bfloat16 like the rest": Cell(bias_dtype=jnp.bfloat16, dtype=jnp.bfloat16),
    "bias, bfloat16, window of 5": Cell(
        mask=lambda q, k: AttentionMask.causal_mask(BATCH, q).within(5),
        bias_dtype=jnp.bfloat16,
        dtype=jnp.bfloat16,
    ),
    "bias by distance (T5, ALiBi)": Cell(distance_bias=True),
    "bias by distance, not causal": Cell(
        mask=lambda q, k: AttentionMask.bidirectional_mask(BATCH, q), distance_bias=True
    ),
    "bias by distance, packed": Cell(mask=packed, distance_bias=True),
    "sinks": Cell(sinks=True),
    "dropout": Cell(options={"dropout": drop_some}),
    "bfloat16": Cell(dtype=jnp.bfloat16),
    "float16": Cell(dtype=jnp.float16),
    "float32": Cell(dtype=jnp.float32),
    "heads of 20": Cell(head_dim=20),
    "heads of 256": Cell(head_dim=256),
    "keys of 24, values of 16": Cell(head_dim=24, value_dim=16),
    "length of 40": Cell(length=40),
    "positions of unknown order": Cell(mask=unknown_positions),
    "unknown order, empty rows zeroed": Cell(
        mask=unknown_positions, options={"zero_fully_masked_rows": True}
    ),
    "cached prompt of 16 tokens": Cell(
        mask=lambda q, k: AttentionMask.decoding_mask(BATCH, q, k, time_step=4),
        queries=16,
        options={"zero_fully_masked_rows": True},
    ),
    "cached step of 1 token": Cell(
        mask=lambda q, k: AttentionMask.decoding_mask(BATCH, q, k, time_step=4),
        queries=1,
        options={"zero_fully_masked_rows": True},
    ),
    "memory without padding": Cell(mask=lambda q, k: None, queries=128),
    "padded memory, empty rows zeroed": Cell(
        mask=cross, queries=128, options={"zero_fully_masked_rows": True}
    ),
    "all options except bias arrays, prefix, dropout": Cell(
        mask=lambda q, k: packed(q, k).within(5),
        heads=4,
        head_dim=24,
        value_dim=16,
        sinks=True,
        distance_bias=True,
        options={"logit_cap": 1.5},
    ),
}


def bound_ring():
    auto = (jax.sharding.AxisType.Auto,)
    devices = jax.devices("cpu")[:2]  # a machine may have one GPU
    mesh = jax.make_mesh((2,), ("context",), axis_types=auto, devices=devices)
    return BoundSharding(mesh)


def arguments(cell, column):
    """Return ((query, key, value), options with a gradient, other options)."""
    length = cell.length or column.length
    queries = cell.queries or length
    head_dim = cell.head_dim or column.head_dim
    value_dim = cell.value_dim or head_dim
    dtype = cell.dtype or column.dtype
    shapes = {
        "query": (BATCH, queries, cell.heads, head_dim),
        "key": (BATCH, length, cell.kv_heads, head_dim),
        "value": (BATCH, length, cell.kv_heads, value_dim),
    }
    random = np.random.default_rng(0)
    # NumPy casts them, since JAX would compile a cast for each shape and dtype.
    inputs = [jnp.asarray(random.normal(size=shape).astype(dtype)) for shape in shapes.values()]
    learned = {}
    if cell.bias_dtype is not None:
        bias = random.normal(size=(1, cell.heads, queries, length))
        learned["bias"] = jnp.asarray(bias.astype(cell.bias_dtype))
    if cell.distance_bias:
        by_distance = random.normal(size=(1, cell.heads, 2 * length - 1)).astype(np.float32)
        learned["bias"] = DistanceBias(jnp.asarray(by_distance))
    if cell.sinks:
        learned["sinks"] = jnp.asarray(random.normal(size=cell.heads).astype(np.float32))
    return inputs, learned, {"mask": cell.mask(queries, length), **cell.options}


@functools.cache
def verdict(cell_name, column_name):
    cell, column = CELLS[cell_name], COLUMNS[column_name]
    inputs, learned, options = arguments(cell, column)
    ring = {"sharding": bound_ring(), "context_parallel": "ring"} if column.ring else {}
    if column.ring and any(x.shape[1] % 2 for x in inputs[:2]):
        return "requires lengths that the devices divide"
    call = describe_call(
        *inputs, AttentionOptions(**learned, **options, platform=column.platform, **ring)
    )
    call = dataclasses.replace(call, device_kind="NVIDIA H100 80GB HBM3")
    names = ["xla", column.backend] if column.ring else [column.backend]
    if unmet := next(filter(None, (unmet_requirements(name, call) for name in names)), None):
        return f"requires {'; '.join(unmet)}"
    return {"xla": "yes", "cudnn": "lowered", "tokamax": "compiled"}.get(
        "ring" if column.ring else column.backend, "equals xla"
    )


def rendered():
    """Return the page: the introduction and the table of verdicts."""
    head = INTRODUCTION.strip()
    lines = [
        f"| | {' | '.join(COLUMNS)} |",
        f"|---|{'---|' * len(COLUMNS)}",
        *(
            f"| {name} | {' | '.join(verdict(name, column) for column in COLUMNS)} |"
            for name in CELLS
        ),
    ]
    return f"{head}\n\n" + "\n".join(lines) + "\n"


INTRODUCTION = """
# Attention backends

After this page you can choose the implementation of attention and know which features each
supports:

```python
from layerkit.layers import MultiHeadAttention

MultiHeadAttention.HParams.config(backend="cudnn")
```

Experiments of `lm` have the field `--fdl.ATTENTION_BACKEND=cudnn`.

| `backend` | implementation |
|---|---|
| `auto` (default) | the first fused kernel that supports the call, otherwise `xla`; see below |
| `xla` | plain JAX operations; supports every feature and materializes the logits |
| `cudnn` | NVIDIA's fused kernel, called through `jax.nn.dot_product_attention` |
| `tokamax` | fused kernels of [Tokamax][5] for Hopper and Blackwell GPUs; an [extra][6] |
| `pallas` | a fused Pallas kernel: [flash_gpu.py][1] on GPUs, JAX's splash attention on TPUs |

The fused kernels do not materialize the logits, and each supports some features only. A backend
that is selected by name raises an error with all unmet requirements.

`auto` tries cuDNN, Tokamax and then Pallas on GPUs, and Pallas on TPUs. The start report of a run
names its choice and the reason, and a library that would have been preferred:

```
attention backend: tokamax (auto: cudnn requires no segments or padding)
attention backend: pallas (auto: cudnn requires no segments or padding; tokamax is not installed:
    pip install tokamax==0.0.17, in Python 3.12 or later)
```

The kernels for GPUs require compute capability 8.0 (Ampere) or later, and all fused kernels
require queries, keys and values of one dtype, as layers pass them.

`tokamax` reads a document as a run of consecutive tokens. Other backends support a document that
padding or another document splits. Such a mask has `segments_are_runs=False`, with which `auto`
does not select `tokamax`. Models set it for batches with `paddings` and without `segment_ids`
(`BertModel`, `ContrastiveModel`, `SequenceModel`, `PatchedDecoder`), because padding may be between
tokens there. With `segment_ids`, a row with such a document gives NaN in `tokamax`, because which
tokens a document has is known at run time only.

`pallas` is written in Pallas' Triton backend on GPUs, which JAX 0.12 deprecates. Once JAX has
removed it, `auto` skips the row, and Tokamax runs a bias by distance, too
([decision](decisions/0014-kernels-from-libraries.md)). JAX 0.10 and Python 3.11 have no Tokamax
and use `pallas`.

On GPUs `auto` does not select Pallas in float32, because the kernel then computes its products
without tensor cores and takes minutes to compile
([reasons](decisions/0009-attention-kernels-on-gpus.md)).

The field `kernel_blocks`, such as `(128, 64)`, sets the largest number of (queries, keys) in a
block of the Pallas kernels. By default it depends on the device ([sources][4]):

| device | forward | gradient of queries | gradients of keys and values |
|---|---|---|---|
| Hopper GPUs, heads up to 64 in 16 bits | (64, 64) | (64, 64) | (64, 64) |
| Hopper GPUs, heads up to 128 in 16 bits | (64, 64) | (128, 64) | (64, 64) |
| Hopper GPUs, heads up to 256 in 16 bits | (64, 32) | (64, 64) | (64, 32) |
| other GPUs, heads up to 128 in 16 bits | (64, 64) | (64, 64) | (64, 64) |
| GPUs, other heads and float32 | (32, 32) | (32, 32) | (32, 32) |
| TPUs | (512, 512) | (512, 512) | (512, 512) |
| TPU v6e | (1024, 512) | (2048, 512) | (2048, 512) |

With a bias, TPUs use the blocks of the forward pass in all passes. Blocks of Hopper GPUs were
measured on an H200, and `benchmarks/attention_blocks.py` measures those of another GPU. In packed
rows, the GPU kernels skip all blocks that hold other documents only.

If rows are sharded over devices, `context_parallel` selects one of three ways to read the keys of
other devices ([context parallelism](partitioning.md#context-parallelism)). `all_gather` and
`ulysses` use the backend; cuDNN requires `ulysses`. `ring` is ring attention, the last columns of
the table: `xla` computes a block of logits at a time, and `pallas` runs the fused kernels.

On one H200, 2026-11-27, a step of GPT-3 126M with 8 rows of 2048 tokens took 52.0 ms with cuDNN,
57.1 ms with Pallas and 148.1 ms with `xla` ([commands](benchmarks.md#gpus)). This was before the
changes that made the [step on an H100](results.md#measured-one-gpu) faster. The step with packed
rows, compiled for an H100 by JAX 0.12.0.1 (2026-11-29), has a peak of 11.6 GB with Tokamax and with
Pallas, and of 41.0 GB with `xla`.

The biases of T5 and ALiBi (`relative_bias_tpl`) and of classes derived from them depend on the
distance of query and key alone. In rows in order, layers pass one number per distance
(`DistanceBias`), and the Pallas kernels read these. A bias that is an array of a number for
each pair runs on `tokamax` or `xla`, or in cuDNN if it has the dtype of the queries. The
gradient of a learned bias is computed by a kernel of its own ([GPUs][2], [TPUs][3]), without
atomic additions, so that it is the same in each run. The temporary memory of a compiled forward and
backward pass, for 2 rows of 2048 tokens, 2 heads of 64 and a learned bias, is

| | `xla` | `pallas` |
|---|---|---|
| H100 | 224.0 MiB | 3.0 MiB |
| TPU v5p | 128.4 MiB | 8.0 MiB |

(`nox -s compilers -- packages/layerkit/tests/ops/attention/pallas/test_kernels_compile.py -k
learned_bias -s`).

[1]: ../packages/layerkit/src/layerkit/ops/triton/flash_gpu.py
[2]: ../packages/layerkit/src/layerkit/ops/triton/flash_gpu_bias.py
[3]: ../packages/layerkit/src/layerkit/ops/attention/pallas/flash_tpu_bias.py
[4]: ../packages/layerkit/src/layerkit/ops/attention/pallas/kernel_blocks.py
[5]: https://github.com/openxla/tokamax
[6]: install.md

## Supported features

- **equals xla**: a test shows that values and gradients equal those of `xla`, with the kernel in
  Pallas' interpret mode on a CPU, or the ring on simulated devices.
- **lowered**: a test lowers forward and backward pass for NVIDIA GPUs.
- **compiled**: tests compile the kernels to machine code for an H100 and a B200, forward and
  backward, and show that masks, sinks, caps and biases reach Tokamax as `xla` computes them, with
  array code in place of its kernels. No kernel of Tokamax was run.
- **requires**: not supported; the cell lists the requirements as the error does.

On a machine with a GPU, `python3 start.py gpu` compares values and gradients of the GPU columns
with array code in float32 (`test_supported_cell_equals_float32_on_gpu`). Elsewhere no test runs a
kernel on an accelerator. `test_kernels_compile.py` compiles all kernels, forward and backward, for
a TPU v5p, an H100 and a B200, if libtpu or JAX's CUDA plugin is installed. On TPUs a bfloat16
query is rounded once more after scaling, unless the scale is a power of two.

Each row is causal self-attention with two heads, changed in one respect, in float32 (bfloat16 for
cuDNN and Tokamax) unless the row names a dtype.
Sizes: {sizes}.
"Unknown order" means that the positions of tokens are arbitrary arrays, so that the mask cannot be
derived from row indices. "Memory" is cross-attention. The table is generated by
`packages/layerkit/tests/ops/attention/test_backend_table.py`.
""".format(
    sizes=", ".join(f"length {column.length} for {name}" for name, column in COLUMNS.items())
)

ACCEPTED = [
    pytest.param(cell, column, id=f"{name}-{column_name}")
    for column_name, column in COLUMNS.items()
    for name, cell in CELLS.items()
    if verdict(name, column_name) == "equals xla"
]


def test_page_equals_table():
    page = rendered()
    if os.environ.get("REWRITE_BACKEND_TABLE"):
        PAGE.write_text(page)
    assert PAGE.exists(), "the page is missing; see the docstring of this file"
    assert page == PAGE.read_text()


# On a GPU, kernels run on rows of many blocks, in a dtype of tensor cores.
ON_GPU = [
    pytest.param(cell, column, id=f"{name}-{backend}")
    for backend in ("cudnn", "tokamax", "pallas")
    for column in [Column(backend, "gpu", length=512, head_dim=64, dtype=jnp.bfloat16)]
    for name, cell in CELLS.items()
    if verdict(name, f"{backend} (GPU)") in ("lowered", "compiled", "equals xla")
]


def values_and_gradients(inputs, learned, options):
    """Return (outputs, gradients of `inputs` and `learned`) of a weighted sum of the outputs."""
    scale = inputs[0].shape[-1] ** -0.5

    def total(inputs, learned):
        read = dot_product_attention(*inputs, AttentionOptions(scale=scale, **learned, **options))
        weights = jnp.cos(jnp.arange(read.size, dtype=jnp.float32)).reshape(read.shape)
        return jnp.sum(read.astype(jnp.float32) * weights), read

    gradients, read = jax.grad(total, argnums=(0, 1), has_aux=True)(inputs, learned)
    return read, gradients


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize(("cell", "column"), ON_GPU)
def test_supported_cell_equals_float32_on_gpu(cell, column):
    if column.backend == "tokamax" and (missing := find_missing_tokamax()):
        pytest.skip(missing)
    inputs, learned, options = arguments(cell, column)
    kernel = jax.jit(lambda *x: values_and_gradients(*x, options | {"backend": column.backend}))
    ours = jax.tree.leaves(kernel(inputs, learned))
    in_float32 = jax.tree.map(lambda x: x.astype(jnp.float32), (inputs, learned))
    with jax.default_matmul_precision("highest"):
        plain = jax.jit(lambda *x: values_and_gradients(*x, options | {"backend": "xla"}))
        expected = jax.tree.leaves(plain(*in_float32))
    eps = float(jnp.finfo(cell.dtype or column.dtype).eps)
    for a, b in zip(ours, expected, strict=True):
        error = np.asarray(a, np.float64) - np.asarray(b, np.float64)
        assert np.linalg.norm(error) < 2 * eps * np.linalg.norm(b)


@pytest.mark.slow
@pytest.mark.parametrize(("cell", "column"), ACCEPTED)
def test_supported_cell_equals_xla(cell, column):
    inputs, learned, options = arguments(cell, column)
    chosen = {"backend": column.backend, "platform": column.platform, "interpret": True}
    if column.ring:
        chosen |= {"sharding": bound_ring(), "context_parallel": "ring"}
    both = jax.jit(
        lambda *x: (
            values_and_gradients(*x, options | chosen),
            values_and_gradients(*x, options | {"backend": "xla"}),
        )
    )
    ours, expected = (
        jax.tree.map(lambda x: np.asarray(x, np.float32), tree) for tree in both(inputs, learned)
    )
    # The tolerance is a few roundings of the largest number.
    eps = float(jnp.finfo(cell.dtype or column.dtype).eps)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=16 * eps * max(1.0, np.abs(b).max()))
