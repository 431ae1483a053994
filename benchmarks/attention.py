"""Compare the speed and memory of each attention backend with plain array code.

The benchmark runs one jitted `dot_product_attention`, forward and backward; each backend alternates
with `xla` on the same arrays. The output has the speed ratio (above 1: faster than xla) as the
median over pairs, tokens per second, and temporary memory per device. On a GPU or TPU it compares
the fused kernels that support the call, and prints why the others do not. Without an accelerator,
eight simulated devices shard the length: the kinds of context parallelism are compared with
compiler-partitioned array code, and only the memory figures apply to real devices.

    python benchmarks/attention.py
    python benchmarks/attention.py --length 8192 --heads 32 --kv-heads 8 --window 1024
    python benchmarks/attention.py --length 32768 --head-dim 128 --dtype bfloat16 --pairs 0

Without pairs, programs are compiled and not run.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("NPROC", "32")  # a thread for each simulated device in a collective
DEVICES = "--xla_force_host_platform_device_count"
if DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}=8".strip()

import jax  # noqa: E402 - after the flags that it reads
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from layerkit.base.sharding import BoundSharding  # noqa: E402
from layerkit.ops.attention.dot_product import (  # noqa: E402
    AttentionOptions,
    dot_product_attention,
)
from layerkit.ops.attention.masks import AttentionMask  # noqa: E402
from layerkit.ops.implementations import UnsupportedBackendError  # noqa: E402

Inputs = tuple[jax.Array, jax.Array, jax.Array]


def draw(args: argparse.Namespace, sharding: BoundSharding | None) -> Inputs:
    """Return random queries, keys and values with the sharding of a model."""
    random = np.random.default_rng(0)
    heads = (args.heads, "act_heads"), *[(args.kv_heads, "act_kv_heads")] * 2
    arrays = []
    for count, name in heads:
        shape = (args.batch, args.length, count, args.head_dim)
        array = jnp.asarray(random.normal(size=shape), args.dtype)
        if sharding is not None:
            array = jax.device_put(array, sharding.sharding(("batch", "length", name, None)))
        arrays.append(array)
    query, key, value = arrays
    return query, key, value


def step(args: argparse.Namespace, **options: Any) -> Callable[..., Any]:
    """Return the function that computes attention, forward and backward."""
    mask = AttentionMask.causal_mask(args.batch, args.length).within(args.window)

    def total(inputs: Inputs) -> jax.Array:
        read = dot_product_attention(
            *inputs, AttentionOptions(mask=mask, scale=args.head_dim**-0.5, **options)
        )
        return jnp.sum(jnp.square(read.astype(jnp.float32)))

    return jax.grad(total)


def seconds(run: Callable[[Inputs], Any], inputs: Inputs) -> float:
    """Return the seconds of one step."""
    began = time.perf_counter()
    jax.block_until_ready(run(inputs))
    return time.perf_counter() - began


def compare(args: argparse.Namespace) -> None:
    """Compile every backend, alternate each with xla, and print a line for each."""
    rivals: dict[str, dict[str, Any]] = {
        name: {"backend": name} for name in ("cudnn", "tokamax", "pallas")
    }
    sharding = None
    if jax.default_backend() == "cpu":
        auto = (jax.sharding.AxisType.Auto,)
        sharding = BoundSharding(jax.make_mesh((8,), ("context",), axis_types=auto))
        ways = ("all_gather", "ring", "ulysses")
        rivals |= {name: {"sharding": sharding, "context_parallel": name} for name in ways}
    inputs = draw(args, sharding)
    plain = jax.jit(step(args, backend="xla")).lower(inputs).compile()
    report("xla", plain, [seconds(plain, inputs) for _ in range(args.pairs)], args)
    for name, options in rivals.items():
        try:
            rival = jax.jit(step(args, **options)).lower(inputs).compile()
        except UnsupportedBackendError as refusal:
            print(f"{name}: {refusal}")
            continue
        if args.pairs == 0:
            report(name, rival, [], args)
            continue
        seconds(rival, inputs), seconds(plain, inputs)
        ours, theirs = [], []
        for _ in range(args.pairs):
            ours.append(seconds(rival, inputs))
            theirs.append(seconds(plain, inputs))
        ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
        report(f"{name}: {ratio:.2f} of the speed of xla", rival, ours, args)


def report(name: str, compiled: Any, times: list[float], args: argparse.Namespace) -> None:
    """Print speed and memory in one line."""
    megabytes = compiled.memory_analysis().temp_size_in_bytes / 1e6
    speed = f", {args.batch * args.length / statistics.median(times):.0f} tokens/s" if times else ""
    print(f"{name}{speed}, {megabytes:.1f} MB temporary per device")


def main() -> None:
    """Parse the sizes and compare the backends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    on_cpu = jax.default_backend() == "cpu"
    defaults = {
        "batch": 1 if on_cpu else 4,
        "length": 1024 if on_cpu else 4096,
        "heads": 8 if on_cpu else 32,
        "kv-heads": 8,
        "head-dim": 32 if on_cpu else 128,
        "pairs": 5 if on_cpu else 20,
    }
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--window", type=int, default=None)
    parser.add_argument("--dtype", default="float32" if on_cpu else "bfloat16")
    args = parser.parse_args()
    kind = jax.devices()[0].device_kind
    print(f"{platform.machine()}, {jax.device_count()} of {kind}, jax {jax.__version__}, {args}")
    compare(args)


if __name__ == "__main__":
    main()
