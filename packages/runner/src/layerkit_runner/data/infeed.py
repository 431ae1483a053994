"""Inputs in this process: which rows it feeds follows from how the batch is sharded."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax

from layerkit.config import Config, target_of
from layerkit.nested_map import NestedMap
from layerkit_inputs.base_input import BaseInput
from layerkit_inputs.eval_padding import mark_rows, pad_rows
from layerkit_inputs.extras import MissingExtraError
from layerkit_inputs.feeds import FeedPlan, plan_feeds
from layerkit_runner.data.batch_checks import check_batch
from layerkit_runner.distributed.process_exchange import gather_values
from layerkit_runner.distributed.stop_signals import StopRequestedError, active_signals
from layerkit_runner.distributed.watchdog import progress
from layerkit_runner.errors import UsageError, to_usage_error
from layerkit_runner.partitioning import Partitioner


@dataclasses.dataclass(frozen=True)
class Place:
    """For which process of a job an input is built.

    Attributes:
      process_index: Which.
      num_processes: Of how many.
      process_of: To which process a device belongs.
    """

    process_index: int
    num_processes: int
    process_of: Callable[[jax.Device], int]


def this_process() -> Place:
    """The process that asks, among those that JAX knows."""
    return Place(jax.process_index(), jax.process_count(), lambda device: device.process_index)


def make_input(config: Config, partitioner: Partitioner, place: Place | None = None) -> BaseInput:
    """Builds an input with the batch size and the place of a process filled in.

    Args:
      config: Of an input that sets `batch_size` (rows on each host) or `percore_batch_size` (rows
        per device, a fraction where several devices share a row), or has a size of its own
        (`BaseInput.get_batch_size`).
      partitioner: Started.
      place: For which process; None for this one.

    Raises:
      UsageError: the batch cannot be spread evenly over the devices, or the input refuses its
      fields.
    """
    place = place or this_process()
    plan = plan_input(config, partitioner, place)
    filled = config.clone()
    if config.batch_size is None and config.percore_batch_size is None:
        _check_own_size(config, plan)
    else:
        filled.set(batch_size=plan.batch_size)
    filled.set(
        num_infeed_hosts=plan.num_infeed_hosts,
        infeed_host_index=plan.infeed_host_index(place.process_index),
    )
    with as_usage_error():
        return filled.Instantiate()


def _check_own_size(config: Config, plan: FeedPlan) -> None:
    """An input that makes batches of a size of its own cannot be told to make others."""
    own = target_of(config).get_batch_size(config)
    if own != plan.batch_size:
        raise UsageError(
            f"{dataset_name(config)} makes batches of {own} rows on each host, but the sharding of"
            f" the batch asks each of {plan.num_infeed_hosts} feeds for {plan.batch_size}; change"
            " the mesh or the input's own batch size"
        )


def plan_input(config: Config, partitioner: Partitioner, place: Place) -> FeedPlan:
    """Which processes feed which rows of the batches of an input; see `make_input`."""
    name = dataset_name(config)
    percore = config.percore_batch_size
    if percore is not None:
        if config.batch_size is not None:
            raise UsageError(
                f"{name}: set batch_size or percore_batch_size, not both"
                f" ({config.batch_size} and {percore})"
            )
        rows = percore * partitioner.mesh.size
        if abs(rows - round(rows)) > 1e-6:  # 0.1 × 30 is not 3 in binary
            raise UsageError(
                f"{name}: percore_batch_size={percore} on {partitioner.mesh.size} devices is a"
                f" global batch of {rows:g} rows, which is no whole number"
            )
        global_rows = round(rows)
    elif (rows_per_host := target_of(config).get_batch_size(config)) is not None:
        global_rows = rows_per_host * place.num_processes
    else:
        raise UsageError(f"{name}: set batch_size or percore_batch_size")
    partitioner.check_batch_size(global_rows, source=name)
    plan = feed_plan(global_rows, partitioner, place)
    if config.batch_padding_size > 0 and not config.is_training:
        padded_rows = (plan.batch_size + config.batch_padding_size) * plan.num_infeed_hosts
        padding = f"{name} with batch_padding_size={config.batch_padding_size}"
        partitioner.check_batch_size(padded_rows, source=padding)
    return plan


def example_batch(
    config: Config, partitioner: Partitioner, place: Place | None = None
) -> NestedMap:
    """A training batch of a process, to know the shapes by; zeros where the data are not needed.

    Args:
      config: Of an input to train on.
      partitioner: Started.
      place: Of which process; None for this one.

    Raises:
      UsageError: as `make_input`; or only the data tell what a batch looks like, and they cannot
        be read.
    """
    plan = plan_input(config, partitioner, place or this_process())
    blank = target_of(config).blank_batch(config, plan.batch_size)
    if blank is not None:
        return blank
    train_input = make_input(config, partitioner, place)
    with contextlib.closing(train_input):
        return peek_batch(train_input)


def feed_plan(global_rows: int, partitioner: Partitioner, place: Place | None = None) -> FeedPlan:
    """Which process feeds which rows of a global batch."""
    process_of = (place or this_process()).process_of
    held: dict[int, list[tuple[int, int]]] = {}
    shape = (global_rows,)
    device: jax.Device
    for device, (rows,) in partitioner.batch_sharding().devices_indices_map(shape).items():
        start, stop, _ = rows.indices(global_rows)
        held.setdefault(process_of(device), []).append((start, stop))
    return plan_feeds(held)


def dataset_name(config: Config) -> str:
    """What a data set is called in outputs: its `name`, else its class."""
    return config.name or target_of(config).__name__


def eval_batches(dataset: BaseInput) -> Iterator[NestedMap]:
    """Yield the batches of one evaluation, as many on every process; all must take them.

    Raises:
      StopRequestedError: A signal to stop came, and the input does not answer.
      UsageError: The data cannot be read.
    """
    with as_usage_error():
        gather = gather_values if jax.process_count() > 1 else None
        batches = read(lambda: dataset.eval_batches(gather))
    name = dataset.name or type(dataset).__name__
    for number in itertools.count(1):
        progress(f"reading batch {number} of {name}", waits_for_others=True)
        with as_usage_error():
            batch = read(lambda: next(batches, None))
        if batch is None:
            return
        progress(
            f"working on batch {number} of {name}", compiles=number == 1, waits_for_others=True
        )
        yield check_batch(dataset, batch, is_padded=True)


def peek_batch(dataset: BaseInput) -> NestedMap:
    """Return the next batch of an input without consuming it.

    Raises:
      StopIteration: the data have ended.
      UsageError: the data cannot be read, or the batch is not what the input declares.
    """
    with as_usage_error():
        return check_batch(dataset, dataset.peek())


def peek_eval_batch(dataset: BaseInput) -> NestedMap:
    """Return the next batch as evaluation reads it, with its rows of padding; see `peek_batch`."""
    batch, padding = peek_batch(dataset), dataset.batch_padding_size
    return mark_rows(pad_rows(batch, padding), padding) if padding else batch


@contextlib.contextmanager
def as_usage_error() -> Iterator[None]:
    """Faults of data, which name the file and what is wrong with it, need no traceback."""
    try:
        yield
    except (MissingExtraError, OSError, ValueError) as error:
        raise to_usage_error(error) from error


# After a signal, an evaluation waits so long for its next batch.
_SECONDS_FOR_INPUT = 5.0
_POLL_SECONDS = 0.1

T = TypeVar("T")


def read(act: Callable[[], T]) -> T:
    """Return what `act` returns, or give it up if it does not answer after a signal to stop.

    In a job of several processes `act` is called directly: the others may wait for this one inside
    of it, and would not know that it was given up.

    Args:
      act: Reads something. All calls of it come from the same thread.

    Raises:
      StopRequestedError: A signal came, and `act` took some seconds more.
    """
    signals = active_signals()
    if signals is None or jax.process_count() > 1:
        return act()
    future = _reader().submit(act)
    since: float | None = None
    while not concurrent.futures.wait([future], _POLL_SECONDS).done:
        if signals.gives_up_evaluation:
            since = since or time.monotonic()
            if time.monotonic() - since > _SECONDS_FOR_INPUT:
                raise StopRequestedError
    return future.result()


class _Reader:
    """A daemon thread that makes the calls it is given, one after the other."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Any]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="eval-input", daemon=True).start()

    def submit(self, act: Callable[[], T]) -> concurrent.futures.Future[T]:
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._calls.put((act, future))
        return future

    def _run(self) -> None:
        while True:
            act, future = self._calls.get()
            try:
                future.set_result(act())
            except BaseException as error:  # raised where the result is wanted
                future.set_exception(error)
            del act, future  # they may hold large arrays


@functools.cache
def _reader() -> _Reader:
    return _Reader()
