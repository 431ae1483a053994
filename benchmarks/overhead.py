"""What the runner costs: a whole training run against the bare compiled step.

The run goes through everything a user's run does: the input with its prefetching, metrics.jsonl,
TensorBoard and plain lines with summaries at every step, goodput, watchdog, signals, and a
checkpoint every 20 steps, written while training goes on. The bare program calls the same compiled
step on batches that lie on the device. Both take turns in one process; printed is the ratio of
speeds (1: the runner costs nothing) as the median over pairs with a 95 % interval, and how long the
loop stood still for a save.

    python benchmarks/overhead.py                        # the quickstart's sizes
    python benchmarks/overhead.py --memory --steps 2000  # one run, and whether its memory grows
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from step import median_interval

from layerkit.config import Config
from layerkit_experiments.lm.quickstart import LocalText
from layerkit_runner.command_line.flags import RunOptions
from layerkit_runner.configuration.resolve import ResolvedExperiment, resolve
from layerkit_runner.feeds.infeed import make_input, training_config
from layerkit_runner.job import build_parts
from layerkit_runner.modes.train import run_train
from layerkit_runner.observers import read_metrics

SAVE_INTERVAL = 20


class Quickstart(LocalText):
    """The quickstart without evaluation and decoding, which are no part of the question."""

    def datasets(self) -> list[Config]:
        return [config for config in super().datasets() if config.is_training]

    def decode_datasets(self) -> list[Config]:
        return []


def resolved_for(steps: int, dims: int) -> ResolvedExperiment:
    """The experiment with everything on."""
    resolved = resolve(Quickstart(MODEL_DIMS=dims, HIDDEN_DIMS=4 * dims))
    resolved.task.train.set(
        num_train_steps=steps,
        summary_interval_steps=1,
        save_interval_steps=SAVE_INTERVAL,
        save_max_to_keep=2,
        eval_interval_steps=None,
        eval_at_end=False,
        decode_interval_steps=None,
    )
    return resolved


def runner_record(steps: int, dims: int) -> list[dict[str, Any]]:
    """What a new run reported of each of its steps."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        options = RunOptions(job_log_dir=folder)
        if run_train(resolved_for(steps, dims), options) != 0:
            raise RuntimeError("the run was stopped")
        return read_metrics(Path(folder)).train


class Bare:
    """The same compiled step, called in a loop on batches that are on the device."""

    def __init__(self, dims: int) -> None:
        resolved = resolved_for(1, dims)
        self._partitioner, self._task = build_parts(resolved)
        self._partitioner.start()
        self._partitioner.bind(self._task)
        source = make_input(training_config(resolved), self._partitioner)
        batches = [source.get_next() for _ in range(8)]
        shapes = self._partitioner.abstract_batch(batches[0])
        abstract = self._partitioner.abstract_state(self._task)
        step = self._partitioner.train_step_fn(self._task)
        self._step = step.lower(abstract, shapes).compile()
        self._batches = [self._partitioner.put_batch(batch) for batch in batches]

    def seconds_per_step(self, steps: int) -> float:
        """Of all steps but the first, as for the run."""
        state = self._partitioner.first_state(self._task)
        state, reported = self._step(state, self._batches[0])
        jax.block_until_ready(reported)
        began = time.perf_counter()
        for number in range(1, steps):
            state, reported = self._step(state, self._batches[number % len(self._batches)])
        jax.block_until_ready(reported)
        return (time.perf_counter() - began) / (steps - 1)


def compare(*, steps: int, pairs: int, dims: int) -> dict[str, Any]:
    """Runs both in turn, in random order within each pair."""
    bare = Bare(dims)
    runner_record(2 * SAVE_INTERVAL, dims)  # pays for imports and the compilation
    ratios, stalls = [], []
    seconds: dict[str, list[float]] = {"bare": [], "runner": []}
    for _ in range(pairs):
        for name in random.sample(sorted(seconds), 2):
            if name == "bare":
                seconds[name].append(bare.seconds_per_step(steps))
            else:
                record = runner_record(steps, dims)
                seconds[name].append((record[-1]["time"] - record[0]["time"]) / (len(record) - 1))
                stalls += save_stalls(record)
        ratios.append(seconds["bare"][-1] / seconds["runner"][-1])
    low, high = median_interval(ratios)
    return {
        "speed_ratio": statistics.median(ratios),
        "interval_95": [low, high],
        "pairs": pairs,
        "steps": steps,
        "median_seconds_per_step": {name: statistics.median(s) for name, s in seconds.items()},
        "seconds_of_stall_per_save": {"median": statistics.median(stalls), "max": max(stalls)},
    }


def save_stalls(record: list[dict[str, Any]]) -> list[float]:
    """How much longer than usual the steps took before which there was a save."""
    times = np.array([logged["time"] for logged in record])
    gaps = np.diff(times)  # gaps[i] ends with step i + 2
    after_save = [i for i in range(len(gaps)) if (i + 1) % SAVE_INTERVAL == 0]
    return [float(gaps[i] - np.median(gaps)) for i in after_save]


def memory(*, steps: int, dims: int) -> dict[str, Any]:
    """Resident memory of this process over one run, from its second quarter on."""
    record = runner_record(steps, dims)
    later = record[len(record) // 4 :]
    numbers = np.array([[logged["step"], logged["memory/host_rss_bytes"]] for logged in later])
    per_step, _ = np.polyfit(numbers[:, 0], numbers[:, 1], 1)
    return {
        "steps": steps,
        "megabytes_at_a_quarter": numbers[0, 1] / 1e6,
        "megabytes_at_the_end": numbers[-1, 1] / 1e6,
        "megabytes_per_1000_steps": per_step * 1000 / 1e6,
    }


def main() -> None:
    """Parses the sizes, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="of each run")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--dims", type=int, default=128)
    parser.add_argument("--memory", action="store_true", help="one run, and its memory")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.steps <= SAVE_INTERVAL:
        parser.error(f"--steps={args.steps} must be more than {SAVE_INTERVAL}, to see a save")
    if args.memory:
        result = memory(steps=args.steps, dims=args.dims)
    else:
        result = compare(steps=args.steps, pairs=args.pairs, dims=args.dims)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {jax.devices()[0].device_kind}"
    result = {"machine": machine, "jax": jax.__version__, **result}
    if args.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
