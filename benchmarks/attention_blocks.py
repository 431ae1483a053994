"""Time the Pallas kernels of attention on a GPU with different blocks.

Each pass (forward, gradient of queries, gradients of keys and values) is compiled and timed with
each tile: queries and keys of a block, and blocks that are loaded ahead (stages). The fastest are
candidates for `layerkit.ops.attention.pallas.kernel_blocks`. A star marks the default of this GPU.
The last line is the time of cuDNN for causal rows without documents.

    python benchmarks/attention_blocks.py                                     # heads of 128
    python benchmarks/attention_blocks.py --batch 8 --length 2048 --heads 12 --head-dim 64
    python benchmarks/attention_blocks.py --documents 4 --tiles 64.64.2,64.64.3

TFLOP/s count half of the products, as for a causal row of one document.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from layerkit.ops.attention.masks import AttentionMask
from layerkit.ops.attention.pallas.kernel_blocks import GpuTile, gpu_tiles
from layerkit.ops.triton.flash_gpu import mask_arrays
from layerkit.ops.triton.flash_gpu_kernels import (
    BackwardInputs,
    KernelOptions,
    MaskArrays,
    forward,
    key_gradients,
    query_gradient,
)

TILES = (
    "32.32.2,64.32.2,64.64.1,64.64.2,64.64.3,128.32.2,128.64.2,128.64.3,64.128.2,128.128.2,"
    "128.128.3"
)
# Products of queries and keys, or of probabilities and values, in each pass.
PRODUCTS = {"forward": 2, "query_gradient": 3, "key_gradients": 4}
REPEATS, GROUPS = 20, 3


def passes(tile: GpuTile, head_dim: int, arrays: MaskArrays) -> Mapping[str, Callable[..., Any]]:
    """Return the function of each pass, from the arrays of `BackwardInputs`."""
    options = KernelOptions(
        scale=head_dim**-0.5,
        causal=True,
        window=None,
        in_row_order=True,
        logit_cap=None,
        tile=tile,
        interpret=False,
    )
    return {
        "forward": lambda q, k, v, *_: forward(options, q, k, v, None, arrays),
        "query_gradient": lambda *x: query_gradient(options, BackwardInputs(*x, arrays)),
        "key_gradients": lambda *x: key_gradients(options, BackwardInputs(*x, arrays)),
    }


def draw(args: argparse.Namespace) -> tuple[jax.Array, ...]:
    """Return random queries, keys, values and gradient of the outputs, in bfloat16."""
    random = np.random.default_rng(0)
    heads = args.heads, args.kv_heads, args.kv_heads, args.heads
    shapes = ((args.batch, args.length, count, args.head_dim) for count in heads)
    return tuple(jnp.asarray(random.normal(size=shape), jnp.bfloat16) for shape in shapes)


def compiled(function: Callable[..., Any], inputs: Any) -> Any:
    """Return the compiled program, or why Triton refused the tile."""
    try:
        return jax.jit(function).lower(*inputs).compile()
    except jax.errors.JaxRuntimeError as error:
        return str(error).splitlines()[0]


def milliseconds(program: Any, inputs: Any) -> float:
    """Return the median time of a call over groups of calls."""
    jax.block_until_ready(program(*inputs))
    result = []
    for _ in range(GROUPS):
        began = time.perf_counter()
        for _ in range(REPEATS):
            out = program(*inputs)
        jax.block_until_ready(out)
        result.append(1e3 * (time.perf_counter() - began) / REPEATS)
    return statistics.median(result)


def report_tiles(args: argparse.Namespace, inputs: Any, arrays: MaskArrays) -> None:
    """Compile all tiles and passes, and print a line for each."""
    defaults = gpu_tiles(
        None,
        lengths=(args.length, args.length),
        dtype=jnp.bfloat16,
        largest_dim=args.head_dim,
        device_kind=jax.devices()[0].device_kind,
    )._asdict()
    tiles = [GpuTile(*map(int, each.split("."))) for each in args.tiles.split(",")]
    cases = [
        (name, tile, function)
        for tile in tiles
        for name, function in passes(tile, args.head_dim, arrays).items()
    ]
    with ThreadPoolExecutor() as pool:
        programs = list(pool.map(lambda case: compiled(case[2], inputs), cases))
    products = args.batch * args.heads * args.length**2 * args.head_dim / 2
    lines = []
    for (name, tile, _), program in zip(cases, programs, strict=True):
        if isinstance(program, str):
            lines.append((name, float("inf"), f"{name:16}{tuple(tile)!s:16} {program[:100]}"))
            continue
        ms = milliseconds(program, inputs)
        speed = 2e-9 * PRODUCTS[name] * products / ms
        star = " *" if defaults[name] == tile else ""
        lines.append(
            (name, ms, f"{name:16}{tuple(tile)!s:16}{ms:8.3f} ms{speed:6.0f} TFLOP/s{star}")
        )
    for _, _, line in sorted(lines, key=lambda each: (list(PRODUCTS).index(each[0]), each[1])):
        print(line)


def report_cudnn(inputs: Any) -> None:
    """Print the times of cuDNN, which supports heads up to 128, for the same arrays."""
    if inputs[0].shape[-1] > 128:
        return

    def attend(*x: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(*x, is_causal=True, implementation="cudnn")

    both = compiled(lambda q, k, v, given: jax.vjp(attend, q, k, v)[1](given), inputs)
    alone = compiled(attend, inputs[:3])
    print(
        f"cuDNN, causal: forward {milliseconds(alone, inputs[:3]):.3f} ms,"
        f" forward and backward {milliseconds(both, inputs):.3f} ms"
    )


def main() -> None:
    """Parse the sizes and print the times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"batch": 4, "length": 4096, "heads": 16, "kv-heads": None, "head-dim": 128}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--documents", type=int, default=0, help="documents in a row; 0: no ids")
    parser.add_argument("--tiles", default=TILES, help="queries.keys.stages, comma-separated")
    args = parser.parse_args()
    args.kv_heads = args.kv_heads or args.heads
    if jax.default_backend() != "gpu":
        raise SystemExit("attention_blocks.py: JAX found no GPU")
    segments = None
    if args.documents:
        documents = 1 + np.arange(args.length) * args.documents // args.length
        segments = jnp.asarray(np.broadcast_to(documents, (args.batch, args.length)), jnp.int32)
    arrays = mask_arrays(
        AttentionMask.causal_mask(args.batch, args.length, segment_ids=segments), args.batch
    )
    query, key, value, given = draw(args)
    attend = passes(GpuTile(32, 32), args.head_dim, arrays)["forward"]
    out, log_sum = jax.jit(attend)(query, key, value)
    common = jnp.einsum("blhd,blhd->bhl", out, given, preferred_element_type=jnp.float32)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {vars(args)}")
    report_tiles(args, (query, key, value, given, log_sum, common), arrays)
    report_cudnn((query, key, value, given))


if __name__ == "__main__":
    main()
