"""Compare the speed of mixtures of experts, dropless and with a capacity, with a dense block.

    python benchmarks/moe.py
    python benchmarks/moe.py --bf16 --dims 1024 --hidden 2048 --length 2048     # on a GPU or TPU

Each expert layer has eight experts, of which a token uses two. The dense feed-forward block has
twice the width of one expert, so it has the same multiplications per token. A round runs a forward
and a backward pass of each layer in training mode. Ratios are relative to the dense layer.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from layerkit.layers.basic.elementwise import SiLU
from layerkit.layers.moe.token_choice import MoeFeedForward
from layerkit.layers.transformer.transformer import TransformerFeedForward


def layers(dims: int, hidden: int, *, bf16: bool) -> dict[str, Any]:
    """Return the layers to compare by name, the dense one first."""
    sizes = {"input_dims": dims, "hidden_dims": hidden, "train": True}
    sizes["fprop_dtype"] = jnp.bfloat16 if bf16 else None
    experts = {**sizes, "num_experts": 8, "num_experts_per_token": 2}
    silu = SiLU.HParams.config()
    dense = {**sizes, "hidden_dims": 2 * hidden, "use_gate": True, "activation_tpl": silu}
    kernels = {}
    if bf16 and jax.default_backend() != "cpu":
        kernels["dropless, pallas"] = MoeFeedForward(**experts, grouped_matmul="pallas")
    return {
        "dense": TransformerFeedForward(**dense),
        **kernels,
        "dropless, blocks": MoeFeedForward(**experts, grouped_matmul="blocks"),
        "dropless, ragged_dot": MoeFeedForward(**experts, grouped_matmul="ragged_dot"),
        "capacity factor 1.0": MoeFeedForward(**experts, capacity_factor=1.0),
        "capacity factor 1.25": MoeFeedForward(**experts, capacity_factor=1.25),
        "capacity factor 2.0": MoeFeedForward(**experts, capacity_factor=2.0),
    }


def step_of(layer: Any, x: jax.Array) -> tuple[Any, int, float]:
    """Return (function of a forward and backward pass, temporary bytes, fraction dropped)."""
    variables = layer.init(jax.random.key(0))

    def loss(variables: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        output, updates = layer.apply(variables, x, mutable=["aux_loss", "summaries"])
        aux = sum((jnp.sum(leaf) for leaf in jax.tree.leaves(updates.get("aux_loss", {}))), 0.0)
        return jnp.sum(jnp.square(output)) + aux, updates.get("summaries", {})

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True)).lower(variables, x).compile()
    _, summaries = compiled(variables, x)
    dropped = float(summaries.get("fraction_dropped", (0.0,))[0])
    memory = compiled.memory_analysis().temp_size_in_bytes
    return lambda: jax.block_until_ready(compiled(variables, x)), memory, dropped


def main() -> None:
    """Measure the layers round-robin and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dims", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    given = parser.parse_args()
    x = jax.random.normal(jax.random.key(1), (given.batch, given.length, given.dims))
    rivals = layers(given.dims, given.hidden, bf16=given.bf16)
    steps = {name: step_of(layer, x) for name, layer in rivals.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(given.rounds):
        for name, (step, _, _) in steps.items():
            began = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - began)
    device = jax.devices()[0].device_kind
    print(f"{platform.machine()}, {device}, jax {jax.__version__}, {given}")
    for name, (_, memory, dropped) in steps.items():
        ratios = [a / b for a, b in zip(seconds[name], seconds["dense"], strict=True)]
        tokens_per_second = given.batch * given.length / statistics.median(seconds[name])
        print(
            f"{name:21} {tokens_per_second:10.0f} tokens/s, {statistics.median(ratios):5.2f} times"
            f" the dense time, temporaries {memory / 1e6:6.1f} MB, {100 * dropped:4.1f} % dropped"
        )


if __name__ == "__main__":
    main()
