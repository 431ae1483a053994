"""`--mode=inspect --inspect=batches`: the first batches of each input, for each host.

No model is built. The inputs of all hosts are built in this process, and the devices are simulated:
as many as the mesh has, or else one for each host.
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
from layerkit_runner.tools.plan.devices import start_simulated

_ROWS_SHOWN = 2


def print_batches(resolved: ResolvedExperiment, options: RunOptions) -> None:
    """Print the first batches of each input of an experiment.

    Raises:
      UsageError: Data cannot be read, or fields or flags do not fit together.
    """
    with as_usage_error():
        partitioner = resolved.partitioner.Instantiate()
    devices = start_simulated(
        partitioner, num_devices=options.num_devices, default=max(1, options.num_hosts)
    )
    hosts = simulated_hosts(devices, options.num_hosts)
    print(
        f"{len(hosts)} host(s) of {len(devices) // len(hosts)} device(s) each are simulated;"
        f" labels of weight 0 are in {UNWEIGHTED.format('brackets')},"
        f" special ids in {SPECIAL.format('these')}"
    )
    kinds = [(c, "train" if c.is_training else "eval") for c in resolved.datasets]
    kinds += [(config, "decode") for config in resolved.decode_datasets]
    for config, kind in kinds:
        print()
        for line in input_lines(config, kind, partitioner, hosts, options.num_batches):
            print(line, flush=True)


def simulated_hosts(devices: list[jax.Device], num_hosts: int) -> list[HostTopology]:
    """Return the topologies of `num_hosts` hosts with equal numbers of consecutive devices.

    Raises:
      UsageError: The devices cannot be split evenly.
    """
    if num_hosts < 1 or len(devices) % num_hosts:
        expected = f"a divisor of the {len(devices)} device(s) of this experiment"
        raise UsageError(field="--num_hosts", value=num_hosts, expected=expected)
    host_of = {device: index * num_hosts // len(devices) for index, device in enumerate(devices)}
    return [HostTopology(host, num_hosts, host_of.__getitem__) for host in range(num_hosts)]


def input_lines(
    config: Config,
    kind: str,
    partitioner: Partitioner,
    hosts: list[HostTopology],
    num_batches: int,
) -> Iterator[str]:
    """Yield the description of an input and of its first batches.

    Args:
      config: Config of the input.
      kind: Purpose of the input: train, eval or decode.
      partitioner: Started partitioner.
      hosts: Topologies of all hosts.
      num_batches: Maximum number of batches.
    """
    plan = plan_input(config, partitioner, hosts[0])
    feeding = [feed.processes[0] for feed in plan.feeds]
    inputs = [make_input(config, partitioner, hosts[host]) for host in feeding]
    first = inputs[0]
    yield f"{kind} {dataset_name(config)} ({target_of(config).__qualname__})"
    yield f"  {_size_text(first)}"
    for feed in plan.feeds if len(hosts) > 1 else ():
        rows = ", ".join(f"{start} to {stop - 1}" for start, stop in feed.rows)
        names = "host" if len(feed.processes) == 1 else "hosts"
        yield f"  {names} {', '.join(map(str, feed.processes))}: rows {rows} of each batch"
    for number in range(1, num_batches + 1):
        began = time.perf_counter()
        batches = [_next_batch(dataset) for dataset in inputs]
        seconds = time.perf_counter() - began
        batch = batches[0]
        if batch is None:
            yield f"  the data end after {number - 1} batch(es)"
            break
        yield f"  batch {number}, read in {seconds:.3f} s: {summary(batch)}"
        if number == 1:
            yield from (f"    {line}" for line in field_table(batch))
        for row in range(min(_ROWS_SHOWN, len(real_rows(batch)))):
            yield from (f"    {line}" for line in row_lines(first, batch, row))
        yield from _other_hosts(batches, feeding)
    yield f"  state: {len(json.dumps(first.get_state())):,} bytes, scope {first.state_scope}"
    if skipped := sum(dataset.num_skipped for dataset in inputs):
        yield f"  {skipped_line(dataset_name(config), skipped)}"
    for dataset in inputs:
        dataset.close()


def _size_text(dataset: BaseInput) -> str:
    rows = f"{dataset.global_batch_size} rows a batch"
    if dataset.num_infeed_hosts > 1:
        rows += f", {dataset.local_batch_size} on each host that feeds some"
    if dataset.is_training:
        return f"{rows}; endless"
    if dataset.reset_for_eval:
        return f"{rows}; one epoch each time"
    return f"{rows}; the next {dataset.eval_loop_num_batches} batches each time"


def _next_batch(dataset: BaseInput) -> NestedMap | None:
    with as_usage_error():
        try:
            if dataset.is_training:
                return check_batch(dataset, dataset.get_next())
            return check_batch(dataset, dataset.get_next_padded(), is_padded=True)
        except StopIteration:
            return None


def _other_hosts(batches: list[NestedMap | None], hosts: list[int]) -> Iterator[str]:
    """Yield a summary for each host but the first, and a warning if two read the same rows."""
    for position, (host, batch) in enumerate(zip(hosts, batches, strict=True)):
        if position == 0:
            continue
        if batch is None:
            yield f"    host {host}: its data have ended"
            continue
        yield f"    host {host}: {summary(batch)}"
        for earlier, other in zip(hosts[:position], batches, strict=False):
            if other is not None and _is_same(batch, other):
                yield f"    WARNING: hosts {earlier} and {host} read the same rows"
                break


def _is_same(batch: NestedMap, other: NestedMap) -> bool:
    """Return whether two batches are equal and a row of them holds data."""
    if not real_rows(batch).any():
        return False
    arrays, others = dict(batch.flatten_items()), dict(other.flatten_items())
    return arrays.keys() == others.keys() and all(
        np.array_equal(array, others[path]) for path, array in arrays.items()
    )
