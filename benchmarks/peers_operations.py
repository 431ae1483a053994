"""Compare the operations of a training step on a CPU: layerkit's, and PyTorch's eager ones.

The step is that of `peers.py`. Each operation is timed alone, forward and backward, in one process
of each framework; the processes take turns. The table has the least milliseconds of an operation,
times its number in a step, and their sum. A step of `peers.py` takes longer by what is done between
operations, and less by what is saved by fusion.

    python benchmarks/peers_operations.py --torch=PYTHON
    python benchmarks/peers_operations.py --torch=PYTHON --dims 512 --mlp 2048 --heads 8
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from peers import SIZES, read, start

REPETITIONS = 10
Run = Callable[[], Any]
# Names of operations, with their number in a step of `layers` layers.
COUNTS: dict[str, Callable[[int], int]] = {
    "product dims, dims": lambda layers: 4 * layers,
    "product dims, mlp": lambda layers: 2 * layers,
    "product mlp, dims": lambda layers: layers,
    "attention": lambda layers: layers,
    "rotation": lambda layers: 2 * layers,
    "gated SiLU": lambda layers: layers,
    "norm": lambda layers: 2 * layers + 1,
    "embedding": lambda layers: 1,
    "product dims, vocab": lambda layers: 1,
    "cross-entropy": lambda layers: 1,
    "clipping and AdamW": lambda layers: 1,
}


def shapes(sizes: dict[str, int]) -> dict[str, list[tuple[int, ...]]]:
    """Return the shapes of the differentiated arguments of each operation."""
    tokens, dims, mlp = sizes["batch"] * sizes["length"], sizes["dims"], sizes["mlp"]
    heads = (sizes["batch"], sizes["length"], sizes["heads"], dims // sizes["heads"])
    weights = [(sizes["vocab"], dims)]
    weights += [(dims, dims)] * 4 * sizes["layers"] + [(dims, mlp)] * 3 * sizes["layers"]
    return {
        "product dims, dims": [(tokens, dims), (dims, dims)],
        "product dims, mlp": [(tokens, dims), (dims, mlp)],
        "product mlp, dims": [(tokens, mlp), (mlp, dims)],
        "attention": [heads] * 3,
        "rotation": [heads],
        "gated SiLU": [(tokens, mlp)] * 2,
        "norm": [(tokens, dims), (dims,)],
        "embedding": [(sizes["vocab"], dims)],
        "product dims, vocab": [(tokens, dims), (dims, sizes["vocab"])],
        "cross-entropy": [(tokens, sizes["vocab"])],
        "clipping and AdamW": weights,
    }


def draw_ids(sizes: dict[str, int]) -> Any:
    """Return token ids `[batch * length]`."""
    import numpy as np

    tokens = sizes["batch"] * sizes["length"]
    return np.random.default_rng(0).integers(0, sizes["vocab"], tokens)


def jax_operations(sizes: dict[str, int]) -> Iterable[tuple[str, Run]]:
    """Yield a function that runs each operation of layerkit, forward and backward."""
    from layerkit_runner.distributed.devices import keep_freed_memory

    keep_freed_memory()
    import jax
    import jax.numpy as jnp

    from layerkit.layers import Linear, RmsNorm, RotaryPositionalEmbedding
    from layerkit.ops.attention.dot_product import AttentionOptions, dot_product_attention
    from layerkit.ops.attention.masks import AttentionMask
    from layerkit.ops.losses.softmax import cross_entropy

    ids = jnp.asarray(draw_ids(sizes), jnp.int32)
    head = sizes["dims"] // sizes["heads"]
    mask = AttentionMask.causal_mask(sizes["batch"], sizes["length"])
    options = AttentionOptions(mask=mask, scale=head**-0.5)
    positions = jnp.broadcast_to(jnp.arange(sizes["length"]), (sizes["batch"], sizes["length"]))
    rotation = RotaryPositionalEmbedding.HParams.config(dims=head).Instantiate()

    def product(x: Any, w: Any) -> Any:
        linear = Linear.HParams.config(input_dims=w.shape[0], output_dims=w.shape[1]).Instantiate()
        return linear.apply({"params": {"w": w}}, x)

    def norm(x: Any, scale: Any) -> Any:
        layer = RmsNorm.HParams.config(dims=scale.shape[0]).Instantiate()
        return layer.apply({"params": {"scale": scale}}, x)

    functions: dict[str, Callable[..., Any]] = dict.fromkeys(COUNTS, product) | {
        "attention": lambda *arrays: dot_product_attention(*arrays, options),
        "rotation": lambda x: rotation.apply({}, x, positions),
        "gated SiLU": lambda gate, up: jax.nn.silu(gate) * up,
        "norm": norm,
        "embedding": lambda table: table[ids],
        "cross-entropy": lambda logits: cross_entropy(logits, ids)[0],
    }

    def differentiate(function: Callable[..., Any], arrays: list[Any]) -> Run:
        out = jax.eval_shape(function, *arrays)

        def run(cotangent: Any, *arrays: Any) -> Any:
            value, pull = jax.vjp(function, *arrays)
            return value, pull(cotangent)

        cotangent = jnp.ones(out.shape, out.dtype)
        compiled = jax.jit(run).lower(cotangent, *arrays).compile()
        return lambda: jax.block_until_ready(compiled(cotangent, *arrays))

    for name, sides in shapes(sizes).items():
        keys = jax.random.split(jax.random.key(0), len(sides))
        arrays = [jax.random.normal(key, side) for key, side in zip(keys, sides, strict=True)]
        if name != "clipping and AdamW":
            yield name, differentiate(functions[name], arrays)
            continue
        yield name, jax_update(arrays)


def jax_update(weights: list[Any]) -> Run:
    """Return a function that updates weights as the learner does."""
    import jax
    import jax.numpy as jnp
    import optax

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def update(weights: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state

    grads = jax.tree.map(jnp.copy, weights)
    state = [weights, optimizer.init(weights)]
    step = jax.jit(update, donate_argnums=(0, 1)).lower(*state, grads).compile()

    def run() -> None:
        state[:] = step(*state, grads)
        jax.block_until_ready(state)

    return run


def torch_operations(sizes: dict[str, int]) -> Iterable[tuple[str, Run]]:
    """Yield a function that runs each operation of PyTorch, forward and backward."""
    import torch
    from torch.nn import functional
    from torch_rival import rotated

    ids = torch.tensor(draw_ids(sizes))
    half = sizes["dims"] // sizes["heads"] // 2
    angles = torch.arange(sizes["length"])[:, None] / 10_000.0 ** (torch.arange(half) / half)
    sin, cos = angles.sin(), angles.cos()

    def attention(*arrays: torch.Tensor) -> torch.Tensor:
        heads = (x.transpose(1, 2) for x in arrays)
        return functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)

    functions: dict[str, Callable[..., Any]] = dict.fromkeys(COUNTS, torch.matmul) | {
        "attention": attention,
        "rotation": lambda x: rotated(x.transpose(1, 2), sin, cos).transpose(1, 2),
        "gated SiLU": lambda gate, up: functional.silu(gate) * up,
        "norm": lambda x, scale: functional.rms_norm(x, scale.shape, scale, 1e-6),
        "embedding": lambda table: table[ids],
        "cross-entropy": lambda logits: functional.cross_entropy(logits, ids, reduction="none"),
    }

    def differentiate(function: Callable[..., Any], arrays: list[Any]) -> Run:
        cotangent = torch.ones_like(function(*arrays))
        return lambda: torch.autograd.grad(function(*arrays), arrays, cotangent)

    for name, sides in shapes(sizes).items():
        arrays = [torch.randn(side, requires_grad=True) for side in sides]
        if name != "clipping and AdamW":
            yield name, differentiate(functions[name], arrays)
            continue
        yield name, torch_update(arrays)


def torch_update(weights: list[Any]) -> Run:
    """Return a function that updates weights as `torch_rival.py` does."""
    import torch

    optimizer = torch.optim.AdamW(weights, 1e-3, fused=True)
    for weight in weights:
        weight.grad = torch.randn_like(weight)

    def run() -> None:
        torch.nn.utils.clip_grad_norm_(weights, 1.0, foreach=True)
        optimizer.step()

    return run


def work(framework: str, sizes: dict[str, int]) -> None:
    """Serve one framework: for each line, print the least seconds of each operation."""
    operations = list((jax_operations if framework == "layerkit" else torch_operations)(sizes))
    for _, run in operations:
        run()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps({name: least_seconds(run) for name, run in operations}), flush=True)


def least_seconds(run: Run) -> float:
    """Return the least seconds of some calls."""
    least = float("inf")
    for _ in range(REPETITIONS):
        began = time.perf_counter()
        run()
        least = min(least, time.perf_counter() - began)
    return least


def compare(torch: str, sizes: dict[str, int], *, turns: int) -> dict[str, dict[str, float]]:
    """Return the least seconds of each operation, by framework."""
    arguments = [f"--{name}={size}" for name, size in sizes.items()]
    workers = {
        name: start([python, __file__, "--worker", name, "--torch", torch, *arguments])
        for name, python in (("layerkit", sys.executable), ("torch eager", torch))
    }
    for worker in workers.values():
        read(worker)
    seconds = {name: dict.fromkeys(COUNTS, float("inf")) for name in workers}
    for _ in range(turns):
        for name, worker in workers.items():
            assert worker.stdin is not None
            print(file=worker.stdin, flush=True)
            for operation, least in json.loads(read(worker)).items():
                seconds[name][operation] = min(seconds[name][operation], least)
    for worker in workers.values():
        worker.communicate()
    return seconds


def main() -> None:
    """Compare the operations and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", required=True, help="Python interpreter with PyTorch")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    sizes = {name: getattr(args, name) for name in SIZES}
    if args.worker:
        work(args.worker, sizes)
        return
    seconds = compare(args.torch, sizes, turns=args.turns)
    print(f"{'ms of a step':24}{'number':>8}{'layerkit':>10}{'torch':>10}{'ratio':>8}")
    totals = [0.0, 0.0]
    for name, count in COUNTS.items():
        number = count(sizes["layers"])
        ours, theirs = (1000 * number * seconds[rival][name] for rival in seconds)
        totals = [totals[0] + ours, totals[1] + theirs]
        print(f"{name:24}{number:8}{ours:10.2f}{theirs:10.2f}{theirs / ours:8.2f}")
    print(f"{'sum':24}{'':8}{totals[0]:10.2f}{totals[1]:10.2f}{totals[1] / totals[0]:8.2f}")


if __name__ == "__main__":
    main()
