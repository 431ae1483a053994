"""Compare the compile time of 64 repeated layers with 4, and with 16 unrolled layers.

python benchmarks/depth.py
"""

from __future__ import annotations

import platform
import statistics
import time

import jax
import optax

from layerkit.config import Config, Partial
from layerkit.layers import StackedTransformer, StackedTransformerRepeated
from layerkit.models import LanguageModel, TransformerLm
from layerkit_inputs import SyntheticInput
from layerkit_runner.optim.learner import Learner
from layerkit_runner.partitioning import SpmdPartitioner
from layerkit_runner.step.task import SingleTask
from layerkit_runner.step.train_hparams import TrainHParams

ROUNDS = 5


def seconds_to_compile(num_layers: int, *, repeated: bool) -> tuple[float, float]:
    """Return (seconds to trace and lower, seconds to compile) of a training step."""
    stack = StackedTransformerRepeated if repeated else StackedTransformer
    lm: Config = TransformerLm.HParams.config(
        vocab_size=256,
        model_dims=64,
        hidden_dims=256,
        num_layers=num_layers,
        num_heads=4,
        stack_tpl=stack.HParams.config(),
    )
    learner = Learner.HParams.config(optimizer=Partial(optax.adamw), learning_rate=1e-3)
    task = SingleTask.HParams.config(
        model=LanguageModel.HParams.config(lm_tpl=lm),
        train=TrainHParams.HParams.config(learner=learner),
    ).Instantiate()
    partitioner = SpmdPartitioner()
    partitioner.start(jax.devices()[:1])
    partitioner.bind(task)
    batch = SyntheticInput(batch_size=2, seq_length=64, vocab_size=256, is_training=True).peek()
    began = time.perf_counter()
    state = partitioner.abstract_state(task)
    lowered = partitioner.train_step_fn(task).lower(state, partitioner.abstract_batch(batch))
    traced = time.perf_counter()
    lowered.compile()
    return traced - began, time.perf_counter() - traced


def main() -> None:
    """Measure both depths round-robin and print the figures."""
    jax.config.update("jax_enable_compilation_cache", False)  # noqa: FBT003
    seconds_to_compile(2, repeated=True)
    result: dict[int, list[tuple[float, float]]] = {4: [], 64: []}
    for _ in range(ROUNDS):
        for depth, taken in result.items():
            taken.append(seconds_to_compile(depth, repeated=True))
    print(f"{platform.machine()}, jax {jax.__version__}, repeated layers, medians of {ROUNDS}")
    for depth, taken in result.items():
        trace, compile_ = (statistics.median(part) for part in zip(*taken, strict=True))
        print(f"{depth:3} layers: trace and lower {trace:.2f} s, compile {compile_:.2f} s")
    ratios = [sum(deep) / sum(flat) for flat, deep in zip(result[4], result[64], strict=True)]
    compile_ratios = [deep[1] / flat[1] for flat, deep in zip(result[4], result[64], strict=True)]
    print(
        f"64 / 4: compile {statistics.median(compile_ratios):.2f}, with tracing "
        f"{statistics.median(ratios):.2f}"
    )
    trace, compile_ = seconds_to_compile(16, repeated=False)
    print(f"for comparison, 16 unrolled layers: trace {trace:.2f} s, compile {compile_:.2f} s")


if __name__ == "__main__":
    main()
