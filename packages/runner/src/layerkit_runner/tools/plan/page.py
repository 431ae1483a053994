"""A plan as one page of text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from layerkit_runner.files.text import color_text, draw_table, seconds_text, size_text
from layerkit_runner.tools.pages.shards import dimension_names
from layerkit_runner.tools.plan.bounds import RESOURCES
from layerkit_runner.tools.plan.memory import KINDS, TensorMemory
from layerkit_runner.tools.plan.plan import Plan

_REFUSAL_CHARACTERS = 86
_LARGEST_TENSORS = 6
_LARGEST_TEMPORARIES = 5
_MOST_COLLECTIVES = 8
_SEARCH = "--search compiles other meshes, rematerialization policies and gradient accumulation"


def plan_page(plan: Plan) -> str:
    """Return the plan as a page of text."""
    traced, compiled = f"{plan.trace_seconds:.1f} s", f"{plan.compile_seconds:.1f} s"
    sections = [
        [
            f"plan of {plan.experiment}",
            f"for {devices_text(plan)}",
            *(color_text(line, "green" if plan.fits else "red") for line in verdict(plan)),
            *([_SEARCH] if plan.fits is False else []),
        ],
        draw_table(summary_rows(plan)),
        draw_table(
            _stage_rows(plan),
            title="stages; the rest of the page is of the step with the largest memory",
            right=[1, 2, 3, 4, 5],
        ),
        draw_table(memory_rows(plan), title="memory per device", right=[1]),
        draw_table(
            _tensor_rows(plan),
            title=f"largest of {len(plan.tensors)} tensors of state and batch, per device",
            right=[0],
        ),
        draw_table(
            _temporary_rows(plan),
            title="largest of the temporaries at the peak, per device, estimated from the schedule",
            right=[0],
        ),
        draw_table(
            _traffic_rows(plan),
            title="collectives of one step, bytes sent by each device",
            right=[2],
        ),
        draw_table(bound_rows(plan), title="lower bounds of the step time", right=[1]),
        [
            *(f"note: {note}" for note in plan.notes),
            f"traced in {traced}, compiled in {compiled}; nothing was run",
        ],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def devices_text(plan: Plan) -> str:
    """Return text such as `h100x256: 256 × NVIDIA H100 80GB HBM3 in 32 nodes; layerkit …`."""
    versions = f"; layerkit {plan.versions['layerkit']}, jax {plan.versions['jax']}"
    if plan.device is None or plan.device.platform == "cpu":
        return f"{plan.num_devices} simulated {plan.target} device(s){versions}"
    groups = "nodes" if plan.device.platform == "gpu" else "slices"
    within = f" in {plan.num_slices} {groups}" if plan.num_slices > 1 else ""
    return f"{plan.target}: {plan.num_devices} × {plan.device.device_kind}{within}{versions}"


def verdict(plan: Plan) -> Iterator[str]:
    """Yield whether a plan fits the memory of its devices, if that is known."""
    device, peak = plan.device, size_text(plan.memory.peak)
    if plan.refusal is not None:
        refusal = textwrap.shorten(plan.refusal, _REFUSAL_CHARACTERS, placeholder="…")
        yield f"DOES NOT FIT: {refusal}"
        return
    if plan.fits is None or device is None or device.usable_bytes is None:
        return
    usable = f"{size_text(device.usable_bytes)} available to programs"
    if plan.fits and plan.memory.peak > device.usable_bytes:
        # The compiler of TPUs reports activations in host memory as memory of the device.
        yield f"fits by the compiler: {peak} on each device and in host memory, {usable}"
    elif plan.fits:
        part = 100 * plan.memory.peak / device.usable_bytes
        yield f"fits: {peak} on each device, {part:.0f} % of the {usable}"
    else:
        over = size_text(plan.memory.peak - device.usable_bytes)
        yield f"DOES NOT FIT: {peak} on each device, {over} more than the {usable}"


def summary_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield names and texts about model, mesh and batch; a row without a name continues one."""
    batch = plan.batch
    yield "parameters", f"{plan.num_params:,} ({', '.join(plan.param_dtypes)})"
    mesh = " × ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
    yield "mesh", f"{mesh} ({plan.partitioner})"
    over = " × ".join(batch.split_over) or "nothing"
    yield (
        "batch",
        f"{batch.rows_per_device:g} rows per device × {plan.num_devices} = {batch.rows} rows;"
        f" over {over} {batch.num_shards} shard(s) of {batch.rows // batch.num_shards}",
    )
    if batch.parts > 1:
        yield "", f"in {batch.parts} parts of {batch.rows // batch.parts} rows, gradients added up"
    if batch.tokens is not None:
        yield "", f"× {batch.length} positions = {batch.tokens:,} tokens per step"
    yield "", ", ".join(batch.fields)
    for pipeline in plan.pipelines:
        repeats = pipeline.circular_repeats
        around = f", {repeats} times around" if repeats > 1 else ""
        yield (
            "pipeline",
            f"{pipeline.num_stages} stages, {pipeline.num_microbatches} microbatches of"
            f" {pipeline.rows_per_microbatch} rows{around}; idle {pipeline.num_stages - 1} of"
            f" {pipeline.num_ticks} ticks, {100 * pipeline.bubble_fraction:.1f} % bubble",
        )
    per_device = f"{plan.flops_per_device:.3e} per device"
    yield "model FLOPs", f"{plan.flops_per_step:.3e} per step, {per_device}"


def memory_sizes(plan: Plan) -> dict[str, int]:
    """Return bytes of a device by kind."""
    memory = plan.memory
    sizes = {kind: getattr(memory, kind.replace("-", "_")) for kind in KINDS}
    outputs = memory.outputs - memory.donated
    return {**sizes, "temporaries": memory.temporaries, "outputs": outputs}


def memory_rows(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Yield names, sizes and remarks about the memory of a device."""
    memory = plan.memory
    remarks = {
        "temporaries": "gradients, activations, workspace",
        "outputs": f"besides {size_text(memory.donated)} in place of the old state",
        "peak": "inputs that the step reads + temporaries + outputs",
        "on the host": "offloaded, per device",
    }
    host = memory.host_arguments + memory.host_temporaries
    sizes = {**memory_sizes(plan), "peak": memory.peak, "on the host": host}
    for name, size in sizes.items():
        if size:
            yield name, size_text(size), remarks.get(name, "")


def _stage_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    if plan.stages:
        yield "", "steps", "batch", "tokens", "memory", "time at least"
    for index, stage in enumerate(plan.stages):
        yield (
            f"stage {index + 1}",
            f"{stage.last_step - stage.steps + 1:,} → {stage.last_step:,}",
            f"{stage.batch:,}" + ("" if stage.length is None else f" × {stage.length:,}"),
            "" if stage.tokens is None else f"{stage.tokens:,}",
            size_text(stage.peak) + (" DOES NOT FIT" if stage.fits is False else ""),
            "unknown" if stage.seconds is None else seconds_text(stage.seconds),
        )


def _tensor_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    for tensor in plan.tensors[:_LARGEST_TENSORS]:
        yield size_text(tensor.bytes_per_device), f"{tensor.path}  {array_text(tensor)}"


def array_text(tensor: TensorMemory) -> str:
    """Return text such as `float32[18, 3072/fsdp]`, with the mesh axes that split a dimension."""
    return f"{tensor.dtype}[{', '.join(dimension_names(tensor.shape, tensor.sharding))}]"


def _temporary_rows(plan: Plan) -> Iterator[tuple[str, str, str]]:
    for tensor in plan.live.largest[:_LARGEST_TEMPORARIES] if plan.live else ():
        count = f"{tensor.count} × " if tensor.count > 1 else ""
        yield size_text(tensor.bytes_per_device), f"{count}{tensor.shape}", tensor.name


def _traffic_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    for traffic in plan.collectives[:_MOST_COLLECTIVES]:
        remark = "" if traffic.is_exact else "(not exact: branch or unknown loop)"
        slow = f"{size_text(traffic.bytes_slow)} of it slow" if traffic.bytes_slow else ""
        executions, sent = f"{traffic.executions:,} ×", size_text(traffic.bytes_sent)
        yield traffic.kind, traffic.axes, executions, sent, slow, remark
    if rest := plan.collectives[_MOST_COLLECTIVES:]:
        size = size_text(sum(traffic.bytes_sent for traffic in rest))
        yield f"{len(rest)} more kinds", "", "", size, "", ""


def bound_rows(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Yield names, times and remarks about the lower bounds of the step time."""
    bounds, device = plan.bounds, plan.device
    if bounds is None or device is None:
        return
    if bounds.step_seconds is None:
        yield "unknown", "", f"the speed of {device.name}; docs/planning.md lists known devices"
        return
    work, peak, model_flops = bounds.work, device.peak_flops, plan.flops_per_device
    flops = f"{work.flops / model_flops:.2f} × the model's FLOPs" if model_flops else "FLOPs"
    flops += f" at {peak / 1e12:.4g} TFLOP/s" if peak else ""
    for name, (amount, rate) in RESOURCES.items():
        seconds, moved = bounds.seconds[name], _moved(getattr(work, amount), getattr(device, rate))
        what = flops if name == "compute" else moved
        if seconds != 0:
            mark = "  ← the bound" if name == bounds.limited_by else ""
            yield name, "not known" if seconds is None else seconds_text(seconds), f"{what}{mark}"
    hidden = (bounds.step_seconds, bounds.tokens_per_sec, bounds.mfu)
    none = (bounds.step_seconds_no_overlap, bounds.tokens_per_sec_no_overlap, bounds.mfu_no_overlap)
    for name, (seconds, tokens, mfu), condition in (
        ("full overlap", hidden, "if all communication overlaps with compute"),
        ("no overlap", none, "if no communication overlaps with compute"),
    ):
        if seconds is not None and (name == "full overlap" or none[0] != hidden[0]):
            speed = "" if tokens is None else f"{tokens:,.0f} tokens/s, "
            part = "" if mfu is None else f"MFU {100 * mfu:.0f} %, "
            yield name, seconds_text(seconds), f"{speed}{part}{condition}"


def _moved(amount: float, rate: float | None) -> str:
    return size_text(amount) + ("" if rate is None else f" at {size_text(rate)}/s")
