"""Time what XLA's CPU backend does slowly, each beside the same computation in a faster form.

layerkit uses the faster forms on a single CPU. Each would be unnecessary if XLA did the same by
itself. The sizes are those of `peers.py` and `peers_decode.py`.

    python benchmarks/xla_cpu.py
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

TOKENS, DIMS, MLP, LAYERS, LENGTH, HEADS, HEAD_DIM = 2048, 256, 1024, 8, 256, 4, 64


def cases() -> dict[str, tuple[Callable[..., Any], Callable[..., Any], list[Any]]]:
    """Return (slow form, fast form, arguments) of each case that one process can compare."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    def draw(*shape: int) -> jax.Array:
        return jax.random.normal(jax.random.key(0), shape)

    def in_loop(x: jax.Array, *weights: jax.Array) -> jax.Array:
        # The weights of a model are stacked before the step. The loop copies each out of the stack.
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights[0])[0]

    def unrolled(x: jax.Array, *weights: jax.Array) -> jax.Array:
        for w in weights[1:]:
            x = jnp.tanh(x @ w)
        return x

    def causal(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        queries, keys = query.shape[2], key.shape[2]
        allowed = jnp.tri(queries, keys, keys - queries, dtype=bool)
        logits = jnp.where(allowed, jnp.einsum("bhqd,bhkd->bhqk", query, key), -1e30)
        return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(logits), value)

    def in_blocks(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        ends = range(LENGTH // 4, LENGTH + 1, LENGTH // 4)
        blocks = [
            causal(query[:, :, end - LENGTH // 4 : end], key[:, :, :end], value[:, :, :end])
            for end in ends
        ]
        return jnp.concatenate(blocks, axis=2)

    stack = draw(LAYERS, MLP, MLP) / MLP**0.5
    return {
        "weight gradient, x.T @ g": (
            lambda x, g: x.T @ g,
            lambda x, g: lax.optimization_barrier(x.T) @ g,
            [draw(TOKENS, DIMS), draw(TOKENS, MLP)],
        ),
        "token through stacked layers": (in_loop, unrolled, [draw(8, MLP), stack, *stack]),
        "causal attention": (causal, in_blocks, [draw(8, HEADS, LENGTH, HEAD_DIM)] * 3),
    }


def compare(
    slow: Callable[..., Any], fast: Callable[..., Any], arguments: list[Any]
) -> list[float]:
    """Return the least seconds of both forms, which take turns."""
    import jax

    forms = [jax.jit(form).lower(*arguments).compile() for form in (slow, fast)]
    least = [float("inf")] * len(forms)
    for _ in range(50):
        for index, form in enumerate(forms):
            began = time.perf_counter()
            jax.block_until_ready(form(*arguments))
            least[index] = min(least[index], time.perf_counter() - began)
    return least


def step_with_temporaries() -> None:
    """Print the least seconds of a step with large temporaries, and its page faults."""
    import jax
    import jax.numpy as jnp

    # glibc maps blocks of more than 32 MB anew each time.
    x = jnp.ones((8 * TOKENS, DIMS))
    w = jnp.ones((DIMS, MLP))
    step = jax.jit(jax.grad(lambda w: jnp.sum(jnp.sin(jnp.sin(x @ w) @ w.T)))).lower(w).compile()
    least, faults = float("inf"), 0
    for _ in range(50):
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
        jax.block_until_ready(step(w))
        least = min(least, time.perf_counter() - began)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    print(least, faults)


def main() -> None:
    """Print a table of both forms of each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--step", choices=("plain", "kept"), help=argparse.SUPPRESS)
    step = parser.parse_args().step
    if step == "kept":
        from layerkit_runner.distributed.devices import keep_freed_memory

        keep_freed_memory()
    if step:
        step_with_temporaries()
        return
    print(f"{'':32}{'plain ms':>10}{'other ms':>10}{'ratio':>8}")
    for name, case in cases().items():
        print_row(name, *compare(*case))
    result = []
    for mode in ("plain", "kept"):
        command = [sys.executable, __file__, "--step", mode]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        seconds, faults = output.split()
        result.append((float(seconds), int(faults)))
    print_row("temporaries of a step", result[0][0], result[1][0])
    print(f"page faults of a step: {result[0][1]} and {result[1][1]}")


def print_row(name: str, plain: float, other: float) -> None:
    """Print the times of both forms and their ratio."""
    print(f"{name:32}{1000 * plain:10.2f}{1000 * other:10.2f}{plain / other:8.2f}")


if __name__ == "__main__":
    main()
