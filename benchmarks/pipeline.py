"""Compare a GPipe and a circular pipeline with the same layers without a pipeline.

All variants run the same layers and batch on simulated devices: a mesh `stage=4` for the pipelines,
`data=4` for the plain stack. All store the layer inputs for the backward pass and recompute the
rest. A simulated device also computes during a bubble, and all devices share the cores, so bubbles
take the same share of time as on real devices. The output has the ratio that the formula predicts
beside the measured one. The benchmark does not measure the cost of real links.

    python benchmarks/pipeline.py
    python benchmarks/pipeline.py --microbatches 16 --repeats 4
"""

from __future__ import annotations

import argparse
import os

STAGES = 4
# JAX reads these at import. NPROC gives each simulated device a thread while it waits.
os.environ.update(XLA_FLAGS=f"--xla_force_host_platform_device_count={STAGES}", NPROC="32")
os.environ["JAX_PLATFORMS"] = "cpu"

import platform  # noqa: E402
import statistics  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from layerkit.base.sharding import BoundSharding  # noqa: E402
from layerkit.base.weights import logical_axes, unbox  # noqa: E402
from layerkit.layers.transformer.pipelined_transformer import PipelinedTransformer  # noqa: E402
from layerkit.layers.transformer.stacks import (  # noqa: E402
    StackedTransformer,
    StackedTransformerRepeated,
)
from layerkit.ops.attention.masks import AttentionMask, row_positions  # noqa: E402
from layerkit.ops.pipeline_schedule import bubble_fraction  # noqa: E402


def prepare(stack: StackedTransformer, axis: str, x: np.ndarray) -> tuple[Callable[[], Any], float]:
    """Return (function of a training pass over `x`, temporary megabytes per device).

    Args:
      stack: Layers to run.
      axis: Name of the mesh axis of all devices.
      x: Inputs, float32 `[batch, length, dims]`.
    """
    auto = (jax.sharding.AxisType.Auto,)
    sharding = BoundSharding(jax.make_mesh((STAGES,), (axis,), axis_types=auto))
    stack = stack.clone(sharding=sharding)
    mask = AttentionMask.causal_mask(*x.shape[:2])
    positions = row_positions(*x.shape[:2])

    def loss(variables: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(stack.apply(variables, x, mask=mask, positions=positions) ** 2)

    boxed = jax.eval_shape(stack.init_boxed, jax.random.key(0))
    places = jax.tree.map(
        lambda axes, weight: sharding.sharding(axes, shape=weight.shape),
        logical_axes(boxed),
        unbox(boxed),
        is_leaf=lambda leaf: isinstance(leaf, tuple),
    )
    variables = jax.jit(stack.init, out_shardings=places)(jax.random.key(0))
    rows = jax.device_put(x, sharding.sharding(("batch", None, None)))
    run = jax.jit(jax.value_and_grad(loss), out_shardings=(None, places))
    compiled = run.lower(variables, rows).compile()
    megabytes = compiled.memory_analysis().temp_size_in_bytes / 1e6
    return lambda: jax.block_until_ready(compiled(variables, rows)), megabytes


def main() -> None:
    """Measure the variants round-robin and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in [
        ("microbatches", 8), ("repeats", 2), ("layers", 8), ("dims", 256), ("heads", 4),
        ("length", 64), ("rows", 4), ("rounds", 5),
    ]:  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()

    batch = args.microbatches * args.rows
    x = np.random.default_rng(0).normal(size=(batch, args.length, args.dims)).astype(np.float32)
    sizes = {
        "num_layers": args.layers,
        "input_dims": args.dims,
        "hidden_dims": 4 * args.dims,
        "num_heads": args.heads,
    }
    schedule = {"num_stages": STAGES, "num_microbatches": args.microbatches}
    pipelined = PipelinedTransformer.HParams.config(
        **sizes, **schedule, remat="full", stage_remat="none"
    )
    circular = PipelinedTransformer.HParams.config(
        **sizes, **schedule, circular_repeats=args.repeats
    )
    plain = StackedTransformerRepeated.HParams.config(**sizes, remat="full")
    # Config, mesh axis and expected busy fraction of each variant.
    variants = {
        "no pipeline": (plain, "data", 1.0),
        "GPipe": (pipelined, "stage", 1 - bubble_fraction(**schedule)),
        f"circular, {args.repeats} repeats": (
            circular,
            "stage",
            1 - bubble_fraction(**schedule, circular_repeats=args.repeats),
        ),
    }
    ready = {
        name: prepare(config.Instantiate(), axis, x) for name, (config, axis, _) in variants.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for round_ in range(args.rounds + 1):
        for name, (run, _) in ready.items():
            began = time.perf_counter()
            run()
            if round_:  # the first round is a warm-up
                seconds[name].append(time.perf_counter() - began)

    print(
        f"{platform.machine()}, {os.cpu_count()} cores, jax {jax.__version__}, float32;"
        f" {STAGES} simulated devices, {vars(args)}"
    )
    print(f"{'':24}{'tokens/s':>10}{'ratio':>8}{'expected':>10}{'bubble':>8}{'temporaries':>14}")
    for name, (_, _, busy) in variants.items():
        speed = batch * args.length / statistics.median(seconds[name])
        pairs = zip(seconds["no pipeline"], seconds[name], strict=True)
        ratio = statistics.median(plain / own for plain, own in pairs)
        print(
            f"{name:24}{speed:10.0f}{ratio:8.2f}{busy:10.2f}{1 - busy:8.2f}"
            f"{ready[name][1]:11.1f} MB"
        )


if __name__ == "__main__":
    main()
