"""TrainProgram: runs training steps and reports them without making the device wait.

The host runs at most `max_inflight_steps` ahead, and the batches of the next steps are sent while
one runs. What a step reports is fetched only after later steps have been started, so metrics never
stall the device.
"""

from __future__ import annotations

import collections
from typing import Any

import jax

from layerkit_inputs.prefetch import Prefetch
from layerkit_runner.feeds.device_feed import DeviceFeed
from layerkit_runner.feeds.skipped_records import SkippedRecords
from layerkit_runner.observers import Goodput, Observer, Throughput, memory_scalars
from layerkit_runner.observers.step_profiler import STEP_EVENT
from layerkit_runner.observers.weight_summaries import histograms, weight_summary_fn
from layerkit_runner.partitioning import Partitioner
from layerkit_runner.processes.watchdog import progress
from layerkit_runner.steps.train_state import TrainState
from layerkit_runner.task import SingleTask


class TrainProgram:
    """The compiled training step, fed by one input.

    Args:
      task: What is trained.
      partitioner: Started, and the task bound to it.
      train_input: Endless batches; from the first step on, this program's alone.
    """

    def __init__(self, task: SingleTask, partitioner: Partitioner, train_input: Prefetch):
        self._task = task
        self._partitioner = partitioner
        self._input = train_input
        self._feed = DeviceFeed(train_input, partitioner)
        self._pending: collections.deque[tuple[int, Any]] = collections.deque()
        self._compiled: Any = None
        self._summarize_weights = weight_summary_fn(partitioner)

    def lower(self, abstract_state: TrainState) -> Any:
        """The step for these shapes, traced and ready to compile."""
        batch = self._partitioner.abstract_batch(self._input.peek())
        return self._partitioner.train_step_fn(self._task).lower(abstract_state, batch)

    def start(
        self,
        compiled: Any,
        observers: Observer,
        throughput: Throughput,
        goodput: Goodput | None = None,
    ) -> None:
        """Takes the compiled step, and whom to report to."""
        self._compiled = compiled
        self._observers = observers
        self._throughput = throughput
        self._goodput = goodput or Goodput()
        self._skipped = SkippedRecords(self._input, "train", observers)
        self._first_step: int | None = None

    def run_step(self, state: TrainState, step: int) -> TrainState:
        """Starts step number `step` (from 1) and returns its state, not yet computed."""
        progress(f"reading the batch of step {step}")
        batch, idle_seconds = self._feed.take(self._is_idle)
        progress(f"starting step {step}", waits_for_others=True)
        self._throughput.waited(idle_seconds)
        self._goodput.moved("input_wait", idle_seconds)
        with jax.profiler.StepTraceAnnotation(STEP_EVENT, step_num=step):
            state, reported = self._compiled(state, batch)
        every, weights = self._task.train.weight_summary_interval_steps, None
        if every is not None and step % every == 0:
            # Now, as the next step consumes the state.
            weights = self._summarize_weights(state.params)
        self._pending.append((step, (*reported, weights)))
        self._feed.fill()
        # The first step is waited for, so that its loss is seen as soon as there is one.
        limit = 0 if self._first_step is None else self._task.train.max_inflight_steps
        self._first_step = self._first_step or step
        while len(self._pending) > limit:
            self._collect()
        return state

    def drain(self) -> None:
        """Waits for all steps and reports them."""
        while self._pending:
            self._collect()

    def input_state(self) -> dict[str, Any]:
        """Where the input stands after the steps that were started."""
        return self._feed.state()

    def _is_idle(self) -> bool:
        """Whether every step that was started has ended."""
        return all(leaf.is_ready() for _, step in self._pending for leaf in jax.tree.leaves(step))

    def _collect(self) -> None:
        step, (metrics, scalars, weights) = self._pending.popleft()
        progress(f"waiting for the devices to end step {step}", waits_for_others=True)
        jax.block_until_ready(metrics)
        progress(f"reporting step {step}")
        self._throughput.completed(step)
        self._observers.progress(step)
        train = self._task.train
        if step % train.summary_interval_steps == 0 or step in (
            self._first_step,
            train.num_train_steps,
        ):
            metrics, scalars = jax.device_get((metrics, scalars))
            values = {name: float(metric.value) for name, metric in metrics.items()}
            values |= {name: float(value) for name, value in scalars.items()}
            values |= self._throughput.rates() | self._skipped.scalars()
            values |= self._goodput.shares() | memory_scalars()
            self._observers.train_metrics(step, values)
        if weights is not None:
            self._observers.histograms(step, histograms(jax.device_get(weights)))
