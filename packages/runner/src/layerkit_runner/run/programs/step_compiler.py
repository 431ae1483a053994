"""StepCompiler, which compiles the training steps of a run on a thread, those that run next first.

Of stages, only the step of the current one is compiled before training starts. The others are
traced while the compiler works and compiled while training runs, so a stage that cannot be compiled
ends the run within minutes, not at its border. Stages of one shape share a step.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable
from concurrent import futures
from typing import Any

import jax

from layerkit.errors import error_text
from layerkit_runner.data.train_inputs import TrainInputs
from layerkit_runner.distributed.watchdog import progress
from layerkit_runner.errors import UsageError, as_usage_error
from layerkit_runner.run.job import Job
from layerkit_runner.run.programs.train_program import CompiledStep, trace_step
from layerkit_runner.run.start_report import compiled_lines
from layerkit_runner.step.train_state import TrainState


class StepCompiler:
    """A compiler of the steps on the data sets or stages of a job.

    Attributes:
      first: Steps that were compiled before training, set by `steps`.
      news: Reports and errors of the thread, to be called on the main thread between steps.
    """

    first: list[CompiledStep]

    def __init__(self, job: Job, inputs: TrainInputs, state: TrainState) -> None:
        """Store the arguments; `state` has shapes, dtypes and shardings."""
        self.news: collections.deque[Callable[[], None]] = collections.deque()
        self._job = job
        self._inputs = inputs
        self._state = state
        self._pool = futures.ThreadPoolExecutor(1)
        self._untraced: list[Callable[[], None]] = []
        self._needed: list[int] = []
        self._compiling: dict[int, futures.Future[CompiledStep]] = {}
        self._by_shapes: dict[Any, futures.Future[CompiledStep]] = {}
        # Steps that the start reports, or `news`.
        self._told: set[futures.Future[CompiledStep]] = set()

    def trace_next(self, step: int) -> None:
        """Trace and start to compile what the steps after `step` completed ones need first."""
        inputs = self._inputs
        self._needed = [*range(len(inputs.inputs))]
        if inputs.inputs[0].last_step is not None:
            self._needed = [inputs.index_of_step(min(step + 1, inputs.num_turn_steps))]
        for index in self._needed:
            self._trace(index)

    def steps(self, traces: Iterable[Callable[[], None]]) -> list[CompiledStep]:
        """Wait for what is needed first; return the steps of all inputs, the others deferred.

        Later stages are traced meanwhile, and then other programs by calls of `traces`; what is
        left, and all of it with steps from the compilation cache, by `trace_rest`.
        """
        later = range(self._needed[-1] + 1, len(self._inputs.inputs))
        self._untraced = [*(functools.partial(self._trace, index) for index in later), *traces]
        first = [self._compiling[index] for index in self._needed]
        self._told = {*first}
        while self._untraced and not all(
            step.done() and step.result().is_from_cache for step in first
        ):
            self._untraced.pop(0)()
        self.first = [step.result() for step in first]
        steps = dict(zip(self._needed, self.first, strict=True))
        return [steps.get(n) or self._deferred(n) for n in range(len(self._inputs.inputs))]

    def trace_rest(self) -> None:
        """Trace what is not traced yet."""
        while self._untraced:
            self._untraced.pop(0)()

    def close(self) -> None:
        """Cancel what the compiler has not begun, and wait for it."""
        self._pool.shutdown(cancel_futures=True)

    def _trace(self, index: int) -> None:
        if index in self._compiling:
            return
        job, data = self._job, self._inputs.inputs[index]
        name = data.name if data.last_step is None else f"stage {index + 1}"
        leaves, structure = jax.tree.flatten(batch := data.abstract_batch)
        if (shapes := (structure, *leaves)) not in self._by_shapes:
            with as_usage_error(ValueError, owner=name):
                compile_step = trace_step(job.task, job.partitioner, self._state, batch)
            self._by_shapes[shapes] = self._pool.submit(compile_step)
        self._compiling[index] = future = self._by_shapes[shapes]
        if index not in self._needed and future not in self._told:
            self._told.add(future)
            future.add_done_callback(lambda _: self.news.append(lambda: self._tell(index)))

    def _deferred(self, index: int) -> CompiledStep:
        data = self._inputs.inputs[index]

        @functools.cache
        def compiled_step() -> CompiledStep:
            progress(f"waiting for the compiler of stage {index + 1}", compiles=True)
            with self._job.goodput.phase("compile"):
                self._trace(index)
                compiled = self._result(index)
            self._job.observers.message(f"stage {index + 1} begins: {data}")
            return compiled

        return dataclasses.replace(
            self.first[0],
            run=lambda state, batch: compiled_step().run(state, batch),
            batch=data.abstract_batch,
        )

    def _tell(self, index: int) -> None:
        for line in compiled_lines([self._result(index).run]):
            self._job.observers.message(f"stage {index + 1} is compiled: {line}")

    def _result(self, index: int) -> CompiledStep:
        """Wait for the step of a stage that is compiled while others train."""
        try:
            return self._compiling[index].result()
        except Exception as error:
            problem = f"the step cannot be compiled: {error_text(error)}"
            raise UsageError(problem, field=f"STAGES[{index}]") from error
