"""`--mode=inspect --inspect=batches`: what the model will be fed, before anything is trained.

    runner --exp=… --mode=inspect --inspect=batches                    as one host has them
    runner --exp=… --mode=inspect --inspect=batches --num_hosts=4      as each of four has them
    runner --exp=… --mode=inspect --inspect=batches --num_batches=10   more of them

Nothing is written, no model is built and no accelerator is touched: devices are simulated, as many
as the mesh has or else one for each host, and the inputs of all hosts are built in this process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import jax
import numpy as np

from layerkit.config import Config, target_of
from layerkit.nested_map import NestedMap
from layerkit_inputs.base_input import BaseInput
from layerkit_runner.config.flags import RunOptions
from layerkit_runner.config.resolve import ResolvedExperiment
from layerkit_runner.data.batch_checks import check_batch, skipped_line
from layerkit_runner.data.infeed import (
    HostTopology,
    as_usage_error,
    dataset_name,
    make_input,
    plan_input,
)
from layerkit_runner.errors import UsageError
from layerkit_runner.partitioning import Partitioner
from layerkit_runner.tools.inspect.batch_text import (
    SPECIAL,
    UNWEIGHTED,
    field_table,
    real_rows,
    row_lines,
    summary,
)
from layerkit_runner.tools.plan.devices import num_planned_devices, simulated_devices

_ROWS_SHOWN = 2


def run_inspect(resolved: ResolvedExperiment, options: RunOptions) -> int:
    """Prints a few batches of each input of an experiment; returns the exit code.

    Raises:
      UsageError: data that cannot be read, or fields or flags that do not fit together.
    """
    with as_usage_error():
        partitioner = resolved.partitioner.Instantiate()
    count = num_planned_devices(
        partitioner, num_devices=options.num_devices, default=max(1, options.num_hosts)
    )
    devices = simulated_devices(count)
    partitioner.start(devices)
    places = simulated_places(devices, options.num_hosts)
    print(f"{len(places)} host(s) of {count // len(places)} device(s) each are simulated;", end=" ")
    print(f"labels of weight 0 stand in {UNWEIGHTED.format('brackets')},", end=" ")
    print(f"special ids in {SPECIAL.format('these')}")
    kinds = [(c, "train" if c.is_training else "eval") for c in resolved.datasets]
    kinds += [(config, "decode") for config in resolved.decode_datasets]
    for config, kind in kinds:
        print()
        for line in input_lines(config, kind, partitioner, places, options.num_batches):
            print(line, flush=True)
    return 0


def simulated_places(devices: list[jax.Device], num_hosts: int) -> list[HostTopology]:
    """The places of so many processes, among which the devices are split in their order.

    Raises:
      UsageError: the devices cannot be split evenly.
    """
    if num_hosts < 1 or len(devices) % num_hosts:
        raise UsageError(
            f"--num_hosts={num_hosts}: the {len(devices)} device(s) of this experiment cannot be"
            " split evenly over so many hosts."
        )
    host_of = {device: index * num_hosts // len(devices) for index, device in enumerate(devices)}
    return [HostTopology(host, num_hosts, host_of.__getitem__) for host in range(num_hosts)]


def input_lines(
    config: Config,
    kind: str,
    partitioner: Partitioner,
    places: list[HostTopology],
    num_batches: int,
) -> Iterator[str]:
    """What is to be said of one input.

    Args:
      config: Of the input.
      kind: What it is for: train, eval or decode.
      partitioner: Started.
      places: Of all hosts.
      num_batches: How many batches of it are shown.
    """
    plan = plan_input(config, partitioner, places[0])
    feeding = [feed.processes[0] for feed in plan.feeds]
    inputs = [make_input(config, partitioner, places[host]) for host in feeding]
    yield f"{kind} {dataset_name(config)} ({target_of(config).__qualname__})"
    yield f"  {_reads(inputs[0])}"
    for feed in plan.feeds if len(places) > 1 else ():
        rows = ", ".join(f"{start} to {stop - 1}" for start, stop in feed.rows)
        hosts = "host" if len(feed.processes) == 1 else "hosts"
        yield f"  {hosts} {', '.join(map(str, feed.processes))}: rows {rows} of each batch"
    for number in range(1, num_batches + 1):
        began = time.perf_counter()
        batches = [_next(dataset) for dataset in inputs]
        seconds = time.perf_counter() - began
        if batches[0] is None:
            yield f"  the data end after {number - 1} batch(es)"
            break
        yield from _batch_lines(inputs[0], batches[0], number, seconds)
        yield from _other_hosts(batches, feeding)
    size = len(json.dumps(inputs[0].get_state()))
    yield f"  state: {size:,} bytes, scope {inputs[0].state_scope}"
    skipped = sum(dataset.num_skipped for dataset in inputs)
    if skipped:
        yield f"  {skipped_line(dataset_name(config), skipped)}"
    for dataset in inputs:
        dataset.close()


def _reads(dataset: BaseInput) -> str:
    rows = f"{dataset.global_batch_size} rows a batch"
    if dataset.num_infeed_hosts > 1:
        rows += f", {dataset.local_batch_size} on each host that feeds some"
    if dataset.is_training:
        return f"{rows}; endless"
    if dataset.reset_for_eval:
        return f"{rows}; one epoch each time"
    return f"{rows}; the next {dataset.eval_loop_num_batches} batches each time"


def _next(dataset: BaseInput) -> NestedMap | None:
    with as_usage_error():
        try:
            if dataset.is_training:
                return check_batch(dataset, dataset.get_next())
            return check_batch(dataset, dataset.get_next_padded(), is_padded=True)
        except StopIteration:
            return None


def _batch_lines(
    dataset: BaseInput, batch: NestedMap, number: int, seconds: float
) -> Iterator[str]:
    yield f"  batch {number}, read in {seconds:.3f} s: {summary(batch)}"
    if number == 1:
        yield from (f"    {line}" for line in field_table(batch))
    shown = min(_ROWS_SHOWN, len(real_rows(batch)))
    for row in range(shown):
        yield from (f"    {line}" for line in row_lines(dataset, batch, row))


def _other_hosts(batches: list[NestedMap | None], hosts: list[int]) -> Iterator[str]:
    """A line for each host but the first, and one for those that read what another reads."""
    for position, (host, batch) in enumerate(zip(hosts, batches, strict=True)):
        if position == 0:
            continue
        if batch is None:
            yield f"    host {host}: its data have ended"
            continue
        yield f"    host {host}: {summary(batch)}"
        for earlier, other in zip(hosts[:position], batches, strict=False):
            if other is not None and _same(batch, other):
                yield f"    WARNING: hosts {earlier} and {host} read the same rows"
                break


def _same(batch: NestedMap, other: NestedMap) -> bool:
    """Whether two hosts have the same batch, of which at least a row holds data."""
    if not real_rows(batch).any():
        return False
    ours, theirs = dict(batch.flatten_items()), dict(other.flatten_items())
    return ours.keys() == theirs.keys() and all(
        np.array_equal(ours[path], theirs[path]) for path in ours
    )
