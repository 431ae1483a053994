"""Compare the speed of layerkit's training step with that of a hand-written step.

Both train the same model from the same weights on the same batches, alternating in one process.
The hand-written step (`benchmarks/handwritten.py`) imports nothing of this project, scans over
layers and donates its state. The output has the speed ratio (above 1: layerkit is faster) as the
median over pairs with a 95 % interval, both losses, and the FLOPs and temporary memory of each
compiled program.

    python benchmarks/step.py                       # the quickstart's sizes
    python benchmarks/step.py --dims 1024 --layers 12 --heads 16 --length 1024 --batch 8 --bf16
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import handwritten
import jax
import jax.numpy as jnp
import numpy as np
import optax

from layerkit.config import Config, Partial
from layerkit.config.nested_map import NestedMap
from layerkit.layers import (
    RmsNorm,
    RotaryPositionalEmbedding,
    SiLU,
    StackedTransformerRepeated,
)
from layerkit.models import LanguageModel, TransformerLm
from layerkit_runner.optim.learner import Learner
from layerkit_runner.partitioning import SpmdPartitioner
from layerkit_runner.step.task import SingleTask
from layerkit_runner.step.train_hparams import TrainHParams
from layerkit_runner.step.train_state import TrainState

LEARNING_RATE = 1e-3
CLIP = 1.0


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the model and of the batch."""

    vocab: int
    dims: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    batch: int
    length: int
    bf16: bool
    remat: bool


def layerkit_step(sizes: Sizes, params: Any, batch: NestedMap) -> tuple[Any, TrainState]:
    """Return layerkit's compiled step, and a train state with the hand-written model's weights."""
    lm: Config = TransformerLm.HParams.config(
        vocab_size=sizes.vocab,
        model_dims=sizes.dims,
        hidden_dims=sizes.mlp,
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        final_norm_tpl=RmsNorm.HParams.config(),
        stack_tpl=StackedTransformerRepeated.HParams.config(
            remat="full" if sizes.remat else "none"
        ),
    )
    layer = lm.stack_tpl.layer_tpl
    layer.norm_tpl = RmsNorm.HParams.config()
    layer.attention_tpl.rotary_tpl = RotaryPositionalEmbedding.HParams.config()
    layer.feed_forward_tpl.set(activation_tpl=SiLU.HParams.config(), use_gate=True)
    dtype = "bfloat16" if sizes.bf16 else "float32"
    learner = Learner.HParams.config(
        optimizer=Partial(optax.adamw, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.0),
        learning_rate=LEARNING_RATE,
        clip_global_norm=CLIP,
    )
    task = SingleTask.HParams.config(
        model=LanguageModel.HParams.config(lm_tpl=lm, fprop_dtype=dtype),
        train=TrainHParams.HParams.config(learner=learner),
    ).Instantiate()
    partitioner = SpmdPartitioner()
    partitioner.start(jax.devices()[:1])
    partitioner.bind(task)
    shapes = partitioner.abstract_state(task)
    weights = to_layerkit(params, sizes)
    state = TrainState(
        step=jnp.zeros((), jnp.int32),
        params=weights,
        non_trainable={},
        opt_state=task.train.learner.init(weights),
    )
    state = jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, shapes))
    step = partitioner.train_step_fn(task).lower(shapes, partitioner.abstract_batch(batch))
    return step.compile(), state


def to_layerkit(params: Any, sizes: Sizes) -> Any:
    """Convert the hand-written model's weights to layerkit's names and shapes."""
    stacked = params["layers"]
    head = sizes.dims // sizes.heads

    def into_heads(name: str, heads: int) -> dict[str, Any]:
        return {"w": stacked[name].reshape(sizes.layers, sizes.dims, heads, head)}

    layer = {
        "attention": {
            "query": into_heads("query", sizes.heads),
            "key": into_heads("key", sizes.kv_heads),
            "value": into_heads("value", sizes.kv_heads),
            "output": {
                "w": stacked["attention_out"].reshape(sizes.layers, sizes.heads, head, sizes.dims)
            },
        },
        "attention_norm": {"scale": stacked["attention_norm"]},
        "feed_forward": {
            "gate": {"w": stacked["mlp_gate"]},
            "up": {"w": stacked["mlp_up"]},
            "down": {"w": stacked["mlp_down"]},
        },
        "feed_forward_norm": {"scale": stacked["mlp_norm"]},
    }
    lm = {
        "softmax": {"w": params["embedding"]},
        "stack": {"repeat": {"sub": layer}},
        "final_norm": {"scale": params["final_norm"]},
    }
    return {"lm": lm}


def handwritten_step(sizes: Sizes, params: Any, batch: dict[str, Any]) -> tuple[Any, Any]:
    """Return the hand-written compiled step and the initial optimizer state."""
    config = rival_config(sizes)
    optimizer = optax.chain(
        optax.clip_by_global_norm(CLIP),
        optax.adamw(LEARNING_RATE, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.0),
    )
    opt_state = optimizer.init(params)
    step = handwritten.make_train_step(config, optimizer)
    return step.lower(params, opt_state, batch).compile(), opt_state


def rival_config(sizes: Sizes) -> handwritten.Config:
    """Return the config of the hand-written model."""
    return handwritten.Config(
        vocab_size=sizes.vocab,
        dims=sizes.dims,
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        mlp_dims=sizes.mlp,
        compute_dtype=jnp.bfloat16 if sizes.bf16 else jnp.float32,
        remat=sizes.remat,
    )


def make_batch(sizes: Sizes, seed: int) -> dict[str, np.ndarray]:
    """Return a batch of random tokens with two documents in each row."""
    draw = np.random.default_rng(seed).integers(3, sizes.vocab, (sizes.batch, sizes.length + 1))
    position = np.broadcast_to(np.arange(sizes.length), (sizes.batch, sizes.length))
    half = sizes.length // 2
    return {
        "ids": draw[:, :-1].astype(np.int32),
        "labels": draw[:, 1:].astype(np.int32),
        "weights": np.ones((sizes.batch, sizes.length), np.float32),
        "segment_ids": (1 + (position >= half)).astype(np.int32),
        "segment_pos": np.where(position >= half, position - half, position).astype(np.int32),
    }


def timed(run: Callable[[], Any]) -> tuple[float, float]:
    """Run one step; return its (seconds, loss)."""
    began = time.perf_counter()
    loss = jax.block_until_ready(run())
    return time.perf_counter() - began, float(loss)


def compare(sizes: Sizes, *, pairs: int) -> dict[str, Any]:
    """Run pairs of both steps, in random order within each pair, and return the figures."""
    params = handwritten.init_params(jax.random.key(0), rival_config(sizes))
    batch = make_batch(sizes, 0)
    ours, our_state = layerkit_step(sizes, params, NestedMap(batch))
    rival, opt_state = handwritten_step(sizes, params, batch)
    on_device = jax.device_put(batch)
    ours_batch = NestedMap(on_device)
    rival_state = (jax.tree.map(jnp.copy, params), opt_state)
    our_state = jax.tree.map(jnp.copy, our_state)

    def run_ours() -> Any:
        nonlocal our_state
        our_state, (metrics, _) = ours(our_state, ours_batch)
        return metrics["loss"].value

    def run_rival() -> Any:
        nonlocal rival_state
        *rival_state, loss = rival(*rival_state, on_device)
        return loss

    ratios, losses, seconds = [], [], {"layerkit": [], "handwritten": []}
    runs = {"layerkit": run_ours, "handwritten": run_rival}
    for _ in range(3):
        first = {name: timed(run)[1] for name, run in runs.items()}
        losses.append(first)
    for _ in range(pairs):
        measured = {}
        for name in random.sample(sorted(runs), 2):
            measured[name] = timed(runs[name])
            seconds[name].append(measured[name][0])
        ratios.append(measured["handwritten"][0] / measured["layerkit"][0])
        losses.append({name: measured[name][1] for name in runs})
    low, high = median_interval(ratios)
    difference = max(abs(pair["layerkit"] - pair["handwritten"]) for pair in losses)
    return {
        "speed_ratio": statistics.median(ratios),
        "interval_95": [low, high],
        "pairs": pairs,
        "median_seconds": {name: statistics.median(times) for name, times in seconds.items()},
        "largest_loss_difference": difference,
        "last_losses": losses[-1],
        "layerkit": compiler_counts(ours),
        "handwritten": compiler_counts(rival),
    }


def median_interval(values: list[float]) -> tuple[float, float]:
    """Return a 95 % bootstrap interval of the median."""
    rng = np.random.default_rng(0)
    draws = np.median(rng.choice(values, (2000, len(values))), axis=1)
    return float(np.quantile(draws, 0.025)), float(np.quantile(draws, 0.975))


def compiler_counts(compiled: Any) -> dict[str, float]:
    """Return the FLOPs, with a scan body counted once, and the temporary bytes."""
    cost = compiled.cost_analysis()
    cost = cost[0] if isinstance(cost, list) else cost
    memory = compiled.memory_analysis()
    return {"flops": cost["flops"], "temporary_bytes": memory.temp_size_in_bytes}


def main() -> None:
    """Compare both steps and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("vocab", 259),
        ("dims", 128),
        ("layers", 4),
        ("heads", 4),
        ("mlp", 512),
        ("batch", 8),
        ("length", 128),
        ("pairs", 60),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kv-heads", type=int, default=None)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--remat", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = vars(parser.parse_args())
    pairs, as_json = args.pop("pairs"), args.pop("json")
    args["kv_heads"] = args["kv_heads"] or args["heads"]
    sizes = Sizes(**args)
    result = {
        "sizes": dataclasses.asdict(sizes),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {jax.devices()[0].device_kind}",
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "flax", "optax")},
        **compare(sizes, pairs=pairs),
    }
    if as_json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
