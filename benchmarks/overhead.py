"""Compare the speed of a training run with that of the bare compiled step.

The run has all parts of a user's run: prefetched input, metrics.jsonl, TensorBoard and log lines
with summaries at every step, goodput, watchdog, signal handlers, and an asynchronous checkpoint
every 20 steps. Before each save it pauses while 20 steps of the bare program are timed: the same
compiled step on batches that are on the device. Both alternate within seconds, so changes of the
machine's speed affect both. The output has the speed ratio (1: no overhead) as the median over the
rounds with a 95 % interval, and how long the loop blocks for a save.

    python benchmarks/overhead.py                        # the quickstart's sizes
    python benchmarks/overhead.py --dims 256             # longer steps
    python benchmarks/overhead.py --all                  # Weights & Biases and weight histograms
    python benchmarks/overhead.py --memory --steps 2000  # memory growth of one run
    python benchmarks/overhead.py --host                 # processor time of the main thread

With `--host` the run has steps of a few milliseconds, summaries every 100 steps and no saves. The
processor time of the main thread is the Python of the loop, without the calls of the compiled step,
the copies of batches to the device and the waits for the device.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import io
import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from step import median_interval

from layerkit.config import Config
from layerkit.config.nested_map import NestedMap
from layerkit_experiments.lm.quickstart import LocalText
from layerkit_runner.config.requests import ResolvedExperiment
from layerkit_runner.data.host_inputs import dataset_name, make_input
from layerkit_runner.data.train_inputs import training_configs
from layerkit_runner.init_from import plan_first_state
from layerkit_runner.observers import Observer, read_metrics
from layerkit_runner.observers.metrics_log import Metrics
from layerkit_runner.optim.learner import IS_VALID
from layerkit_runner.partitioning import SpmdPartitioner
from layerkit_runner.run.job import build_parts
from layerkit_runner.run.programs.eval_program import BaseProgram
from layerkit_runner.run.programs.skipped_steps import SkippedSteps
from layerkit_runner.run.programs.train_program import (
    CompiledStep,
    TrainProgram,
)
from layerkit_runner.run.resolve import resolve
from layerkit_runner.run.training_run import run_train
from layerkit_runner.run_options import RunOptions
from layerkit_runner.step.train_state import TrainState

SAVE_INTERVAL = 20
CLOCK_INTERVAL = 500


class Quickstart(LocalText):
    """The quickstart experiment without evaluation and decoding."""

    def datasets(self) -> list[Config]:
        """Return the configs of the training data sets."""
        return [config for config in super().datasets() if config.is_training]

    def decode_datasets(self) -> list[Config]:
        """Return no configs."""
        return []


class BesideBareSteps(Quickstart):
    """The quickstart with a program that times bare steps before each save."""

    def eval_programs(self) -> list[Config]:
        """Return the config of `BareSteps`."""
        dims = self.MODEL_DIMS
        return [Config(BareSteps, name="bare", interval_steps=SAVE_INTERVAL, dims=dims)]


class BareSteps(BaseProgram):
    """A program that runs bare steps and reports when they began and ended."""

    def __init__(self, *given: Any, dims: int, **named: Any) -> None:
        """Compile the bare step of a model of width `dims`."""
        super().__init__(*given, **named)
        self._bare = Bare(dims)

    def run(self, state: TrainState, step: int, observers: Observer) -> dict[str, float]:
        """Run the bare steps and report their times."""
        began = time.perf_counter()
        self._bare.run(SAVE_INTERVAL)
        times = {"began": began, "ended": time.perf_counter()}
        observers.eval_metrics(step, self.name, times)
        return times


class WithHeapReadings(Quickstart):
    """The quickstart with a heap reading midway between two saves, when none is being written."""

    def eval_programs(self) -> list[Config]:
        """Return the config of `HeapReading`."""
        return [Config(HeapReading, name="heap", interval_steps=SAVE_INTERVAL // 2)]


class HeapReading(BaseProgram):
    """A program that reports the allocated bytes of the heap."""

    def run(self, state: TrainState, step: int, observers: Observer) -> dict[str, float]:
        """Report the heap size, except at saves."""
        if step % SAVE_INTERVAL:
            observers.eval_metrics(step, self.name, {"live_bytes": live_heap_bytes()})
        return {}


class WithClock(Quickstart):
    """The quickstart with short steps and readings of the main thread's processor time."""

    NUM_LAYERS = 1
    MAX_SEQ_LEN = 32
    PERCORE_BATCH_SIZE = 2.0

    def partitioner(self) -> Config:
        """Return the config of `TimedCopies`."""
        return super().partitioner().with_class(TimedCopies)

    def train_programs(self) -> list[Config]:
        """Return the config of `TimedSteps`."""
        (config,) = self.datasets()
        return [Config(TimedSteps, dataset=dataset_name(config))]

    def eval_programs(self) -> list[Config]:
        """Return the config of `ThreadTime`."""
        return [Config(ThreadTime, name="host", interval_steps=CLOCK_INTERVAL)]


# Processor time in code of JAX, in seconds.
inside = {"steps": 0.0, "copies": 0.0, "waits": 0.0}


def timed(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function that adds the processor time of each call to `inside`."""

    def run(*given: Any) -> Any:
        began = time.thread_time()
        result = call(*given)
        inside[name] += time.thread_time() - began
        return result

    return run


class TimedCopies(SpmdPartitioner):
    """A partitioner that times the copies of batches to the device."""

    def put_batch(self, batch: NestedMap) -> NestedMap:
        """Put a batch on the device."""
        copied: NestedMap = timed(super().put_batch, "copies")(batch)
        return copied


class TimedSteps(TrainProgram):
    """A training program that times the calls of its compiled step and the waits for it."""

    def __init__(self, compiled: CompiledStep, *given: Any, **named: Any) -> None:
        """Wrap the compiled step in a clock."""
        compiled = dataclasses.replace(compiled, run=timed(compiled.run, "steps"))
        super().__init__(compiled, *given, **named)

    def report_oldest(self, skipped: SkippedSteps) -> None:
        """Wait for the oldest step and report it."""
        read = self._pending[0].reported[1][IS_VALID]
        began = time.thread_time()
        read.block_until_ready()
        inside["waits"] += time.thread_time() - began
        super().report_oldest(skipped)


class ThreadTime(BaseProgram):
    """A program that reports the processor time of the main thread."""

    def run(self, state: TrainState, step: int, observers: Observer) -> dict[str, float]:
        """Report the seconds of the clock, of the thread and of JAX."""
        times = {"wall": time.perf_counter(), "thread": time.thread_time(), **inside}
        observers.eval_metrics(step, self.name, times)
        return {}


class _MallInfo(ctypes.Structure):
    """The result of glibc's mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def live_heap_bytes() -> float:
    """Return the allocated bytes, without the free memory that glibc keeps."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        raise RuntimeError("--memory requires glibc 2.33 or later")
    mallinfo.restype = _MallInfo
    info = mallinfo()
    return float(info.uordblks + info.hblkhd)


class Bare:
    """The compiled step of the quickstart, with batches that are on the device."""

    def __init__(self, dims: int) -> None:
        """Compile the step of a model of width `dims` and run a warm-up."""
        resolved = resolved_for(Quickstart, steps=1, dims=dims)
        partitioner, task = build_parts(resolved)
        partitioner.start()
        partitioner.bind(task)
        (config,) = training_configs(resolved).values()
        source = make_input(config, partitioner)
        batches = [source.get_next() for _ in range(8)]
        shapes = partitioner.abstract_batch(batches[0])
        step = partitioner.train_step_fn(task)
        self._step = step.lower(partitioner.abstract_state(task), shapes).compile()
        self._batches = itertools.cycle([partitioner.put_batch(batch) for batch in batches])
        self._state = plan_first_state(partitioner, task)().state
        self.run(SAVE_INTERVAL)

    def run(self, steps: int) -> None:
        """Train for `steps` and block until they are done."""
        for batch in itertools.islice(self._batches, steps):
            self._state, reported = self._step(self._state, batch)
        jax.block_until_ready(reported)


def resolved_for(
    experiment: type[Quickstart], *, steps: int, dims: int, histograms: bool = False
) -> ResolvedExperiment:
    """Resolve an experiment with a summary at every step.

    Args:
      experiment: Experiment class.
      steps: Number of training steps.
      dims: Model width.
      histograms: Whether to write weight histograms before each save.
    """
    resolved = resolve(experiment(MODEL_DIMS=dims, HIDDEN_DIMS=4 * dims))
    resolved.task.train.set(
        num_train_steps=steps,
        summary_interval_steps=1,
        save_interval_steps=SAVE_INTERVAL,
        save_max_to_keep=2,
        eval_interval_steps=None,
        eval_at_end=False,
        decode_interval_steps=None,
        weight_summary_interval_steps=SAVE_INTERVAL if histograms else None,
    )
    return resolved


def record_of_run(resolved: ResolvedExperiment, *, wandb: bool = False) -> Metrics:
    """Train a new run and return its metrics. `wandb` also logs to Weights & Biases offline."""
    if wandb:
        os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true")
    project = "overhead" if wandb else None
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        if run_train(resolved, RunOptions(job_log_dir=folder, wandb_project=project)) != 0:
            raise RuntimeError("the run was stopped")
        return read_metrics(Path(folder))


def compare(*, steps: int, dims: int, all_observers: bool) -> dict[str, Any]:
    """Train one run that alternates training and bare steps; return the figures."""
    resolved = resolved_for(BesideBareSteps, steps=steps, dims=dims, histograms=all_observers)
    record = record_of_run(resolved, wandb=all_observers)
    turns = record.evals["bare"]
    bare = np.array([turn["ended"] - turn["began"] for turn in turns[1:]])
    # The time between two bare rounds has one save and the same number of training steps.
    runner = np.array([b["began"] - a["ended"] for a, b in itertools.pairwise(turns)])
    ratios = (bare / runner).tolist()
    low, high = median_interval(ratios)
    stalls = save_stalls(record)
    return {
        "speed_ratio": statistics.median(ratios),
        "interval_95": [low, high],
        "turns": len(ratios),
        "median_seconds_per_step": {
            "bare": float(np.median(bare)) / SAVE_INTERVAL,
            "runner": float(np.median(runner)) / SAVE_INTERVAL,
        },
        "seconds_of_stall_per_save": {"median": statistics.median(stalls), "max": max(stalls)},
    }


def save_stalls(record: Metrics) -> list[float]:
    """Return the seconds by which each step after a save exceeds the usual step time."""
    reported = {logged["step"]: logged["time"] for logged in record.train}
    before = {turn["step"]: turn["time"] for turn in record.evals["bare"]}
    usual = np.median([reported[n] - reported[n - 1] for n in reported if n - 1 in reported])
    return [float(reported[step + 1] - saves - usual) for step, saves in before.items()]


def memory(*, steps: int, dims: int) -> dict[str, Any]:
    """Return the growth of heap and resident memory of one run, without its first quarter."""
    record = record_of_run(resolved_for(WithHeapReadings, steps=steps, dims=dims))
    live = {turn["step"]: turn["live_bytes"] for turn in record.evals["heap"]}
    resident = {logged["step"]: logged["memory/host_rss_bytes"] for logged in record.train}
    return {"steps": steps, "live_heap": _growth(live), "resident": _growth(resident)}


def host_time(*, steps: int, dims: int) -> dict[str, Any]:
    """Return the processor time of the main thread per step of one run, and where it goes."""
    resolved = resolved_for(WithClock, steps=steps, dims=dims)
    resolved.task.train.set(summary_interval_steps=100, save_interval_steps=steps)
    turns = record_of_run(resolved).evals["host"]
    first, last = turns[0], turns[-1]
    microseconds = {
        name: round(1e6 * (last[name] - first[name]) / (last["step"] - first["step"]))
        for name in ("wall", "thread", *inside)
    }
    return {
        "microseconds_per_step": microseconds["wall"],
        "of_the_main_thread": microseconds["thread"],
        "in_calls_of_the_compiled_step": microseconds["steps"],
        "in_copies_of_batches": microseconds["copies"],
        "in_waits_for_the_device": microseconds["waits"],
        "in_the_loop": microseconds["thread"] - sum(microseconds[name] for name in inside),
    }


def _growth(bytes_by_step: Mapping[int, float]) -> dict[str, float]:
    """Return the megabytes at a quarter and at the end of the run, and the slope between."""
    numbers = np.array(list(bytes_by_step.items()))[len(bytes_by_step) // 4 :]
    per_step, _ = np.polyfit(numbers[:, 0], numbers[:, 1], 1)
    return {
        "megabytes_at_a_quarter": round(float(numbers[0, 1]) / 1e6, 1),
        "megabytes_at_the_end": round(float(numbers[-1, 1]) / 1e6, 1),
        "megabytes_per_1000_steps": round(float(per_step) * 1000 / 1e6, 2),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000, help="training steps of the run")
    parser.add_argument("--dims", type=int, default=128, help="model width")
    parser.add_argument("--all", action="store_true", help="enable all observers")
    parser.add_argument("--memory", action="store_true", help="measure the memory of one run")
    parser.add_argument("--host", action="store_true", help="measure the main thread of one run")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    args = parser.parse_args()
    if args.steps < 4 * SAVE_INTERVAL:
        parser.error(f"--steps={args.steps}: expected at least {4 * SAVE_INTERVAL}")
    if args.memory:
        result = memory(steps=args.steps, dims=args.dims)
    elif args.host:
        result = host_time(steps=max(args.steps, 3 * CLOCK_INTERVAL), dims=args.dims)
    else:
        result = compare(steps=args.steps, dims=args.dims, all_observers=args.all)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {jax.devices()[0].device_kind}"
    result = {"machine": machine, "jax": jax.__version__, **result}
    if args.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
