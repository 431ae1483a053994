"""Training programs of a job, which run compiled steps on their data sets, round robin.

    CompiledStep    the training step, compiled for the batches of one data set
    TrainProgram    runs the compiled step on a data set and reports its results
    TrainPrograms   runs each step with the program of its data set

The results of a step are fetched after later steps have started, so the devices do not wait.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from layerkit.base.step_reports import BinCounts, Summary
from layerkit.config.nested_map import NestedMap
from layerkit_runner.data.host_inputs import SkippedRecords
from layerkit_runner.data.train_inputs import TrainInput, TrainInputs
from layerkit_runner.distributed.stop_signals import StopSignals
from layerkit_runner.distributed.watchdog import progress
from layerkit_runner.errors import UsageError
from layerkit_runner.observers import (
    Histogram,
    Observer,
    StepWork,
    Throughput,
    check_scalar_names,
    memory_scalars,
)
from layerkit_runner.observers.step_profiler import STEP_EVENT
from layerkit_runner.optim.spikes import IS_SPIKE, IS_VALID
from layerkit_runner.partitioning import Partitioner
from layerkit_runner.run.programs.skipped_steps import SkippedSteps
from layerkit_runner.step.layer_summaries import has_arrays, split_layers, weight_histograms_fn
from layerkit_runner.step.metrics import OverBatches
from layerkit_runner.step.task import SingleTask
from layerkit_runner.step.train_hparams import TrainHParams
from layerkit_runner.step.train_state import TrainState

T = TypeVar("T")

# Names of scalars that the records of steps have beside those of the step.
_ADDED = (
    *("tokens", "step_time", "steps_per_sec", "input_wait", "examples_per_sec", "tokens_per_sec"),
    *("tflops_per_sec_per_device", "mfu"),
)
_CACHE_HIT = "/jax/compilation_cache/cache_hits"
# Number of future steps whose batches are already sent to the devices.
_STEPS_AHEAD = 2


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """The training step of a task, compiled for the batches of one data set.

    Attributes:
      run: Function `(state, batch) -> (state, (metrics, scalars))`. It donates the given state.
      batch: Shapes, dtypes and shardings of the batches.
      summarize_layers: Function `(state, batch) -> (histograms, images)`; None if the layers report
        neither.
    """

    task: SingleTask
    partitioner: Partitioner
    run: Callable[[TrainState, NestedMap], tuple[TrainState, Any]]
    batch: NestedMap
    summarize_layers: Callable[[TrainState, NestedMap], Any] | None = None
    is_from_cache: bool = False


def trace_step(
    task: SingleTask, partitioner: Partitioner, state: TrainState, batch: NestedMap
) -> Callable[[], CompiledStep]:
    """Trace the training step and return a function that compiles it."""
    lowered = partitioner.train_step_fn(task).lower(state, batch)
    _, (metrics, scalars) = lowered.out_info
    numbers = [name for name, metric in metrics.items() if not isinstance(metric, BinCounts)]
    check_scalar_names(numbers, others=(*_ADDED, *scalars))
    summarize = partitioner.summary_step_fn(task) if has_arrays(scalars) else None

    def compile_step() -> CompiledStep:
        hits: list[str] = []  # the cache-hit events of the compilation on this thread
        thread = threading.get_ident()

        def listen(event: str, **_: Any) -> None:
            if event == _CACHE_HIT and threading.get_ident() == thread:
                hits.append(event)

        jax.monitoring.register_event_listener(listen)
        try:
            run = lowered.compile()
        finally:
            jax.monitoring.unregister_event_listener(listen)
        return CompiledStep(task, partitioner, run, batch, summarize, is_from_cache=bool(hits))

    return compile_step


@dataclasses.dataclass(frozen=True)
class StepReports:
    """The objects to which a training program reports its steps.

    `tokens_after` returns the tokens of all batches up to a step.
    """

    observers: Observer
    throughput: Throughput
    work: StepWork | None = None
    tokens_after: Callable[[int], float] | None = None


class _StartedStep(NamedTuple):
    step: int
    is_summarized: bool
    # (metrics, scalars, weight summaries, layer summaries), as arrays on the devices.
    reported: Any


class TrainProgram:
    """A program that runs the compiled training step on one data set.

    An experiment that trains on several data sets lists a config for each, with `dataset`, its
    name, and `steps`; the job sets the others. They run round robin: `[Config(TrainProgram,
    dataset="web", steps=3), Config(TrainProgram, dataset="code")]` trains three steps on "web", one
    on "code", and so on. `name` is None if the job has only one program.
    """

    def __init__(
        self,
        compiled: CompiledStep,
        dataset: TrainInput,
        name: str | None,
        reports: StepReports,
        *,
        steps: int = 1,
    ) -> None:
        """Store the arguments without reading a batch or starting a step."""
        self.data = dataset
        self.name = name
        self.steps = steps
        self._compiled = compiled
        self._train = compiled.task.train
        self._is_on_cpu = compiled.partitioner.mesh.devices.flat[0].platform == "cpu"
        self._reports = reports
        self._rates = reports.throughput.rates_since_asked()
        self._skipped_records = SkippedRecords(dataset.dataset, name or "train", reports.observers)
        self._since_summary = OverBatches()
        self._pending: collections.deque[_StartedStep] = collections.deque()
        self._last_step: int | None = None
        self._reported: Mapping[str, Any] = {}

    def start_step(
        self,
        state: TrainState,
        step: int,
        is_idle: Callable[[], bool],
        signals: StopSignals | None = None,
    ) -> TrainState:
        """Start a step and return its state, which is computed asynchronously.

        Args:
          state: State before the step; its buffers are donated.
          step: Number of the step in the job, from 1.
          is_idle: Function that returns whether all started steps of all programs have ended.
          signals: Signal handler that can cancel the wait for a batch; None to wait without limit.

        Raises:
          StopRequestedError: A signal was received, so the step was not started.
        """
        batch = self._next_batch(step, is_idle, signals)
        progress(f"starting step {step}", waits_for_others=True)
        is_summarized = self._is_summarized(step)
        self._last_step = step
        layers = None
        if self._compiled.summarize_layers is not None and is_summarized:
            # This must precede the step, which donates the state.
            layers = self._compiled.summarize_layers(state, batch)
        with jax.profiler.StepTraceAnnotation(STEP_EVENT, step_num=step):
            try:
                state, reported = self._compiled.run(state, batch)
            except UsageError:  # the step of a later stage, which cannot be compiled
                self.data.feed.give_back(batch)
                raise
            except TypeError as error:
                self._check_same_spec(batch, step)
                raise error from None
        if not self._is_on_cpu:
            # The host reads this scalar after every step; the copy starts now, while the step runs.
            reported[1][IS_VALID].copy_to_host_async()
        every, weights = self._train.weight_summary_interval_steps, None
        if every is not None and step % every == 0:
            partitioner = self._compiled.partitioner
            summarize = weight_histograms_fn(partitioner.replicated())
            # This must precede the next step, which donates the state.
            stored = partitioner.stored_state(self._compiled.task, state.for_inference())
            weights = summarize(stored.params)
        self._pending.append(_StartedStep(step, is_summarized, (*reported, weights, layers)))
        return state

    def is_idle(self) -> bool:
        """Return whether all started steps of this program have ended."""
        return all(
            x.is_ready() for started in self._pending for x in jax.tree.leaves(started.reported)
        )

    def report_oldest(self, skipped: SkippedSteps) -> None:
        """Wait for the oldest unreported step, report it and add it to the counts of `skipped`."""
        step, is_summarized, (metrics, scalars, weights, layers) = self._pending.popleft()
        observers = self._reports.observers
        progress(f"waiting for the devices to end step {step}", waits_for_others=True)
        is_valid = bool(np.asarray(scalars[IS_VALID]))
        progress(f"reporting step {step}")
        self._reports.throughput.completed(step, self._reports.work)
        observers.progress(step)
        self._reported = dict(metrics)
        task_metrics = {name: metrics.pop(name) for name in self._compiled.task.task_metrics}
        if is_valid:
            skipped.add_valid()
            if task_metrics:
                self._since_summary.add(task_metrics)
        if is_summarized or not is_valid:
            self._report_metrics(step, metrics, scalars, skipped, is_summarized=is_summarized)
        if weights is not None:
            observers.histograms(step, _trimmed(jax.device_get(weights)))
        if layers is not None:
            histograms, images = split_layers(jax.device_get(layers))
            observers.histograms(step, _trimmed(histograms))
            observers.images(step, images)

    def abandon(self) -> None:
        """Forget all started steps that are not reported."""
        self._pending.clear()
        self._since_summary, self._last_step = OverBatches(), None

    def last_metrics(self) -> dict[str, float]:
        """Return the metrics of the model in the step that was reported last."""
        left_out = self._compiled.task.task_metrics
        reported = {name: x for name, x in self._reported.items() if name not in left_out}
        return {name: float(x.value) for name, x in jax.device_get(reported).items()}

    def _next_batch(
        self, step: int, is_idle: Callable[[], bool], signals: StopSignals | None
    ) -> NestedMap:
        progress(f"reading the batch of step {step}")
        until: dict[str, Any] = {}
        if signals is not None:
            may_take = functools.partial(signals.may_start, step)
            until = {"gives_up": signals.gives_up_waiting, "may_take": may_take}
        batch, idle_seconds = self.data.feed.take(is_idle, **until)
        self._reports.throughput.goodput.moved("input_wait", idle_seconds)
        return batch

    def _report_metrics(
        self,
        step: int,
        metrics: Mapping[str, Any],
        scalars: Mapping[str, Any],
        skipped: SkippedSteps,
        *,
        is_summarized: bool,
    ) -> None:
        metrics, scalars = jax.device_get((metrics, scalars))
        values = {name: float(metric.value) for name, metric in metrics.items()}
        if not scalars[IS_VALID]:
            loss_name = self._compiled.task.loss_name
            line = skipped.add(
                step,
                loss_name=loss_name,
                loss=values[loss_name],
                grad_norm=float(scalars["learning/raw_grad_norm"]),
                is_spike=bool(scalars.get(IS_SPIKE, 0)),
            )
            if line is not None:
                self._reports.observers.message(line)
        if is_summarized:
            values |= self._since_summary.means() | self._skipped_records.scalars()
        values = self._add_prefix(values)
        values |= {n: float(v) for n, v in scalars.items() if not isinstance(v, Summary)}
        values["learning/skipped_steps"] = float(skipped.in_all)
        if is_summarized:
            values |= self._rates()
            values |= self._reports.throughput.goodput.shares() | memory_scalars()
            if self._reports.tokens_after is not None:
                values["tokens"] = self._reports.tokens_after(step)
        self._reports.observers.train_metrics(step, values)
        if is_summarized:
            if counts := self._since_summary.histograms():
                histograms = {name: Histogram.of(bins) for name, bins in counts.items()}
                self._reports.observers.histograms(step, self._add_prefix(histograms))
            self._since_summary = OverBatches()

    def _add_prefix(self, values: Mapping[str, T]) -> dict[str, T]:
        """Return values with the program's name, if there are several; the loss also alone."""
        if self.name is None:
            return dict(values)
        loss = self._compiled.task.loss_name
        both = {loss: values[loss]} if loss in values else {}
        return both | {f"{self.name}/{name}": value for name, value in values.items()}

    def _check_same_spec(self, batch: NestedMap, step: int) -> None:
        first, now = (
            {name: f"{x.dtype.name}{list(x.shape)}" for name, x in b.flatten_items()}
            for b in (self._compiled.batch, batch)
        )
        for name in sorted({*first, *now}):
            if first.get(name) != now.get(name):
                self.data.feed.give_back(batch)  # since no step has used it
                raise UsageError(
                    f"the batch of step {step} differs from the first batch",
                    field=name,
                    value=now.get(name),
                    expected=first.get(name, "no such field"),
                )

    def _is_summarized(self, step: int) -> bool:
        """Return whether a step is the first after a start or in an interval, or the last."""
        if self._last_step is None:
            self._rates()  # those of the programs before it
            return True
        if step in (self._train.num_train_steps, self.data.last_step):
            return True
        interval = self._train.steps_per_summary
        return step // interval > self._last_step // interval


def _trimmed(counts: Mapping[str, BinCounts]) -> dict[str, Histogram]:
    return {name: Histogram.of(bins).trimmed() for name, bins in counts.items()}


class RollbackRequestedError(Exception):
    """A request to restore a checkpoint from before a step that is not valid.

    Its argument are the input positions after that step, by checkpoint key.
    """


class TrainPrograms:
    """The training programs of a job, which run round robin and report steps in order."""

    def __init__(
        self,
        inputs: TrainInputs,
        programs: Sequence[TrainProgram],
        train: TrainHParams,
        *,
        news: collections.deque[Callable[[], None]] | None = None,
    ) -> None:
        """Store the arguments without starting a step.

        `news` are functions that other threads add, which are called before the next step.
        """
        self.inputs = inputs
        self._news = news
        self.programs = tuple(programs)
        self.skipped = SkippedSteps(train)
        self._train = train
        # Each step that is not reported yet: its program, and the input positions after it.
        self._started: collections.deque[tuple[TrainProgram, Any]] = collections.deque()
        self._last: TrainProgram | None = None

    def start_step(
        self, state: TrainState, step: int, signals: StopSignals | None = None
    ) -> TrainState:
        """Start a step with the program of its data set; see `TrainProgram.start_step`."""
        while self._news:
            self._news.popleft()()
        program = self.programs[self.inputs.index_of_step(step)]
        state = program.start_step(
            state, step, lambda: all(program.is_idle() for program in self.programs), signals
        )
        positions = self.input_states() if self._train.learner.rolls_back else None
        self._started.append((program, positions))
        ahead = range(step + 1, step + 1 + _STEPS_AHEAD)
        for index in dict.fromkeys(map(self.inputs.index_of_step, ahead)):
            self.inputs.inputs[index].feed.fill()
        return state

    def report_due(self) -> None:
        """Report the oldest started steps, until `max_inflight_steps` are left.

        Raises:
          RollbackRequestedError: A step asks for a rollback; so do `drain` and what calls it.
        """
        # The first step is reported before the second one starts, so that its loss appears at once.
        limit = self._train.max_inflight_steps if self._last is not None else 0
        while len(self._started) > limit:
            self._report_oldest()

    def drain(self) -> None:
        """Wait for all started steps and report them."""
        while self._started:
            self._report_oldest()

    def last_metrics(self) -> dict[str, float]:
        """Return the metrics of the model in the step that was reported last."""
        return {} if self._last is None else self._last.last_metrics()

    def input_states(self) -> dict[str, Any]:
        """Return the input positions after all started steps, by checkpoint key."""
        return {data.key: data.feed.state() for data in self.inputs.inputs}

    def abandon(self) -> None:
        """Forget all started steps that are not reported."""
        self._started.clear()
        for program in self.programs:
            program.abandon()

    def _report_oldest(self) -> None:
        self._last, positions = self._started.popleft()
        self._last.report_oldest(self.skipped)
        if self.skipped.rollback is not None:
            raise RollbackRequestedError(positions)
