"""A process that plans a step, runs it, and prints the predicted and the measured memory.

The measured memory excludes that of the process before the state was created: code, libraries and
compiled programs. XLA frees the memory of a step shortly after its results are ready, and on a busy
machine the next step may have begun by then. The least growth of several steps is reported.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import jax

from layerkit_runner.config.requests import parse_override
from layerkit_runner.data.host_inputs import make_input
from layerkit_runner.run.job import build_parts
from layerkit_runner.run.resolve import resolve
from layerkit_runner.tools.plan.plan import make_plan

STEPS = 3


def resident(name: str) -> int:
    """Return the bytes of `VmRSS` (current memory) or `VmHWM` (peak memory)."""
    (kilobytes,) = re.findall(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kilobytes) * 1024


def main() -> None:
    from small_lm_experiment import SmallLm  # beside this file

    overrides = [parse_override(*flag.split("=", 1)) for flag in sys.argv[1:]]
    resolved = resolve(SmallLm(MESH=[1, 1, 1], MODEL_DIMS=512, NUM_LAYERS=6), overrides)
    predicted = make_plan(resolved, jax.devices()).memory
    partitioner, task = build_parts(resolved)
    partitioner.start()
    partitioner.bind(task)
    host_batch = make_input(resolved.datasets[0], partitioner).peek()
    shapes = partitioner.abstract_state(task), partitioner.abstract_batch(host_batch)
    step = partitioner.train_step_fn(task).lower(*shapes).compile()
    init = partitioner.init_fn(task).lower().compile()
    before = resident("VmRSS")
    state = jax.block_until_ready(init())
    batch = partitioner.put_batch(host_batch)
    grown = []
    for _ in range(STEPS):
        Path("/proc/self/clear_refs").write_text("5")  # the most there was, from now on
        state, _ = step(state, batch)
        jax.block_until_ready(state)
        grown.append(resident("VmHWM") - before)
    print(
        json.dumps({"predicted": predicted.peak, "weights": predicted.weights, "grown": min(grown)})
    )


if __name__ == "__main__":
    main()
