"""Compare decoding with a cache with recomputing the whole row for every token.

Both ways decode the same greedy continuations with one model, alternating in one process. The
output has the tokens per second of each way and their ratio; the speed of prefilling the cache at
once relative to token by token; the time of several samples and beams relative to one greedy
continuation, and that of their steps relative to steps with shared prompts (lazy prefix broadcast);
and the size of the cache.

    python benchmarks/decode.py
    python benchmarks/decode.py --prompt 1024 --samples 8 --batch 1
    python benchmarks/decode.py --dims 1024 --layers 12 --heads 16 --prompt 512 --steps 256 --bf16
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from layerkit.base.base_layer import CACHE
from layerkit.config.nested_map import NestedMap
from layerkit.decoding import BeamSearch, SampleDecoder
from layerkit.layers import RmsNorm, RotaryPositionalEmbedding, SiLU, StackedTransformerRepeated
from layerkit.models import LanguageModel


def make_model(args: argparse.Namespace) -> LanguageModel:
    """Return a decoder with rotary positions, grouped queries, gates and a tied embedding."""
    config = LanguageModel.HParams.config(fprop_dtype=jnp.bfloat16 if args.bf16 else None)
    norm = RmsNorm.HParams.config()
    config.lm_tpl.set(
        vocab_size=args.vocab,
        model_dims=args.dims,
        hidden_dims=4 * args.dims,
        num_layers=args.layers,
        num_heads=args.heads,
        num_kv_heads=max(1, args.heads // 4),
        stack_tpl=StackedTransformerRepeated.HParams.config(),
        final_norm_tpl=norm,
    )
    layer = config.lm_tpl.stack_tpl.layer_tpl
    layer.norm_tpl = norm
    layer.attention_tpl.rotary_tpl = RotaryPositionalEmbedding.HParams.config()
    layer.feed_forward_tpl.set(use_gate=True, activation_tpl=SiLU.HParams.config())
    model: LanguageModel = config.Instantiate()
    return model


def cached(model: LanguageModel, decoder: Any) -> Callable[..., jax.Array]:
    """Return a jitted `(variables, prompts) -> ids` that calls the model's `decode`."""
    model = model.clone(decoder=decoder)

    @jax.jit
    def run(variables: Any, prompts: jax.Array) -> jax.Array:
        rngs = {"random": jax.random.key(0)}
        outputs: Any = model.apply(variables, NestedMap(ids=prompts), method="decode", rngs=rngs)
        ids: jax.Array = outputs.ids
        return ids

    return run


def recomputed(model: LanguageModel, steps: int) -> Callable[..., jax.Array]:
    """Return a jitted `(variables, prompts) -> ids` that recomputes whole rows greedily."""

    @jax.jit
    def run(variables: Any, prompts: jax.Array) -> jax.Array:
        width = prompts.shape[1]

        def advance(column: jax.Array, ids: jax.Array) -> jax.Array:
            logits: Any = model.apply(
                variables, ids, method=lambda model, ids: model.lm.logits(ids)
            )
            return ids.at[:, column].set(jnp.argmax(logits[:, column - 1], axis=-1))

        ids = jnp.pad(prompts, ((0, 0), (0, steps)))
        return jax.lax.fori_loop(width, width + steps, advance, ids)

    return run


def fill(model: LanguageModel, max_length: int, chunk: int) -> Callable[..., Any]:
    """Return a jitted `(variables, prompts) -> cache` that fills `chunk` tokens at a time."""

    @jax.jit
    def run(variables: Any, prompts: jax.Array) -> Any:
        rows, width = prompts.shape

        def start(model: LanguageModel) -> None:
            model.lm.init_cache(rows, max_length)

        def feed(cache: Any, step: jax.Array) -> tuple[Any, None]:
            ids = jax.lax.dynamic_slice_in_dim(prompts, step, chunk, axis=1)
            _, state = model.apply(
                {**variables, CACHE: cache},
                ids,
                method=lambda model, ids: model.lm.extend_step(ids, time_step=step),
                mutable=[CACHE],
            )
            return state[CACHE], None

        cache = model.apply(variables, method=start, mutable=[CACHE])[1][CACHE]
        return jax.lax.scan(feed, cache, jnp.arange(0, width, chunk))[0]

    return run


def seconds_in_turns(
    runs: dict[str, Callable[..., Any]], *args: Any, rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of each function per round, after one call that compiles."""
    for run in runs.values():
        jax.block_until_ready(run(*args))
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            began = time.perf_counter()
            jax.block_until_ready(run(*args))
            taken[name].append(time.perf_counter() - began)
    return taken


def ratio(taken: dict[str, list[float]], slow: str, fast: str) -> float:
    """Return the median over the rounds of the time of `slow` divided by that of `fast`."""
    return statistics.median(a / b for a, b in zip(taken[slow], taken[fast], strict=True))


def parse_args() -> argparse.Namespace:
    """Parse the sizes from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    defaults = {"vocab": 1024, "dims": 256, "layers": 4, "heads": 8}
    defaults |= {"batch": 4, "prompt": 128, "steps": 64, "samples": 4, "rounds": 5}
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    args = parse_args()
    model = make_model(args)
    variables = jax.jit(model.init)(jax.random.key(0))
    random = np.random.default_rng(0)
    prompts = random.integers(1, args.vocab, (args.batch, args.prompt)).astype(np.int32)
    max_length, steps = args.prompt + args.steps, {"max_decode_steps": args.steps}
    greedy = cached(model, SampleDecoder(temperature=0.0, **steps))
    runs = {"cached": greedy, "recomputed": recomputed(model, args.steps)}
    same = np.mean(np.asarray(greedy(variables, prompts)) == runs["recomputed"](variables, prompts))
    taken = seconds_in_turns(runs, variables, prompts, rounds=args.rounds)

    device = jax.devices()[0].device_kind
    sizes = ", ".join(f"{name} {value}" for name, value in vars(args).items())
    print(f"{platform.machine()}, {device}, jax {jax.__version__}: {sizes}")
    tokens = args.batch * args.steps
    for name, seconds in taken.items():
        print(f"{name:11} {tokens / statistics.median(seconds):9.1f} tokens/s")
    times = ratio(taken, "recomputed", "cached")
    print(f"cached decoding: {times:.1f} times as fast, {100 * same:.1f} % of the ids are equal")

    chunks = {name: fill(model, max_length, n) for name, n in [("whole", args.prompt), ("one", 1)]}
    taken = seconds_in_turns(chunks, variables, prompts, rounds=args.rounds)
    print(f"prefill at once: {ratio(taken, 'one', 'whole'):.1f} times as fast as token by token")

    several = {
        "samples": SampleDecoder(num_samples=args.samples, **steps),
        "beams": BeamSearch(beam_size=args.samples, **steps),
    }
    runs = {"greedy": greedy, "prompts": chunks["whole"]}
    for name, decoder in several.items():
        shared = dataclasses.replace(decoder, lazy_prefix_broadcast=True)
        runs |= {name: cached(model, decoder), f"shared {name}": cached(model, shared)}
    taken = seconds_in_turns(runs, variables, prompts, rounds=args.rounds)
    steps_of = {
        name: [a - b for a, b in zip(seconds, taken["prompts"], strict=True)]
        for name, seconds in taken.items()
    }
    for name in several:
        times = ratio(taken, name, "greedy")
        print(f"{args.samples} {name} take {times:.2f} times one continuation")
        times = ratio(steps_of, name, f"shared {name}")
        print(f"their steps take {times:.2f} times those with shared prompts")
    cache = jax.eval_shape(chunks["one"], variables, prompts)
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    print(f"cache size: {held / 2**20:.1f} MiB for {args.batch} rows of {max_length} tokens")


if __name__ == "__main__":
    main()
