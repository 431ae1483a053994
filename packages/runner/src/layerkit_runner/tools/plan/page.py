"""A plan as one page of text, or as one JSON object."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence

from layerkit_runner.files.byte_sizes import size_text
from layerkit_runner.tools.plan.bounds import Bounds, PipelinePlan
from layerkit_runner.tools.plan.collectives import Traffic
from layerkit_runner.tools.plan.hardware import DeviceKind
from layerkit_runner.tools.plan.memory import Memory, TensorMemory
from layerkit_runner.tools.plan.plan import BatchPlan, Plan
from layerkit_runner.tools.plan.temporaries import TemporaryTensor

_WIDTH = 100
_LARGEST_TENSORS = 6
_LARGEST_TEMPORARIES = 5
_MOST_COLLECTIVES = 8
_SEARCH = "--search compiles other meshes, rematerialisation policies and gradient accumulation"


def plan_json(plan: Plan) -> str:
    """Return the plan as one JSON object on one line; the keys are the attributes of `Plan`."""
    return json.dumps(dataclasses.asdict(plan))


def plan_page(plan: Plan) -> str:
    """The plan for people."""
    return "\n".join(_lines(plan))


def _lines(plan: Plan) -> Iterator[str]:
    yield f"plan of {plan.experiment}"
    yield f"for {_devices(plan)}; layerkit {plan.versions['layerkit']}, jax {plan.versions['jax']}"
    yield from _verdict(plan)
    yield ""
    yield f"parameters   {plan.num_params:,} ({', '.join(plan.param_dtypes)})"
    mesh = " × ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
    yield f"mesh         {mesh} ({plan.partitioner})"
    yield from _batch_lines(plan.batch, plan.num_devices)
    for pipeline in plan.pipelines:
        yield from _pipeline_lines(pipeline)
    yield (
        f"model FLOPs  {plan.flops_per_step:.3e} per step, {plan.flops_per_device:.3e} per device"
    )
    yield ""
    yield from _memory_lines(plan.memory)
    yield ""
    yield from _tensor_lines(plan.tensors)
    if plan.temporaries:
        yield ""
        yield from _temporary_lines(plan.temporaries)
    if plan.bounds is not None:  # there is a program, which was read
        yield ""
        yield from _traffic_lines(plan.collectives)
    if plan.bounds is not None and plan.device is not None:
        yield ""
        yield from _bound_lines(plan.bounds, plan.device, plan.flops_per_device)
    yield ""
    yield from (f"note: {note}" for note in plan.notes)
    yield (
        f"traced in {plan.trace_seconds:.1f} s, compiled in {plan.compile_seconds:.1f} s;"
        " nothing was run or written"
    )


def _devices(plan: Plan) -> str:
    """`h100x256: 256 × NVIDIA H100 80GB HBM3 in 32 slices or nodes`."""
    if plan.device is None or plan.device.platform == "cpu":
        return f"{plan.num_devices} simulated {plan.target} device(s)"
    groups = "nodes" if plan.device.platform == "gpu" else "slices"
    within = f" in {plan.num_slices} {groups}" if plan.num_slices > 1 else ""
    return f"{plan.target}: {plan.num_devices} × {plan.device.device_kind}{within}"


def _verdict(plan: Plan) -> Iterator[str]:
    """Whether it fits, which is what most want to know."""
    device = plan.device
    if plan.fits is None or device is None:
        return
    peak = plan.memory.peak
    if plan.refusal is not None:
        yield f"DOES NOT FIT: {_cut(' '.join(plan.refusal.split()), _WIDTH - 14)}"
    if device.usable_bytes is None or device.memory_bytes is None:
        return
    usable = f"{size_text(device.usable_bytes)} that a program can have"
    if device.reserved_bytes:
        usable += f" of {size_text(device.memory_bytes)}"
    if plan.fits:
        part = 100 * peak / device.usable_bytes
        yield f"fits: {size_text(peak)} on each device, {part:.0f} % of the {usable}"
    elif plan.refusal is None:
        over = size_text(peak - device.usable_bytes)
        yield f"DOES NOT FIT: {size_text(peak)} on each device, {over} more than the {usable}"
    if not plan.fits:
        yield _SEARCH


def _batch_lines(batch: BatchPlan, num_devices: int) -> Iterator[str]:
    over = " × ".join(batch.split_over) or "nothing"
    yield (
        f"batch        {batch.rows_per_device:g} rows per device × {num_devices} = {batch.rows}"
        f" rows; over {over} {batch.num_shards} shard(s) of {batch.rows // batch.num_shards}"
    )
    if batch.parts > 1:
        each = batch.rows // batch.parts
        yield f"             in {batch.parts} parts of {each} rows, gradients added up"
    if batch.tokens is not None:
        yield f"             × {batch.length} positions = {batch.tokens:,} tokens per step"
    yield f"             {_cut(', '.join(batch.fields), _WIDTH - 13)}"


def _pipeline_lines(pipeline: PipelinePlan) -> Iterator[str]:
    around = f", {pipeline.circular_repeats} times around" if pipeline.circular_repeats > 1 else ""
    yield (
        f"pipeline     {pipeline.num_stages} stages, {pipeline.num_microbatches} microbatches of"
        f" {pipeline.rows_per_microbatch} rows{around};"
        f" idle {pipeline.num_stages - 1} of {pipeline.num_ticks} ticks,"
        f" {100 * pipeline.bubble_fraction:.1f} % bubble"
    )


def _memory_lines(memory: Memory) -> Iterator[str]:
    own = memory.outputs - memory.donated
    rows = [
        ("weights", memory.weights, ""),
        ("non-trainable", memory.non_trainable, ""),
        ("averages", memory.averages, ""),
        ("optimizer", memory.optimizer, ""),
        ("batch", memory.batch, ""),
        ("temporaries", memory.temporaries, "gradients, activations, workspace"),
        ("outputs", own, f"besides {size_text(memory.donated)} in place of the old state"),
        ("peak", memory.peak, "inputs that the step reads + temporaries + outputs"),
        ("on the host", memory.host_arguments + memory.host_temporaries, "offloaded, per device"),
    ]
    yield "memory per device"
    for name, size, remark in rows:
        if size:
            yield f"  {name:<14}{size_text(size):>10}  {remark}".rstrip()


def _tensor_lines(tensors: Sequence[TensorMemory]) -> Iterator[str]:
    yield f"largest of {len(tensors)} tensors of state and batch, per device"
    for tensor in tensors[:_LARGEST_TENSORS]:
        size = size_text(tensor.bytes_per_device)
        yield _cut(f"  {size:>10}  {tensor.path}  {_shape_text(tensor)}", _WIDTH)


def _shape_text(tensor: TensorMemory) -> str:
    """Dtype and shape, each dimension divided by what splits it: `float32[18, 3072/fsdp]`."""
    sizes = zip(tensor.shape, tensor.sharding, strict=True)
    return f"{tensor.dtype}[{', '.join('/'.join([str(size), *axes]) for size, axes in sizes)}]"


def _temporary_lines(temporaries: Sequence[TemporaryTensor]) -> Iterator[str]:
    yield "largest results of the step, per device; not all are there at a time"
    for each in temporaries[:_LARGEST_TEMPORARIES]:
        count = f"{each.count} × " if each.count > 1 else ""
        place = " (host)" if each.memory == "host" else ""
        what = f"  {size_text(each.bytes_per_device):>10}  {count}{each.shape}{place}  "
        room = _WIDTH - len(what) - len(each.source) - 2
        yield f"{what}{_cut_left(each.name, max(room, 12))}  {each.source}".rstrip()


def _traffic_lines(collectives: Sequence[Traffic]) -> Iterator[str]:
    if not collectives:
        yield "collectives  none"
        return
    yield "collectives of one step, bytes sent by each device"
    for traffic in collectives[:_MOST_COLLECTIVES]:
        remark = "" if traffic.is_exact else "  (not exact: a loop of unknown length)"
        slow = f"  {size_text(traffic.bytes_slow)} of it slow" if traffic.bytes_slow else ""
        yield (
            f"  {traffic.kind:<19}{traffic.axes:<16}{traffic.executions:>7,} ×"
            f"{size_text(traffic.bytes_sent):>12}{slow}{remark}"
        )
    rest = collectives[_MOST_COLLECTIVES:]
    if rest:
        size = size_text(sum(traffic.bytes_sent for traffic in rest))
        yield f"  {len(rest)} more kinds{size:>45}"


def _bound_lines(bounds: Bounds, device: DeviceKind, model_flops: float) -> Iterator[str]:
    if bounds.step_seconds is None:
        yield (
            f"time         nothing is known of the speed of {device.name}; --target=h100x8 or v5p"
            " tells of devices that are known"
        )
        return
    work, peak = bounds.work, device.peak_flops
    repeated = f"{work.flops / model_flops:.2f} × the model's " if model_flops else ""
    rows = [
        (
            "compute",
            bounds.compute_seconds,
            f"{repeated}FLOPs" + (f" at {peak / 1e12:.4g} TFLOP/s" if peak else ""),
        ),
        ("memory", bounds.memory_seconds, _moved(work.memory_bytes, device.memory_bandwidth)),
        (
            "fast network",
            bounds.fast_network_seconds,
            _moved(work.fast_bytes, device.fast_bandwidth),
        ),
        (
            "slow network",
            bounds.slow_network_seconds,
            _moved(work.slow_bytes, device.slow_bandwidth),
        ),
    ]
    yield "time of a step, at least"
    for name, seconds, what in rows:
        if seconds != 0:
            time = "not known" if seconds is None else seconds_text(seconds)
            mark = "  ← the bound" if name == bounds.limited_by else ""
            yield f"  {name:<14}{time:>10}  {what}{mark}"
    yield _reached(
        "all hidden",
        bounds.step_seconds,
        bounds.tokens_per_sec,
        bounds.mfu,
        "if all communication runs beside arithmetic",
    )
    if bounds.step_seconds_no_overlap != bounds.step_seconds:
        yield _reached(
            "none hidden",
            bounds.step_seconds_no_overlap,
            bounds.tokens_per_sec_no_overlap,
            bounds.mfu_no_overlap,
            "if all of it runs alone",
        )


def _moved(amount: float, rate: float | None) -> str:
    at = "" if rate is None else f" at {size_text(rate)}/s"
    return f"{size_text(amount)}{at}"


def _reached(
    name: str, seconds: float | None, tokens: float | None, mfu: float | None, condition: str
) -> str:
    """What a step comes to at one end of what can be hidden."""
    time = "" if seconds is None else seconds_text(seconds)
    speed = "" if tokens is None else f"{tokens:,.0f} tokens/s, "
    part = "" if mfu is None else f"MFU {100 * mfu:.0f} %, "
    return f"  {name:<14}{time:>10}  {speed}{part}{condition}"


def seconds_text(seconds: float) -> str:
    """`1.23 s`, `45.6 ms`, `7.89 µs`.

    >>> seconds_text(0.0456)
    '45.6 ms'
    """
    for scale, unit in ((1, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _cut_left(text: str, width: int) -> str:
    return text if len(text) <= width else "…" + text[1 - width :]
