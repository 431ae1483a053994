"""The data sets that a job trains on, and the check that all processes read the same data.

    DeviceFeed      batches of an input that are sent to the devices ahead of the steps
    TrainInput      a training data set with its feed
    TrainInputs     the training data sets of a job, and the order in which steps use them

Indexed readers split one global order into the rows of each process. If the files of processes
differ, so do their orders, and their evaluations end at different batches and wait for each other.
"""

from __future__ import annotations

import bisect
import collections
import functools
import itertools
import json
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from layerkit.config import Config, assigned_fields
from layerkit.config.checks import require
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.base_input import BaseInput
from layerkit_inputs.base.evaluation import AllGather
from layerkit_inputs.base.prefetch import Prefetch
from layerkit_runner.config.requests import ResolvedExperiment
from layerkit_runner.config.stages import StageSteps, stages_of
from layerkit_runner.data.host_inputs import dataset_name, peek_batch
from layerkit_runner.distributed.stop_signals import StopRequestedError
from layerkit_runner.errors import UsageError, as_usage_error
from layerkit_runner.partitioning import Partitioner

_POLL_SECONDS = 0.002


class DeviceFeed:
    """A queue of global batches of an endless input on the devices.

    Nothing else reads the input after the first `take`. At most `depth` batches wait.
    """

    def __init__(
        self,
        source: Prefetch,
        partitioner: Partitioner,
        *,
        depth: int = 2,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Create a feed that has read no batch."""
        self._source = source
        self._partitioner = partitioner
        self._depth = depth
        self._clock = clock
        self._waiting: collections.deque[tuple[NestedMap, dict[str, Any]]] = collections.deque()
        self._state: dict[str, Any] | None = None
        self._before: dict[str, Any] | None = None  # the state before the batch that was taken last
        self._error: Exception | None = None

    def take(
        self,
        is_idle: Callable[[], bool],
        *,
        gives_up: Callable[[], bool] = lambda: False,
        may_take: Callable[[], bool] = lambda: True,
    ) -> tuple[NestedMap, float]:
        """Return (next global batch, seconds for which the devices were idle for lack of it).

        Args:
          is_idle: Function that returns whether the devices have no work left.
          gives_up: Function that returns whether to stop waiting for a batch.
          may_take: Function that is called once the batch is ready; whether to return it.

        Raises:
          StopRequestedError: No batch was returned; the next call returns the same one.
          UsageError: The next batch could not be read. A defect in a reader raises its own error.
        """
        idle_seconds = 0.0
        if not self._waiting:
            if self._error is not None:
                raise self._error
            idle_seconds = self._wait(is_idle, gives_up)
            self._send_next()
        if not may_take():
            raise StopRequestedError
        self._before = self._state
        batch, self._state = self._waiting.popleft()
        return batch, idle_seconds

    def give_back(self, batch: NestedMap) -> None:
        """Return the batch that was taken last, so that `take` returns it again."""
        assert self._state is not None
        self._waiting.appendleft((batch, self._state))
        self._state = self._before

    def peek(self) -> NestedMap:
        """Return the global batch that `take` returns next, without consuming it."""
        if not self._waiting:
            self._send_next()
        return self._waiting[0][0]

    def fill(self) -> None:
        """Send batches that are ready to the devices up to `depth`, without waiting.

        If one cannot be read, `take` raises the error after the batches before it.
        """
        while len(self._waiting) < self._depth and self._source.num_ready and self._error is None:
            try:
                self._send_next()
            except Exception as error:
                self._error = error

    def state(self) -> dict[str, Any]:
        """Return the state of the input after the batches that were returned."""
        return self._source.get_state() if self._state is None else self._state

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a state of the input, and drop the batches that wait."""
        self._source.set_state(state)
        self._waiting.clear()
        self._state = self._before = self._error = None

    def _send_next(self) -> None:
        if self._state is None:
            self._state = self._source.get_state()
        with as_usage_error():
            batch = self._source.get_next()
        self._waiting.append((self._partitioner.put_batch(batch), self._source.get_state()))

    def _wait(self, is_idle: Callable[[], bool], gives_up: Callable[[], bool]) -> float:
        """Wait until the source has a batch; return for how many seconds the devices were idle."""
        idle_since, timeout = None, 0.0
        while not self._source.wait(timeout):
            if idle_since is None and is_idle():
                idle_since = self._clock()
            if gives_up():
                raise StopRequestedError
            timeout = _POLL_SECONDS
        return 0.0 if idle_since is None else self._clock() - idle_since


_KEY_PREFIX = "train/"
# Reader in the input state of a run in stages; the class is imported only for such runs.
_STAGED = "StagedRows"


def datasets_by_name(configs: Iterable[Config]) -> dict[str, Config]:
    """Return configs of data sets by name."""
    by_name: dict[str, Config] = {}
    for config in configs:
        name = dataset_name(config)
        if name in by_name:
            raise UsageError("duplicate name of a data set", field="name", value=name)
        by_name[name] = config
    return by_name


def named_dataset(program: Config, path: str, datasets: Iterable[str]) -> str | None:
    """Return the data set that the config of a program names, or None."""
    name: Any = assigned_fields(program).get("dataset")
    if name is not None and name not in datasets:
        raise UsageError("unknown data set", field=f"{path}.dataset", value=name, choices=datasets)
    return name


def training_configs(resolved: ResolvedExperiment) -> dict[str, Config]:
    """Return configs of the inputs to train on by name, in the order of the training programs."""
    by_name = datasets_by_name(config for config in resolved.datasets if config.is_training)
    if resolved.train_programs is None:
        if len(by_name) != 1:
            raise UsageError(
                owner=resolved.name,
                field="datasets()",
                value=list(by_name),
                expected="one input with is_training=True",
                hint="To train on several, list them in train_programs()."
                if by_name
                else _evaluation_hint(resolved),
            )
        return by_name
    names = [
        named_dataset(program, f"train_programs.{index}", by_name)
        for index, program in enumerate(resolved.train_programs)
    ]
    is_valid = collections.Counter(names) == collections.Counter([*by_name])
    expected = f"one Config(TrainProgram, dataset=NAME) for each of {', '.join(by_name)}"
    require(is_valid, None, "train_programs()", names, expected, UsageError)
    return {name: by_name[name] for name in names if name is not None}


def run_stages(resolved: ResolvedExperiment) -> list[StageSteps]:
    """Return the stages of a training run, which are those of its only data set, or [].

    Raises:
      UsageError: The run has training programs or another last step, or may roll back beside
        mixtures.
    """
    stages = stages_of(resolved.experiment)
    if stages:
        programs, expected = resolved.train_programs, "none beside stages"
        require(programs is None, resolved.name, "train_programs()", programs, expected, UsageError)
        path, last = "task.train.num_train_steps", stages[-1].last_step
        steps, expected = (
            resolved.task.train.num_train_steps,
            f"{last}, the last step of the stages",
        )
        require(steps == last, resolved.name, path, steps, expected, UsageError)
        # Later rows would have the mixture of a later stage, since a mixture follows the rows.
        learner, expected = (
            resolved.task.train.learner,
            "skip, stop or None, since STAGES have mixtures",
        )
        if any("mixture" in one.stage for one in stages):
            for name in ("on_nonfinite", "on_spike"):
                action, path = getattr(learner, name, None), f"task.train.learner.{name}"
                require(action != "rollback", resolved.name, path, action, expected, UsageError)
    return stages


def _evaluation_hint(resolved: ResolvedExperiment) -> str | None:
    if not resolved.datasets:
        return None
    hint = "The experiment only evaluates, by --mode=eval_once or --mode=eval."
    if trainer := resolved.experiment.trained_by:
        path = f"{trainer.__module__}.{trainer.__qualname__}"
        hint += f" {path} trains its model, and can be planned."
    return hint


def check_same_data(inputs: Mapping[str, BaseInput], all_gather: AllGather) -> None:
    """Raise `UsageError` on every process if one reads other data than process 0.

    `all_gather` returns the JSON values of all processes for that of this one. Inputs whose state
    differs by process are not compared.
    """
    names = [name for name, dataset in inputs.items() if dataset.state_scope == "global"]
    with as_usage_error():
        texts = [json.dumps(inputs[name].get_state(), sort_keys=True) for name in names]
    digests = all_gather([zlib.crc32(text.encode()) for text in texts])
    for name, column in zip(names, zip(*digests, strict=True), strict=True):
        if others := [process for process, digest in enumerate(column) if digest != column[0]]:
            raise UsageError(
                "processes read other data than process 0",
                owner=name,
                field="processes",
                value=others,
                hint="Give every machine the same files, and for the text of Python's own sources"
                " the same Python release.",
            )


class TrainInput:
    """A training data set whose batches are sent to the devices ahead of the steps.

    Attributes:
      last_step: Last step of a stage; None for a data set that is used round robin.
    """

    last_step: int | None = None

    def __init__(
        self, dataset: Prefetch, partitioner: Partitioner, name: str | None = None, steps: int = 1
    ) -> None:
        """Create the device feed without reading any batch."""
        self.dataset = dataset
        self.name = name
        self.steps = steps
        self.feed = DeviceFeed(dataset, partitioner)
        self._partitioner = partitioner

    @property
    def input_name(self) -> str:
        """Name of the input, by default its class."""
        source = self.dataset.source
        return source.name or type(source).__name__

    @property
    def key(self) -> str:
        """Key of the input position in a checkpoint."""
        return _KEY_PREFIX + self.input_name

    @functools.cached_property
    def abstract_batch(self) -> NestedMap:
        """Shapes, dtypes and shardings of a global batch, found without advancing the input."""
        return self._partitioner.abstract_batch(peek_batch(self.dataset))

    def restore(self, state: dict[str, Any] | None, step: int) -> None:
        """Restore the position of the data set, if there is one, after `step` steps of the run.

        Raises:
          UsageError: The position is that of stages, which this run lacks.
        """
        if state is not None:
            reader = state.get("reader")
            is_alike = reader != _STAGED or type(self.dataset.source).__qualname__ == _STAGED
            expected = f"the stages with which the first {step} steps were trained"
            require(is_alike, self.input_name, "STAGES", None, expected, UsageError)
            self.feed.set_state(state)


class TrainInputs:
    """The training data sets of a job, used round robin by the number of the step.

    Stages are a round that is as long as the run.
    """

    def __init__(self, inputs: Sequence[TrainInput]) -> None:
        """Store the data sets."""
        self.inputs = tuple(inputs)
        # The last step of each data set in a round.
        self._last_steps = [*itertools.accumulate(data.steps for data in inputs)]

    @property
    def datasets(self) -> list[TrainInput]:
        """Inputs without the later stages, which share the data set of the first."""
        is_first = (one.last_step is None or one is self.inputs[0] for one in self.inputs)
        return [*itertools.compress(self.inputs, is_first)]

    @property
    def num_turn_steps(self) -> int:
        """Number of steps of one round through all data sets."""
        return self._last_steps[-1]

    def index_of_step(self, step: int) -> int:
        """Return the index of the data set that a step uses; steps are counted from 1."""
        return bisect.bisect_right(self._last_steps, (step - 1) % self._last_steps[-1])

    def total(self, values: Sequence[float], step: int) -> float:
        """Return the sum over the first `step` steps of a value for each data set."""
        rounds, rest = divmod(step, self.num_turn_steps)
        total, before = 0.0, 0
        for data, value in zip(self.inputs, values, strict=True):
            total += value * (rounds * data.steps + min(max(rest - before, 0), data.steps))
            before += data.steps
        return total

    def set_states(self, states: Mapping[str, Any], *, step: int) -> list[str]:
        """Restore the input positions of a checkpoint; return the keys that have none.

        Args:
          states: Positions by key.
          step: Number of completed steps, from which the stage follows.
        """
        inputs = {data.key: data for data in self.datasets}
        known = [key for key in states if key == "train" or key.startswith(_KEY_PREFIX)]
        if len(known) == len(inputs) == 1:
            # The data set may have been renamed. The oldest checkpoints have the key "train".
            states = {next(iter(inputs)): states[known[0]]}
        for key, data in inputs.items():
            data.restore(states.get(key), step)
        return [key for key in inputs if key not in states]

    def close(self) -> None:
        """Close the data sets."""
        for data in self.datasets:
            data.dataset.close()
