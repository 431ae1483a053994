"""A plan as one page of text."""

from __future__ import annotations

from collections.abc import Iterator

from layerkit_runner.files.text import cut, seconds_text, size_text
from layerkit_runner.tools.plan.bounds import Bounds
from layerkit_runner.tools.plan.memory import Memory, TensorMemory
from layerkit_runner.tools.plan.plan import BatchPlan, Plan

_WIDTH = 100
_LARGEST_TENSORS = 6
_LARGEST_TEMPORARIES = 5
_MOST_COLLECTIVES = 8
_SEARCH = "--search compiles other meshes, rematerialization policies and gradient accumulation"


def plan_page(plan: Plan) -> str:
    """Return the plan as a page of text."""
    sections = [
        _summary_lines(plan),
        _memory_lines(plan.memory),
        _tensor_lines(plan.tensors),
        _temporary_lines(plan),
        _traffic_lines(plan),
        _bound_lines(plan),
        [
            *(f"note: {note}" for note in plan.notes),
            f"traced in {plan.trace_seconds:.1f} s, compiled in {plan.compile_seconds:.1f} s;"
            " nothing was run or written",
        ],
    ]
    return "\n\n".join(text for lines in sections if (text := "\n".join(lines)))


def _summary_lines(plan: Plan) -> Iterator[str]:
    yield f"plan of {plan.experiment}"
    yield f"for {_devices(plan)}; layerkit {plan.versions['layerkit']}, jax {plan.versions['jax']}"
    yield from _verdict(plan)
    yield ""
    yield f"parameters   {plan.num_params:,} ({', '.join(plan.param_dtypes)})"
    mesh = " × ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
    yield f"mesh         {mesh} ({plan.partitioner})"
    yield from _batch_lines(plan.batch, plan.num_devices)
    for pipeline in plan.pipelines:
        around = (
            f", {pipeline.circular_repeats} times around" if pipeline.circular_repeats > 1 else ""
        )
        yield (
            f"pipeline     {pipeline.num_stages} stages, {pipeline.num_microbatches} microbatches"
            f" of {pipeline.rows_per_microbatch} rows{around};"
            f" idle {pipeline.num_stages - 1} of {pipeline.num_ticks} ticks,"
            f" {100 * pipeline.bubble_fraction:.1f} % bubble"
        )
    yield (
        f"model FLOPs  {plan.flops_per_step:.3e} per step, {plan.flops_per_device:.3e} per device"
    )


def _devices(plan: Plan) -> str:
    """Return text such as `h100x256: 256 × NVIDIA H100 80GB HBM3 in 32 nodes`."""
    if plan.device is None or plan.device.platform == "cpu":
        return f"{plan.num_devices} simulated {plan.target} device(s)"
    groups = "nodes" if plan.device.platform == "gpu" else "slices"
    within = f" in {plan.num_slices} {groups}" if plan.num_slices > 1 else ""
    return f"{plan.target}: {plan.num_devices} × {plan.device.device_kind}{within}"


def _verdict(plan: Plan) -> Iterator[str]:
    device, peak = plan.device, plan.memory.peak
    if plan.fits is None or device is None:
        return
    if plan.refusal is not None:
        yield f"DOES NOT FIT: {cut(' '.join(plan.refusal.split()), _WIDTH - 14)}"
    elif device.usable_bytes is not None and device.memory_bytes is not None:
        usable = f"{size_text(device.usable_bytes)} available to programs"
        if device.reserved_bytes:
            usable += f" of {size_text(device.memory_bytes)}"
        if plan.fits:
            part = 100 * peak / device.usable_bytes
            yield f"fits: {size_text(peak)} on each device, {part:.0f} % of the {usable}"
        else:
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
        rows = batch.rows // batch.parts
        yield f"             in {batch.parts} parts of {rows} rows, gradients added up"
    if batch.tokens is not None:
        yield f"             × {batch.length} positions = {batch.tokens:,} tokens per step"
    yield f"             {cut(', '.join(batch.fields), _WIDTH - 13)}"


def _memory_lines(memory: Memory) -> Iterator[str]:
    new_outputs = memory.outputs - memory.donated
    yield "memory per device"
    for name, size, remark in (
        ("weights", memory.weights, ""),
        ("non-trainable", memory.non_trainable, ""),
        ("averages", memory.averages, ""),
        ("optimizer", memory.optimizer, ""),
        ("batch", memory.batch, ""),
        ("temporaries", memory.temporaries, "gradients, activations, workspace"),
        ("outputs", new_outputs, f"besides {size_text(memory.donated)} in place of the old state"),
        ("peak", memory.peak, "inputs that the step reads + temporaries + outputs"),
        ("on the host", memory.host_arguments + memory.host_temporaries, "offloaded, per device"),
    ):
        if size:
            yield f"  {name:<14}{size_text(size):>10}  {remark}".rstrip()


def _tensor_lines(tensors: list[TensorMemory]) -> Iterator[str]:
    yield f"largest of {len(tensors)} tensors of state and batch, per device"
    for tensor in tensors[:_LARGEST_TENSORS]:
        # Each dimension is divided by what splits it: `float32[18, 3072/fsdp]`.
        sizes = zip(tensor.shape, tensor.sharding, strict=True)
        shape = ", ".join("/".join([str(size), *axes]) for size, axes in sizes)
        size = size_text(tensor.bytes_per_device)
        yield cut(f"  {size:>10}  {tensor.path}  {tensor.dtype}[{shape}]", _WIDTH)


def _temporary_lines(plan: Plan) -> Iterator[str]:
    if plan.temporaries:
        yield "largest results of the step, per device; not all exist at the same time"
    for tensor in plan.temporaries[:_LARGEST_TEMPORARIES]:
        count = f"{tensor.count} × " if tensor.count > 1 else ""
        place = " (host)" if tensor.memory == "host" else ""
        what = f"  {size_text(tensor.bytes_per_device):>10}  {count}{tensor.shape}{place}  "
        room = max(_WIDTH - len(what), 12)
        name = tensor.name if len(tensor.name) <= room else "…" + tensor.name[1 - room :]
        yield f"{what}{name}"


def _traffic_lines(plan: Plan) -> Iterator[str]:
    if plan.bounds is None:  # there is no program to read
        return
    if not plan.collectives:
        yield "collectives  none"
        return
    yield "collectives of one step, bytes sent by each device"
    for traffic in plan.collectives[:_MOST_COLLECTIVES]:
        remark = "" if traffic.is_exact else "  (not exact: branch or unknown loop)"
        slow = f"  {size_text(traffic.bytes_slow)} of it slow" if traffic.bytes_slow else ""
        yield (
            f"  {traffic.kind:<19}{traffic.axes:<16}{traffic.executions:>7,} ×"
            f"{size_text(traffic.bytes_sent):>12}{slow}{remark}"
        )
    if rest := plan.collectives[_MOST_COLLECTIVES:]:
        size = size_text(sum(traffic.bytes_sent for traffic in rest))
        yield f"  {len(rest)} more kinds{size:>45}"


def _bound_lines(plan: Plan) -> Iterator[str]:
    bounds, device = plan.bounds, plan.device
    if bounds is None or device is None:
        return
    if bounds.step_seconds is None:
        yield (
            f"time         the speed of {device.name} is unknown; known are the devices of"
            " --target=h100x8 and others (docs/planning.md)"
        )
        return
    work, peak, model_flops = bounds.work, device.peak_flops, plan.flops_per_device
    flops = f"{work.flops / model_flops:.2f} × the model's FLOPs" if model_flops else "FLOPs"
    flops += f" at {peak / 1e12:.4g} TFLOP/s" if peak else ""
    fast = _moved(work.fast_bytes, device.fast_bandwidth)
    slow = _moved(work.slow_bytes, device.slow_bandwidth)
    yield "lower bounds of the step time"
    for name, seconds, what in (
        ("compute", bounds.compute_seconds, flops),
        ("memory", bounds.memory_seconds, _moved(work.memory_bytes, device.memory_bandwidth)),
        ("fast network", bounds.fast_network_seconds, fast),
        ("slow network", bounds.slow_network_seconds, slow),
    ):
        if seconds != 0:
            time = "not known" if seconds is None else seconds_text(seconds)
            mark = "  ← the bound" if name == bounds.limited_by else ""
            yield f"  {name:<14}{time:>10}  {what}{mark}"
    yield from _ends(bounds)


def _moved(amount: float, rate: float | None) -> str:
    at = "" if rate is None else f" at {size_text(rate)}/s"
    return f"{size_text(amount)}{at}"


def _ends(bounds: Bounds) -> Iterator[str]:
    """Yield the time of a step with all communication hidden, and with none."""
    hidden = (bounds.step_seconds, bounds.tokens_per_sec, bounds.mfu)
    none = (bounds.step_seconds_no_overlap, bounds.tokens_per_sec_no_overlap, bounds.mfu_no_overlap)
    for name, (seconds, tokens, mfu), condition in (
        ("full overlap", hidden, "if all communication overlaps with compute"),
        ("no overlap", none, "if no communication overlaps with compute"),
    ):
        if seconds is None or (name == "no overlap" and seconds == bounds.step_seconds):
            continue
        speed = "" if tokens is None else f"{tokens:,.0f} tokens/s, "
        part = "" if mfu is None else f"MFU {100 * mfu:.0f} %, "
        yield f"  {name:<14}{seconds_text(seconds):>10}  {speed}{part}{condition}"
