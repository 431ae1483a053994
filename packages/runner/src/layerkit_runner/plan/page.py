"""A plan as one page of text, or as one JSON object."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

from layerkit_runner.byte_sizes import size_text
from layerkit_runner.plan.collectives import Traffic
from layerkit_runner.plan.memory import Memory, TensorMemory
from layerkit_runner.plan.plan import BatchPlan, Plan

_LARGEST = 10


def plan_json(plan: Plan) -> str:
    """The plan as one JSON object on one line; the keys are the attributes of `Plan`."""
    return json.dumps(dataclasses.asdict(plan))


def plan_page(plan: Plan) -> str:
    """The plan for people."""
    return "\n".join(_lines(plan))


def _lines(plan: Plan) -> Iterator[str]:
    mesh = " × ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
    yield f"plan of {plan.experiment}"
    yield (
        f"for {plan.num_devices} simulated {plan.target} device(s), layerkit"
        f" {plan.versions['layerkit']}, jax {plan.versions['jax']}"
    )
    yield ""
    yield f"parameters   {plan.num_params:,} ({', '.join(plan.param_dtypes)})"
    yield f"mesh         {mesh} ({plan.partitioner})"
    yield from _batch_lines(plan.batch, plan.num_devices)
    yield (
        f"model FLOPs  {plan.flops_per_step:.3e} per step, {plan.flops_per_device:.3e} per device"
    )
    yield ""
    yield from _memory_lines(plan.memory)
    yield ""
    yield from _tensor_lines(plan.tensors)
    yield ""
    yield from _traffic_lines(plan.collectives)
    yield ""
    yield from (f"note: {note}" for note in plan.notes)
    yield (
        f"traced in {plan.trace_seconds:.1f} s, compiled in {plan.compile_seconds:.1f} s;"
        " nothing was run or written"
    )


def _batch_lines(batch: BatchPlan, num_devices: int) -> Iterator[str]:
    over = " × ".join(batch.split_over) or "nothing"
    yield (
        f"batch        {batch.rows_per_device:g} rows per device × {num_devices} = {batch.rows}"
        f" rows; over {over} {batch.num_shards} shard(s) of {batch.rows // batch.num_shards}"
    )
    if batch.tokens is not None:
        yield f"             × {batch.length} positions = {batch.tokens:,} tokens per step"
    yield f"             {', '.join(batch.fields)}"


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
    ]
    yield "memory per device"
    for name, size, remark in rows:
        yield f"  {name:<14}{size_text(size):>10}  {remark}".rstrip()


def _tensor_lines(tensors: list[TensorMemory]) -> Iterator[str]:
    shown = tensors[:_LARGEST]
    yield f"largest of {len(tensors)} tensors, per device"
    for tensor in shown:
        yield f"  {size_text(tensor.bytes_per_device):>10}  {tensor.path}  {_shape_text(tensor)}"


def _shape_text(tensor: TensorMemory) -> str:
    """Dtype and shape, each dimension divided by what splits it: `float32[18, 3072/fsdp]`."""
    sizes = zip(tensor.shape, tensor.sharding, strict=True)
    return f"{tensor.dtype}[{', '.join('/'.join([str(size), *axes]) for size, axes in sizes)}]"


def _traffic_lines(collectives: list[Traffic]) -> Iterator[str]:
    if not collectives:
        yield "collectives  none"
        return
    yield "collectives of one step, bytes sent by each device"
    for traffic in collectives:
        remark = "" if traffic.is_exact else "  (not exact: a loop of unknown length)"
        yield (
            f"  {traffic.kind:<19}{traffic.axes:<16}{traffic.executions:>7,} ×"
            f"{size_text(traffic.bytes_sent):>12}{remark}"
        )
