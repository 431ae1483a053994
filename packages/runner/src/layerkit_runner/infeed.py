"""Builds inputs for this process: which rows it feeds follows from how the batch is sharded."""

from __future__ import annotations

import jax

from layerkit.config import Config, target_of
from layerkit_inputs.base_input import BaseInput
from layerkit_inputs.feeds import FeedPlan, plan_feeds
from layerkit_runner.errors import UsageError
from layerkit_runner.partitioning import Partitioner
from layerkit_runner.resolve import ResolvedExperiment


def training_config(resolved: ResolvedExperiment) -> Config:
    """The config of the input to train on.

    Raises:
      UsageError: there is not exactly one.
    """
    training = [config for config in resolved.datasets if config.is_training]
    if len(training) != 1:
        raise UsageError(
            f"{resolved.name}.datasets() must hold one input with is_training=True to train on,"
            f" not {len(training)}"
        )
    return training[0]


def make_input(config: Config, partitioner: Partitioner) -> BaseInput:
    """Builds an input with the batch size and the place of this process filled in.

    Args:
      config: Of an input that sets `batch_size` (rows on each host) or `percore_batch_size` (rows
        per device, a fraction where several devices share a row).
      partitioner: Started.

    Raises:
      UsageError: the batch cannot be spread evenly over the devices, or the input refuses its
      fields.
    """
    name = dataset_name(config)
    filled = config.clone()
    percore = filled.percore_batch_size
    if percore is not None:
        if filled.batch_size is not None:
            raise UsageError(
                f"{name}: set batch_size or percore_batch_size, not both"
                f" ({filled.batch_size} and {percore})"
            )
        rows = percore * partitioner.mesh.size
        if abs(rows - round(rows)) > 1e-6:  # 0.1 × 30 is not 3 in binary
            raise UsageError(
                f"{name}: percore_batch_size={percore} on {partitioner.mesh.size} devices is a"
                f" global batch of {rows:g} rows, which is no whole number"
            )
        global_rows = round(rows)
    elif filled.batch_size is not None:
        global_rows = filled.batch_size * jax.process_count()
    else:
        raise UsageError(f"{name}: set batch_size or percore_batch_size")
    partitioner.check_batch_size(global_rows, source=name)
    plan = feed_plan(global_rows, partitioner)
    if filled.batch_padding_size > 0 and not filled.is_training:
        padded_rows = (plan.batch_size + filled.batch_padding_size) * plan.num_infeed_hosts
        padding = f"{name} with batch_padding_size={filled.batch_padding_size}"
        partitioner.check_batch_size(padded_rows, source=padding)
    filled.set(
        batch_size=plan.batch_size,
        num_infeed_hosts=plan.num_infeed_hosts,
        infeed_host_index=plan.infeed_host_index(jax.process_index()),
    )
    try:
        return filled.Instantiate()
    except ValueError as error:
        raise UsageError(str(error)) from error


def feed_plan(global_rows: int, partitioner: Partitioner) -> FeedPlan:
    """Which process feeds which rows of a global batch."""
    held: dict[int, list[tuple[int, int]]] = {}
    shape = (global_rows,)
    device: jax.Device
    for device, (rows,) in partitioner.batch_sharding().devices_indices_map(shape).items():
        start, stop, _ = rows.indices(global_rows)
        held.setdefault(device.process_index, []).append((start, stop))
    return plan_feeds(held)


def dataset_name(config: Config) -> str:
    """What a data set is called in outputs: its `name`, else its class."""
    return config.name or target_of(config).__name__
