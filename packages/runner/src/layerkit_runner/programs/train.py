"""TrainProgram: runs training steps and reports them without making the device wait.

The host runs at most `max_inflight_steps` ahead, and the batches of the next steps are sent while
one runs. What a step reports is fetched only after later steps have been started, so metrics never
stall the device.
"""

from __future__ import annotations

import collections
from typing import Any

import jax

from layerkit.nested_map import NestedMap
from layerkit.summaries import Summary
from layerkit_inputs.prefetch import Prefetch
from layerkit_runner.errors import UsageError
from layerkit_runner.feeds.device_feed import DeviceFeed
from layerkit_runner.feeds.skipped_records import SkippedRecords
from layerkit_runner.observers import Goodput, Observer, Throughput, memory_scalars
from layerkit_runner.observers.step_profiler import STEP_EVENT
from layerkit_runner.observers.weight_summaries import histograms as weight_histograms
from layerkit_runner.observers.weight_summaries import weight_summary_fn
from layerkit_runner.partitioning import Partitioner
from layerkit_runner.processes.watchdog import progress
from layerkit_runner.steps.layer_summaries import for_observers, has_arrays
from layerkit_runner.steps.metrics import OverBatches
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
        self._since_summary = OverBatches()
        self._summarize_layers: Any = None
        self._specs: Any = None

    def lower(self, abstract_state: TrainState) -> Any:
        """The step for these shapes, traced and ready to compile."""
        batch = self._specs = self._partitioner.abstract_batch(self._input.peek())
        lowered = self._partitioner.train_step_fn(self._task).lower(abstract_state, batch)
        _, (_, scalars) = lowered.out_info
        if has_arrays(scalars):
            self._summarize_layers = self._partitioner.summary_step_fn(self._task)
        return lowered

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
        layers = None
        if self._summarize_layers is not None and self._is_summarized(step):
            # Before the step, which consumes the state.
            layers = self._summarize_layers(state, batch)
        with jax.profiler.StepTraceAnnotation(STEP_EVENT, step_num=step):
            try:
                state, reported = self._compiled(state, batch)
            except TypeError as error:
                self._check_like_first(batch, step)
                raise error from None
        every, weights = self._task.train.weight_summary_interval_steps, None
        if every is not None and step % every == 0:
            # Now, as the next step consumes the state.
            weights = self._summarize_weights(self.stored_state(state.for_inference()).params)
        self._pending.append((step, (*reported, weights, layers)))
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

    def stored_state(self, state: TrainState) -> TrainState:
        """What a checkpoint holds of a state, as it is without what the mesh asks for."""
        return self._partitioner.stored_state(self._task, state)

    def next_batch(self) -> NestedMap:
        """The global batch that the next step reads; it is still there for it."""
        return self._feed.peek()

    def input_state(self) -> dict[str, Any]:
        """Where the input stands after the steps that were started."""
        return self._feed.state()

    def _is_idle(self) -> bool:
        """Whether every step that was started has ended."""
        return all(leaf.is_ready() for _, step in self._pending for leaf in jax.tree.leaves(step))

    def _collect(self) -> None:
        step, (metrics, scalars, weights, layers) = self._pending.popleft()
        progress(f"waiting for the devices to end step {step}", waits_for_others=True)
        jax.block_until_ready(metrics)
        progress(f"reporting step {step}")
        self._throughput.completed(step)
        self._observers.progress(step)
        if own := self._task.own_metrics:
            self._since_summary.add({name: metrics.pop(name) for name in own})
        if self._is_summarized(step):
            metrics, scalars = jax.device_get((metrics, scalars))
            values = {name: float(metric.value) for name, metric in metrics.items()}
            values |= self._since_summary.means()
            values |= {n: float(v) for n, v in scalars.items() if not isinstance(v, Summary)}
            values |= self._throughput.rates() | self._skipped.scalars()
            values |= self._goodput.shares() | memory_scalars()
            self._observers.train_metrics(step, values)
            if histograms := self._since_summary.histograms():
                self._observers.histograms(step, histograms)
            self._since_summary = OverBatches()
        if weights is not None:
            self._observers.histograms(step, weight_histograms(jax.device_get(weights)))
        if layers is not None:
            found, images = for_observers(jax.device_get(layers))
            self._observers.histograms(step, found)
            self._observers.images(step, images)

    def _check_like_first(self, batch: NestedMap, step: int) -> None:
        """Raises UsageError where a batch has other fields, shapes or dtypes than the first had."""
        first, now = (
            {name: f"{x.dtype.name}{list(x.shape)}" for name, x in b.flatten_items()}
            for b in (self._specs, batch)
        )
        other = [
            f"{name} is {now.get(name, 'missing')}, not {first.get(name, 'there')}"
            for name in sorted({*first, *now})
            if first.get(name) != now.get(name)
        ]
        if other:
            raise UsageError(
                f"the batch of training step {step} is not like the first one: {'; '.join(other)}"
            )

    def _is_summarized(self, step: int) -> bool:
        """Whether what a step reports is written: the first, the last, and every so many."""
        train = self._task.train
        is_due = step % train.summary_interval_steps == 0
        return is_due or step in (self._first_step or step, train.num_train_steps)
