"""Makes a plan: compiles the true training step for devices that need not be here, and measures it.

The step is the one that training runs, lowered from shapes: no weight is made and nothing is run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from layerkit_runner.configuration.resolve import ResolvedExperiment
from layerkit_runner.errors import UsageError
from layerkit_runner.feeds.infeed import make_input, training_config
from layerkit_runner.job import build_parts, versions
from layerkit_runner.modes.start_report import LayerNotes, num_params
from layerkit_runner.partitioning import Partitioner
from layerkit_runner.plan.collectives import Traffic, collective_traffic
from layerkit_runner.plan.memory import Memory, TensorMemory, step_memory, tensor_memory
from layerkit_runner.steps.step_flops import model_flops_per_step
from layerkit_runner.task import SingleTask

# Changes what code LLVM makes of the program, which nobody will run, and not the program itself.
_COMPILER_OPTIONS = {"xla_backend_optimization_level": 0}


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """How a batch is put together.

    Attributes:
      rows: Of the global batch.
      rows_per_device: rows / number of devices; a fraction where devices share rows.
      num_shards: Into how many parts the rows are split.
      split_over: The mesh axes that split them.
      length: Positions of a row; None where the batch has no `ids` `[batch, length]`.
      tokens: rows × length.
      fields: Dtype and global shape by name, such as `int32[32, 1024]`.
    """

    rows: int
    rows_per_device: float
    num_shards: int
    split_over: list[str]
    length: int | None
    tokens: int | None
    fields: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A training step on paper. All bytes are per device; the JSON form has these very keys.

    Attributes:
      experiment: Its full name.
      target: Kind of devices, `cpu`.
      num_devices: How many.
      versions: Of the packages that decide the numbers.
      partitioner: Its class.
      mesh: Size of each mesh axis.
      num_params: Trained scalars.
      param_dtypes: Of the weights.
      batch: How a batch is put together.
      flops_per_step: Model FLOPs of all devices (`layerkit_runner.steps.flops`), without what
        rematerialisation repeats.
      flops_per_device: The same, divided by the devices.
      memory: Bytes by kind.
      tensors: All tensors of state and batch, largest first.
      collectives: What devices send to one another in one step.
      notes: What layers said while they were traced, and what to know about the numbers.
      trace_seconds: Time that tracing and lowering took here.
      compile_seconds: Time that compiling took here.
    """

    experiment: str
    target: str
    num_devices: int
    versions: dict[str, str]
    partitioner: str
    mesh: dict[str, int]
    num_params: int
    param_dtypes: list[str]
    batch: BatchPlan
    flops_per_step: float
    flops_per_device: float
    memory: Memory
    tensors: list[TensorMemory]
    collectives: list[Traffic]
    notes: list[str]
    trace_seconds: float
    compile_seconds: float


def make_plan(
    resolved: ResolvedExperiment,
    devices: Sequence[jax.Device],
    *,
    parts: tuple[Partitioner, SingleTask] | None = None,
) -> Plan:
    """Compiles the training step of an experiment for `devices` and measures it.

    Args:
      resolved: The experiment.
      devices: What to compile for; they need not be able to run the step.
      parts: Partitioner and task, where they are built already; consumed.

    Raises:
      UsageError: fields that do not fit together, sizes that cannot be split over the mesh.
    """
    partitioner, task = build_parts(resolved) if parts is None else parts
    begun = time.perf_counter()
    try:
        partitioner.start(devices)
        partitioner.bind(task)
        with contextlib.closing(make_input(training_config(resolved), partitioner)) as train_input:
            host_batch = train_input.peek()
        state, batch = partitioner.abstract_state(task), partitioner.abstract_batch(host_batch)
        with LayerNotes() as notes:
            lowered = partitioner.train_step_fn(task).lower(state, batch)
        batch_plan = _plan_batch(batch, partitioner)
        flops = model_flops_per_step(resolved, host_batch, batch_plan.rows)
    except ValueError as error:
        raise UsageError(f"{resolved.name}: {error}") from error
    traced = time.perf_counter()
    compiled = lowered.compile(compiler_options=_COMPILER_OPTIONS)
    compiled_at = time.perf_counter()
    hlo_text = compiled.as_text()
    mesh = dict(partitioner.mesh.shape)
    tensors = tensor_memory(state, batch, stored=partitioner.abstract_stored_state(task))
    padded = partitioner.padding_text(task)
    return Plan(
        experiment=resolved.name,
        target=devices[0].platform,
        num_devices=len(devices),
        versions=versions(),
        partitioner=type(partitioner).__name__,
        mesh=mesh,
        num_params=num_params(partitioner.abstract_stored_state(task)),
        param_dtypes=sorted({leaf.dtype.name for leaf in jax.tree.leaves(state.params)}),
        batch=batch_plan,
        flops_per_step=flops,
        flops_per_device=flops / len(devices),
        memory=step_memory(tensors, compiled),
        tensors=tensors,
        collectives=collective_traffic(hlo_text, mesh),
        notes=[
            *([f"padded: {padded}"] if padded else []),
            *notes.lines,
            *_cpu_notes(lowered.as_text(), hlo_text),
        ],
        trace_seconds=traced - begun,
        compile_seconds=compiled_at - traced,
    )


def _plan_batch(batch: Any, partitioner: Partitioner) -> BatchPlan:
    rows = next(iter(batch.values())).shape[0]
    length = batch.ids.shape[1] if "ids" in batch else None
    return BatchPlan(
        rows=rows,
        rows_per_device=rows / partitioner.mesh.size,
        num_shards=partitioner.num_batch_shards(),
        split_over=list(partitioner.batch_axes()),
        length=length,
        tokens=None if length is None else rows * length,
        fields={
            path: f"{leaf.dtype.name}[{', '.join(map(str, leaf.shape))}]"
            for path, leaf in batch.flatten_items()
        },
    )


def _cpu_notes(lowered_text: str, hlo_text: str) -> Iterator[str]:
    """What an accelerator would do differently with this step."""
    if "all-reduce(" in hlo_text:
        yield (
            "compiled for CPU, where XLA adds up gradients by all-reduce; on accelerators it uses"
            " reduce-scatter where they are sharded, half of the bytes"
        )
    if "bf16[" in hlo_text:
        yield (
            "compiled for CPU, where XLA computes bfloat16 in float32; temporaries and traffic of"
            " bfloat16 values are up to twice those of an accelerator"
        )
    # What jax.checkpoint puts around a recomputation that is not in a loop of its own.
    if "optimization_barrier" in lowered_text:
        yield (
            "compiled for CPU, where XLA undoes rematerialisation outside of repeated layers;"
            " temporaries are as if everything were kept, which an accelerator would not do"
        )
