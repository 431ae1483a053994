"""Loss by learning rate at several widths, with and without WIDTH_TRANSFER.

Trains small decoders on LocalText for each width and rate, and prints a table of the loss of the
last steps, and the best rate of each width by a parabola through the three lowest losses.

    python benchmarks/width_transfer.py --steps=150 --widths 64 128 256 512
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from layerkit.config.nested_map import NestedMap
from layerkit_experiments.lm.quickstart import LocalText
from layerkit_runner.step.metrics import GLOBAL_BATCH


def fields_of(width: int, base: int | None, steps: int, optimizer: str) -> dict[str, Any]:
    """Return the fields of a decoder in which all sizes of a layer grow with the width."""
    fields = {"NUM_LAYERS": 2, "NUM_HEADS": 4, "NUM_KV_HEADS": 4, "MAX_SEQ_LEN": 32}
    fields |= {"MODEL_DIMS": width, "HIDDEN_DIMS": 4 * width, "WIDTH_TRANSFER": base}
    fields |= {"LEARNING_RATE": 1.0, "WARMUP_STEPS": 0.1, "MAX_STEPS": steps}
    return fields | {"OPTIMIZER": optimizer, "WEIGHT_DECAY": 0.0}


def losses(fields: dict[str, Any], rates: np.ndarray, batches: NestedMap) -> np.ndarray:
    """Return the losses `[rates, steps]` of runs over the same batches `[steps, rows, length]`."""

    def run(rate: jax.Array) -> jax.Array:
        config = LocalText(**fields).task()
        learner = config.train.learner
        for one in (learner, *learner.auxiliary_optimizers):
            one.learning_rate.peak = one.learning_rate.peak * rate
        task = config.Instantiate()

        def step(state: Any, batch: NestedMap) -> Any:
            state, (metrics, _) = task.train_step(state, batch, GLOBAL_BATCH)
            return state, metrics["loss"].value

        return jax.lax.scan(step, task.init_state(jax.random.key(0)), batches)[1]

    return np.asarray(jax.jit(lambda rates: jax.lax.map(run, rates))(jnp.asarray(rates)))


def best_rate(rates: np.ndarray, values: np.ndarray) -> float:
    """Return the minimum of the parabola through the lowest value and its neighbors, in log2."""
    place = int(np.clip(np.argmin(values), 1, len(values) - 2))
    near = slice(place - 1, place + 2)
    a, b, _ = np.polyfit(np.log2(rates[near]), values[near], 2)
    return 2 ** (-b / (2 * a)) if a > 0 else float(rates[np.argmin(values)])


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--base", type=int, default=64)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--log2_rates", type=float, nargs="+", default=[-9, -8, -7, -6, -5, -4])
    flags = parser.parse_args()
    source = LocalText(**fields_of(flags.base, None, flags.steps, "adamw")).datasets()[0]
    source = source.clone(percore_batch_size=None, batch_size=flags.rows).Instantiate()
    rows = [source.get_next() for _ in range(flags.steps)]
    batches = jax.tree.map(lambda *arrays: jnp.stack(arrays), *rows)
    rates = np.exp2(flags.log2_rates)
    for base in (flags.base, None):
        print(f"WIDTH_TRANSFER={base}: loss of the last {flags.steps // 5} steps at each rate")
        print("| width |" + "".join(f" 2^{math.log2(rate):g} |" for rate in rates) + " best |")
        for width in flags.widths:
            curves = losses(fields_of(width, base, flags.steps, flags.optimizer), rates, batches)
            ends = np.nan_to_num(curves[:, -(flags.steps // 5) :].mean(1), nan=99.0)
            cells = "".join(f" {value:.3f} |" for value in ends)
            print(f"| {width} |{cells} {best_rate(rates, ends):.4f} |", flush=True)


if __name__ == "__main__":
    main()
