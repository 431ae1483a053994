"""Lower bounds of the time of a step, by arithmetic, memory and networks.

Each bound is the work of a device divided by its peak rate (the roofline model: Williams, Waterman
and Patterson, 2009). docs/planning.md has a table of what is counted and what is assumed.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from layerkit.config import target_of, walk_configs
from layerkit.layers.transformer.pipeline import Pipeline
from layerkit.layers.transformer.pipelined_transformer import PipelinedTransformer
from layerkit.ops.pipeline_schedule import PipelineSchedule
from layerkit_runner.tools.plan.collectives import Traffic
from layerkit_runner.tools.plan.hardware import DeviceKind
from layerkit_runner.tools.plan.live_memory import short_name
from layerkit_runner.tools.plan.memory import Memory

_PIPELINES = (Pipeline, PipelinedTransformer)


@dataclasses.dataclass(frozen=True)
class DeviceWork:
    """Matrix products, bytes of memory and bytes sent within and between slices, in a step."""

    flops: float
    memory_bytes: float
    fast_bytes: float
    slow_bytes: float


PASSES = ("forward", "backward", "recomputed")
"""Passes of a step over the layers; rematerialization computes forward products again."""

# The names of layers follow that of the last transformation of the model.
_TRANSFORMED = re.compile(r".*\bjvp\([^()]*\)\)?")
_NUMBER = re.compile(r"(?<=_)\d+$")
# Other names in a scope: wrappers such as vmap(…), products such as `...d,vd->...v`, and classes.
_NO_LAYER = re.compile(r"[()>]|^rematted_computation$|^[A-Z]|^$")


def layer_flops(
    products: Mapping[tuple[str, str], float], device: DeviceKind, *, num_devices: int
) -> dict[str, dict[str, float]]:
    """Return the FLOPs of `step_cost.scoped_flops` on one device, by layer and by pass.

    Those of a narrow dtype are divided by its speedup over bfloat16. Numbered layers, such as
    `layers_0` and `layers_1`, are one: `layers_#`.
    """
    layers: dict[str, dict[str, float]] = {}
    for (scope, dtype), flops in products.items():
        parts = short_name(_TRANSFORMED.sub("", scope)).split("/")
        # A scan in a scan repeats a name in its backward pass.
        names = itertools.groupby(_NUMBER.sub("#", n) for n in parts if not _NO_LAYER.search(n))
        layer = "/".join(name for name, _ in names) or "others"
        at = 2 if "rematted_computation" in scope else int("transpose(" in scope)
        by_pass = layers.setdefault(layer, dict.fromkeys(PASSES, 0.0))
        by_pass[PASSES[at]] += flops / device.speedups.get(dtype, 1) / num_devices
    return layers


def narrow_products(products: Mapping[tuple[str, str], float], device: DeviceKind) -> Iterator[str]:
    """Yield a note for each dtype of products whose peak rate is above that of bfloat16."""
    for dtype in sorted({dtype for _, dtype in products} & {*device.speedups}):
        share = sum(flops for (_, name), flops in products.items() if name == dtype)
        share /= sum(products.values())
        yield (
            f"{share:.0%} of the FLOPs are products of {dtype}, which count 1/"
            f"{device.speedups[dtype]:g} each: that is their time on {device.name}"
        )


RESOURCES = {
    "compute": ("flops", "peak_flops"),
    "memory": ("memory_bytes", "memory_bandwidth"),
    "fast network": ("fast_bytes", "fast_bandwidth"),
    "slow network": ("slow_bytes", "slow_bandwidth"),
}
"""Field of `DeviceWork`, and of `DeviceKind` with its rate, of each resource of a step."""


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Lower bounds of the time of a step. Values that need an unknown rate are None.

    `step_seconds` and `mfu` are for full overlap of compute, memory and networks. Without overlap,
    the networks add to the longer of compute and memory.
    """

    work: DeviceWork
    compute_seconds: float | None
    memory_seconds: float | None
    fast_network_seconds: float | None
    slow_network_seconds: float | None
    limited_by: str | None
    step_seconds: float | None
    step_seconds_no_overlap: float | None
    tokens_per_sec: float | None
    tokens_per_sec_no_overlap: float | None
    mfu: float | None
    mfu_no_overlap: float | None

    @property
    def seconds(self) -> dict[str, float | None]:
        """The bounds by resource, as `RESOURCES` names them."""
        return {name: getattr(self, f"{name.replace(' ', '_')}_seconds") for name in RESOURCES}


def device_work(
    memory: Memory, collectives: Iterable[Traffic], layers: Mapping[str, Mapping[str, float]]
) -> DeviceWork:
    """Return the least work of a device; `layers` are of `layer_flops`, rematerialized ones too."""
    flops = sum(sum(by_pass.values()) for by_pass in layers.values())
    # State and batch are read once, and weights twice more, by both passes; frozen ones once more
    # and not written. Temporaries and received data are written and read once.
    sent = list(collectives)
    total = sum(traffic.bytes_sent for traffic in sent)
    slow = sum(traffic.bytes_slow for traffic in sent)
    # Most received data are temporaries.
    between = 2 * max(memory.temporaries, total)
    trained = memory.weights - memory.frozen_weights
    moved = memory.arguments + memory.outputs + 2 * trained + between
    return DeviceWork(flops, moved, fast_bytes=total - slow, slow_bytes=slow)


def step_bounds(
    work: DeviceWork, device: DeviceKind, *, model_flops_per_device: float, tokens: int | None
) -> Bounds:
    """Return the bounds of a step. MFU counts the model's FLOPs, without rematerialized ones."""
    resources = {
        name: (getattr(work, amount), getattr(device, rate))
        for name, (amount, rate) in RESOURCES.items()
    }
    seconds = {
        name: 0.0 if amount == 0 else None if rate is None else amount / rate
        for name, (amount, rate) in resources.items()
    }
    known = {name: value for name, value in seconds.items() if value is not None}
    # Leaving out a network of unknown rate keeps the step time a lower bound.
    step = no_overlap = limited_by = None
    if seconds["compute"] is not None:
        limited_by = max(known, key=lambda name: known[name])
        step = known[limited_by]
        on_device = max(known["compute"], known.get("memory", 0.0))
        no_overlap = on_device + known.get("fast network", 0) + known.get("slow network", 0)
    peak = device.peak_flops
    share = None if peak is None else model_flops_per_device / peak
    return Bounds(
        work=work,
        compute_seconds=seconds["compute"],
        memory_seconds=seconds["memory"],
        fast_network_seconds=seconds["fast network"],
        slow_network_seconds=seconds["slow network"],
        limited_by=limited_by,
        step_seconds=step,
        step_seconds_no_overlap=no_overlap,
        tokens_per_sec=tokens / step if tokens and step else None,
        tokens_per_sec_no_overlap=tokens / no_overlap if tokens and no_overlap else None,
        mfu=share / step if share is not None and step else None,
        mfu_no_overlap=share / no_overlap if share is not None and no_overlap else None,
    )


@dataclasses.dataclass(frozen=True)
class PipelinePlan:
    """One pipeline of a task, with the schedule of `layerkit.ops.pipeline_schedule`.

    `bubble_fraction` is the part of the ticks in which a stage idles.
    """

    num_stages: int
    num_microbatches: int
    rows_per_microbatch: int
    circular_repeats: int
    num_ticks: int
    bubble_fraction: float


def pipeline_plans(task: Any, *, rows: int) -> list[PipelinePlan]:
    """Return the pipelines of a task's config for the rows of a batch, or of one part of it."""
    pipelines: dict[int, PipelinePlan] = {}  # by the identity of the config, which may be shared
    for config in walk_configs(task):
        target = target_of(config)
        if not isinstance(target, type) or not issubclass(target, _PIPELINES):
            continue
        count = config.num_microbatches or rows // config.microbatch_size
        schedule = PipelineSchedule(config.num_stages, count, config.circular_repeats)
        pipelines[id(config)] = PipelinePlan(
            schedule.num_stages,
            count,
            rows // count,
            schedule.circular_repeats,
            schedule.num_ticks,
            schedule.bubble_fraction,
        )
    return list(pipelines.values())
