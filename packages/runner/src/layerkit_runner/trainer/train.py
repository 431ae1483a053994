"""TrainProgram: the training steps on one data set; `TrainPrograms` says when each is started.

The batches of the next steps are sent while one runs. What a step reports is fetched only after
later steps have been started, so metrics never stall the device.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax

from layerkit.nested_map import NestedMap
from layerkit.summaries import Summary
from layerkit_inputs.prefetch import Prefetch
from layerkit_runner.data.device_feed import DeviceFeed
from layerkit_runner.data.infeed import peek_batch
from layerkit_runner.data.skipped_records import SkippedRecords
from layerkit_runner.distributed.stop_signals import StopSignals
from layerkit_runner.distributed.watchdog import progress
from layerkit_runner.errors import UsageError
from layerkit_runner.observers import Goodput, Observer, StepWork, Throughput, memory_scalars
from layerkit_runner.observers.step_profiler import STEP_EVENT
from layerkit_runner.observers.weight_summaries import histograms as weight_histograms
from layerkit_runner.observers.weight_summaries import weight_summary_fn
from layerkit_runner.partitioning import Partitioner
from layerkit_runner.trainer.skipped_steps import SkippedSteps
from layerkit_runner.training.layer_summaries import for_observers, has_arrays
from layerkit_runner.training.metrics import OverBatches
from layerkit_runner.training.task import SingleTask
from layerkit_runner.training.train_state import TrainState

T = TypeVar("T")

IS_VALID = "learning/is_valid_step"
"""Scalar of a step that is 0 if its loss or gradient is not finite, or its gradient too large."""


class _StartedStep(NamedTuple):
    """A step that is not reported yet."""

    step: int
    is_summarized: bool
    # Metrics and scalars of the step, what the weights are like, what layers tell; on the devices.
    reported: Any


class TrainProgram:
    """The compiled training step, fed by one input.

    An experiment that trains on several lists a config for each, and they take turns:
    `[Config(TrainProgram, dataset="web", steps=3), Config(TrainProgram, dataset="code")]` trains
    three steps on the one, one on the other, and so on.

    Args:
      task: What is trained.
      partitioner: Started, and the task bound to it.
      dataset: Endless batches; from the first step on, this program's alone.
      name: What it is called beside others; None for the only one of a job.
      steps: How many steps its turn has.
    """

    def __init__(
        self,
        task: SingleTask,
        partitioner: Partitioner,
        dataset: Prefetch,
        name: str | None = None,
        *,
        steps: int = 1,
    ) -> None:
        self.dataset = dataset
        self.name = name
        self.steps = steps
        self._task = task
        self._partitioner = partitioner
        self._feed = DeviceFeed(dataset, partitioner)
        self._pending: collections.deque[_StartedStep] = collections.deque()
        self._compiled: Any = None
        self._summarize_weights = weight_summary_fn(partitioner.replicated())
        self._since_summary = OverBatches()
        self._summarize_layers: Any = None
        self._specs: Any = None

    @property
    def dataset_name(self) -> str:
        """What its data set is called."""
        source = self.dataset.source
        return source.name or type(source).__name__

    def lower(self, abstract_state: TrainState) -> Any:
        """The step for these shapes, traced and ready to compile."""
        batch = self._specs = self.abstract_batch()
        lowered = self._partitioner.train_step_fn(self._task).lower(abstract_state, batch)
        _, (_, scalars) = lowered.out_info
        if has_arrays(scalars):
            self._summarize_layers = self._partitioner.summary_step_fn(self._task)
        return lowered

    def abstract_batch(self) -> NestedMap:
        """Shapes, dtypes and shardings of a global batch; data may still be put elsewhere."""
        return self._partitioner.abstract_batch(peek_batch(self.dataset))

    def start(
        self,
        compiled: Any,
        observers: Observer,
        throughput: Throughput,
        goodput: Goodput | None = None,
        work: StepWork | None = None,
    ) -> None:
        """Takes the compiled step, whom to report to, and what a step comes to."""
        self._compiled = compiled
        self._observers = observers
        self._throughput = throughput
        self._rates = throughput.rates_since_asked()
        self._goodput = goodput or Goodput()
        self._work = work
        self._skipped = SkippedRecords(self.dataset, self.name or "train", observers)
        self._last_step: int | None = None

    def start_step(
        self,
        state: TrainState,
        step: int,
        is_idle: Callable[[], bool],
        signals: StopSignals | None = None,
    ) -> TrainState:
        """Start step number `step` (from 1) and return its state, not yet computed.

        Args:
          state: Consumed.
          step: Steps that are not this program's are left out.
          is_idle: Whether every step that was started, by any program, has ended.
          signals: Ends the wait for a batch; None waits for as long as it takes.

        Raises:
          StopRequestedError: The step was not started because of a signal.
          UsageError: the data cannot be read, or the batch is not like the first one.
        """
        progress(f"reading the batch of step {step}")
        if signals is None:
            batch, idle_seconds = self._feed.take(is_idle)
        else:
            batch, idle_seconds = self._feed.take(
                is_idle,
                gives_up=signals.gives_up_waiting,
                may_take=functools.partial(signals.may_start, step),
            )
        progress(f"starting step {step}", waits_for_others=True)
        self._throughput.waited(idle_seconds)
        self._goodput.moved("input_wait", idle_seconds)
        is_summarized = self._is_summarized(step)
        self._last_step = step
        layers = None
        if self._summarize_layers is not None and is_summarized:
            # Before the step, which consumes the state.
            layers = self._summarize_layers(state, batch)
        with jax.profiler.StepTraceAnnotation(STEP_EVENT, step_num=step):
            try:
                state, reported = self._compiled(state, batch)
            except TypeError as error:
                self._check_like_first(batch, step)
                raise error from None
        # Sent to the host while later steps run, since it is read of every step.
        reported[1][IS_VALID].copy_to_host_async()
        every, weights = self._task.train.weight_summary_interval_steps, None
        if every is not None and step % every == 0:
            # Now, as the next step consumes the state.
            weights = self._summarize_weights(self.stored_state(state.for_inference()).params)
        self._pending.append(_StartedStep(step, is_summarized, (*reported, weights, layers)))
        return state

    def stored_state(self, state: TrainState) -> TrainState:
        """What a checkpoint holds of a state, as it is without what the mesh asks for."""
        return self._partitioner.stored_state(self._task, state)

    def fill_feed(self) -> None:
        """Sends the batches that are ready, as far as there is room; waits for none."""
        self._feed.fill()

    def is_idle(self) -> bool:
        """Whether every step that was started has ended."""
        return all(
            x.is_ready() for started in self._pending for x in jax.tree.leaves(started.reported)
        )

    def next_batch(self) -> NestedMap:
        """The global batch that the next step reads; it is still there for it."""
        return self._feed.peek()

    def input_state(self) -> dict[str, Any]:
        """Where the input stands after the steps that were started."""
        return self._feed.state()

    def report_oldest(self, skipped: SkippedSteps) -> None:
        """Wait for the oldest step that is not reported yet, and report it.

        Args:
          skipped: Counts the step if it was not valid.
        """
        step, is_summarized, (metrics, scalars, weights, layers) = self._pending.popleft()
        progress(f"waiting for the devices to end step {step}", waits_for_others=True)
        jax.block_until_ready(metrics)
        progress(f"reporting step {step}")
        self._throughput.completed(step, self._work)
        self._observers.progress(step)
        own = {name: metrics.pop(name) for name in self._task.own_metrics}
        is_valid = bool(scalars[IS_VALID])
        if is_valid:
            skipped.add_valid()
            self._since_summary.add(own)
        if is_summarized or not is_valid:
            self._report_metrics(step, metrics, scalars, skipped, is_summarized=is_summarized)
        if weights is not None:
            self._observers.histograms(step, weight_histograms(jax.device_get(weights)))
        if layers is not None:
            found, images = for_observers(jax.device_get(layers))
            self._observers.histograms(step, found)
            self._observers.images(step, images)

    def _report_metrics(
        self,
        step: int,
        metrics: Mapping[str, Any],
        scalars: Mapping[str, Any],
        skipped: SkippedSteps,
        *,
        is_summarized: bool,
    ) -> None:
        """Report what a step computed and, where a summary is due, what came since the last."""
        metrics, scalars = jax.device_get((metrics, scalars))
        values = {name: float(metric.value) for name, metric in metrics.items()}
        if not scalars[IS_VALID]:
            loss_name = self._task.loss_name
            line = skipped.add(
                step,
                loss_name=loss_name,
                loss=values[loss_name],
                grad_norm=float(scalars["learning/raw_grad_norm"]),
            )
            if line is not None:
                self._observers.message(line)
        if is_summarized:
            values |= self._since_summary.means() | self._skipped.scalars()
        values = self._of_this_program(values)
        values |= {n: float(v) for n, v in scalars.items() if not isinstance(v, Summary)}
        values["learning/skipped_steps"] = float(skipped.in_all)
        if is_summarized:
            values |= self._rates()
            values |= self._goodput.shares() | memory_scalars()
        self._observers.train_metrics(step, values)
        if is_summarized:
            if histograms := self._since_summary.histograms():
                self._observers.histograms(step, self._of_this_program(histograms))
            self._since_summary = OverBatches()

    def _of_this_program(self, found: Mapping[str, T]) -> dict[str, T]:
        """What was found by name; beside other programs, as `PROGRAM/NAME`, and the loss as both.

        So a curve is of one data set, and the loss is where everything looks for it.
        """
        if self.name is None:
            return dict(found)
        loss = self._task.loss_name
        both = {loss: found[loss]} if loss in found else {}
        return both | {f"{self.name}/{name}": value for name, value in found.items()}

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
        """Whether what a step reports is written.

        It is of this program's first and of the last one, and of its first in every so many.
        """
        train = self._task.train
        if self._last_step is None or step == train.num_train_steps:
            return True
        return (
            step // train.summary_interval_steps > self._last_step // train.summary_interval_steps
        )
