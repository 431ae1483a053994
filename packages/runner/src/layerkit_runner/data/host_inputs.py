"""Inputs of this process, whose rows follow from the sharding of the batch, and their batches.

Records that an input has skipped, because they cannot be read, are counted and reported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterator

import jax

from layerkit.config import Config, target_of
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.base_input import BaseInput
from layerkit_inputs.base.evaluation import mark_rows, pad_rows
from layerkit_inputs.base.host_batches import FeedPlan, check_batch, dtype_in_jax, plan_feeds
from layerkit_inputs.base.prefetch import Prefetch
from layerkit_runner.distributed.cluster import gather_values
from layerkit_runner.distributed.watchdog import progress
from layerkit_runner.errors import UsageError, as_usage_error
from layerkit_runner.observers import Observer
from layerkit_runner.partitioning import Partitioner


@dataclasses.dataclass(frozen=True)
class HostTopology:
    """A process of a job, and the processes of all devices."""

    process_index: int
    num_processes: int
    process_of: Callable[[jax.Device], int]


def local_topology() -> HostTopology:
    """Return the topology of this process, as JAX reports it."""
    return HostTopology(
        jax.process_index(), jax.process_count(), lambda device: device.process_index
    )


def make_input(
    config: Config, partitioner: Partitioner, host: HostTopology | None = None
) -> BaseInput:
    """Build an input with the batch size and the feed of a process.

    Args:
      config: Config of an input that sets `batch_size` (rows on each host) or `percore_batch_size`
        (rows per device, a fraction if several devices share a row), or whose class defines the
        size (`BaseInput.get_batch_size`).
      partitioner: Partitioner that has started.
      host: Process to build the input for; None for this one.

    Raises:
      UsageError: The batch cannot be split evenly over the devices, or a field of the input is
        wrong.
    """
    host = host or local_topology()
    plan = plan_input(config, partitioner, host)
    filled = config.clone()
    if config.batch_size is not None or config.percore_batch_size is not None:
        filled.set(batch_size=plan.batch_size)
    elif (rows := target_of(config).get_batch_size(config)) != plan.batch_size:
        expected = f"{plan.batch_size} for each of {plan.num_infeed_hosts} feeds of this mesh"
        name = dataset_name(config)
        raise UsageError(owner=name, field="rows of a batch", value=rows, expected=expected)
    filled.set(
        num_infeed_hosts=plan.num_infeed_hosts,
        infeed_host_index=plan.infeed_host_index(host.process_index),
    )
    with as_usage_error():
        return filled.Instantiate()


def plan_input(config: Config, partitioner: Partitioner, host: HostTopology) -> FeedPlan:
    """Return the rows that each process feeds of the batches of an input; see `make_input`."""
    name = dataset_name(config)
    if config.percore_batch_size is None:
        field, size = "batch_size", target_of(config).get_batch_size(config)
        rows = None if size is None else size * host.num_processes
    else:
        field, size = "percore_batch_size", config.percore_batch_size
        # 0.1 × 30 is not 3 in binary.
        rows = round(size * partitioner.mesh.size, 6) if config.batch_size is None else None
    if rows is None:
        expected = "one of batch_size and percore_batch_size"
        raise UsageError(owner=name, field="batch_size", value=config.batch_size, expected=expected)
    partitioner.check_batch_size(rows, owner=name, field=field, value=size)
    plan = feed_plan(int(rows), partitioner, host)
    if config.batch_padding_size > 0 and not config.is_training:
        padded_rows = (plan.batch_size + config.batch_padding_size) * plan.num_infeed_hosts
        field, size = "batch_padding_size", config.batch_padding_size
        partitioner.check_batch_size(padded_rows, owner=name, field=field, value=size)
    return plan


def example_batch(
    config: Config, partitioner: Partitioner, host: HostTopology | None = None
) -> NestedMap:
    """Return a training batch with the shapes of a process; zeros if the data are not needed."""
    plan = plan_input(config, partitioner, host or local_topology())
    blank = target_of(config).blank_batch(config, plan.batch_size)
    if blank is not None:
        return blank
    train_input = make_input(config, partitioner, host)
    with contextlib.closing(train_input):
        return peek_batch(train_input)


def feed_plan(
    global_rows: int, partitioner: Partitioner, host: HostTopology | None = None
) -> FeedPlan:
    """Return the rows of a global batch that each process feeds."""
    process_of = (host or local_topology()).process_of
    held: dict[int, list[tuple[int, int]]] = {}
    shape = (global_rows,)
    device: jax.Device
    for device, (rows,) in partitioner.batch_sharding().devices_indices_map(shape).items():
        start, stop, _ = rows.indices(global_rows)
        held.setdefault(process_of(device), []).append((start, stop))
    return plan_feeds(held)


def prefetched(dataset: BaseInput) -> Prefetch:
    """Return an input that reads `dataset` ahead on a thread and checks each batch there."""
    return Prefetch(source=dataset, check=functools.partial(check_batch, dataset))


def dataset_name(config: Config) -> str:
    """Return the name of a data set in outputs: its `name`, or else its class."""
    return config.name or target_of(config).__name__


def eval_batches(dataset: BaseInput) -> Iterator[NestedMap]:
    """Yield the batches of one evaluation, equally many on each process; all must consume them."""
    with as_usage_error():
        gather = gather_values if jax.process_count() > 1 else None
        batches = dataset.eval_batches(gather)
    name = dataset.name or type(dataset).__name__
    for number in itertools.count(1):
        progress(f"reading batch {number} of {name}", waits_for_others=True)
        with as_usage_error():
            batch = next(batches, None)
            if batch is None:
                return
            check_batch(dataset, batch, is_padded=True)
        is_first = number == 1
        progress(f"working on batch {number} of {name}", compiles=is_first, waits_for_others=True)
        yield batch


def peek_batch(dataset: BaseInput) -> NestedMap:
    """Return the next batch of an input without consuming it; StopIteration at the end."""
    with as_usage_error():
        return check_batch(dataset, dataset.peek())


def peek_eval_batch(dataset: BaseInput) -> NestedMap:
    """Return the next batch of an evaluation, with its rows of padding; see `peek_batch`."""
    batch, padding = peek_batch(dataset), dataset.batch_padding_size
    return mark_rows(pad_rows(batch, padding), padding) if padding else batch


def cast_text(batch: NestedMap) -> str | None:
    """Return the fields that JAX converts to narrower floats: `x, y: float64 → float32`."""
    fields: dict[str, list[str]] = {}
    for path, leaf in batch.flatten_items():
        dtype = getattr(leaf, "dtype", None)
        if dtype is not None and dtype.kind in "fc" and dtype_in_jax(dtype) != dtype:
            fields.setdefault(f"{dtype} → {dtype_in_jax(dtype)}", []).append(path)
    casts = "; ".join(f"{', '.join(paths)}: {cast}" for cast, paths in fields.items())
    return f"{casts} (JAX_ENABLE_X64 is off)" if casts else None


SKIPPED_RECORDS = "skipped_records"
"""Name of the metric that counts skipped records."""


class SkippedRecords:
    """A counter of the records that an input of this process has skipped during training."""

    def __init__(self, dataset: BaseInput, name: str, observers: Observer) -> None:
        """Create a counter for an input, with its name in reports."""
        self._dataset = dataset
        self._name = name
        self._observers = observers
        self._reported = 0

    def scalars(self) -> dict[str, float]:
        """Return the number of skipped records, and report it at first and when it has doubled."""
        count = self._dataset.num_skipped
        if count and count >= 2 * self._reported:
            self._reported = count
            line = skipped_line(self._name, count)
            if jax.process_index() == 0:
                self._observers.message(line)
            else:
                print(f"process {jax.process_index()}: {line}", file=sys.stderr, flush=True)
        return {SKIPPED_RECORDS: float(count)} if count else {}


def report_skipped(dataset: BaseInput, name: str, observers: Observer) -> dict[str, float]:
    """Report the records that all hosts skipped; return the metric of their number."""
    # Processes that read the same rows skip the same records.
    by_feed = dict(gather_values([dataset.infeed_host_index, dataset.num_skipped]))
    count = sum(by_feed.values())
    if not count:
        return {}
    observers.message(skipped_line(name, count))
    return {SKIPPED_RECORDS: float(count)}


def skipped_line(name: str, count: int) -> str:
    """Return the line about skipped records: `heldout: skipped 3 unreadable records so far`."""
    return f"{name}: skipped {count:,} unreadable record{'' if count == 1 else 's'} so far"
