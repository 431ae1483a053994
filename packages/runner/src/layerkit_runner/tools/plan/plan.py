"""Compilation of an experiment's training step for devices that this machine need not have.

The step is the one that training runs, lowered from shapes. No weight is made and nothing is run.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from layerkit.config import Config
from layerkit_runner.config.requests import ResolvedExperiment
from layerkit_runner.config.stages import StageSteps
from layerkit_runner.data.host_inputs import HostTopology, example_batch, plan_input
from layerkit_runner.data.staged_inputs import stage_batch, stage_rows
from layerkit_runner.data.train_inputs import run_stages, training_configs
from layerkit_runner.errors import UsageError, as_usage_error
from layerkit_runner.partitioning import Partitioner, PmapPartitioner
from layerkit_runner.run.job import build_parts, versions
from layerkit_runner.run.start_report import layer_notes, num_params
from layerkit_runner.step.step_cost import model_flops_per_step, scoped_flops
from layerkit_runner.step.task import SingleTask
from layerkit_runner.step.train_state import batch_spec
from layerkit_runner.tools.plan.bounds import (
    Bounds,
    PipelinePlan,
    device_work,
    layer_flops,
    narrow_products,
    pipeline_plans,
    step_bounds,
)
from layerkit_runner.tools.plan.collectives import Traffic, collective_traffic
from layerkit_runner.tools.plan.compiling import (
    compile_step,
    compiler_notes,
    offloads_activations,
    tracing_for,
)
from layerkit_runner.tools.plan.hardware import HERE, DeviceKind, Target
from layerkit_runner.tools.plan.live_memory import LiveMemory, live_memory
from layerkit_runner.tools.plan.memory import (
    Memory,
    TensorMemory,
    num_bytes,
    step_memory,
    tensor_memory,
)
from layerkit_runner.tools.plan.targets import described_kind

_ABSENT_HOST_NOTE = (
    "JAX places no arrays of absent GPUs in host memory, so the optimizer's state counts as device"
    " memory here"
)


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """The layout of a batch, in `parts` under gradient accumulation; fields have global shapes."""

    rows: int
    rows_per_device: float
    num_shards: int
    split_over: list[str]
    length: int | None
    tokens: int | None
    fields: dict[str, str]
    parts: int = 1


@dataclasses.dataclass(frozen=True)
class Placement:
    """The number, host and slice (or node) of each device, in row-major order of the mesh."""

    devices: list[int]
    hosts: list[int]
    slices: list[int]


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """A stage of a run: its steps, its batches of all devices, and a device's memory.

    `tokens` are those of all steps. `seconds` is a lower bound of their time; None if the speed of
    the devices is unknown.
    """

    steps: int
    last_step: int
    batch: int
    length: int | None
    tokens: int | None
    seconds: float | None
    peak: int
    fits: bool | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """A compiled training step. All bytes are per device. The JSON form has these keys.

    `flops_per_step` are the model's, without those that rematerialization repeats. `fits` is None
    if the memory of the device is unknown. A step that is too large has a `refusal` of the
    compiler, and no outputs, collectives, `bounds` and `live`. `layers` are the FLOPs of `bounds`
    by layer and pass, those of narrow dtypes divided by the `speedups` of the device. `dataset` is
    the planned one of several, and of `stages` the one with the largest memory is planned; `fits`
    is that of all.
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
    placement: Placement
    layers: dict[str, dict[str, float]]
    device: DeviceKind | None = None
    num_slices: int = 1
    fits: bool | None = None
    refusal: str | None = None
    bounds: Bounds | None = None
    live: LiveMemory | None = None
    pipelines: list[PipelinePlan] = dataclasses.field(default_factory=list)
    dataset: str | None = None
    stages: list[StagePlan] = dataclasses.field(default_factory=list)


class StateTooLargeError(UsageError):
    """Weights and optimizer state alone exceed the memory of a device."""


def make_plan(
    resolved: ResolvedExperiment,
    devices: Sequence[jax.Device],
    *,
    parts: tuple[Partitioner, SingleTask] | None = None,
    target: Target | None = None,
    check_state: bool = False,
) -> Plan:
    """Compile the training step of an experiment for `devices` and measure it.

    Each of several data sets that are trained round-robin has its own step. The plan is of the one
    with the largest batch, and a note names it.

    Args:
      resolved: The experiment.
      devices: Devices to compile for; they need not be able to run the step.
      parts: Partitioner and task if they are built already; they cannot be used again.
      target: Target that the devices represent; None for the devices themselves.
      check_state: Whether to raise `StateTooLargeError` before compilation.
    """
    partitioner, task = build_parts(resolved) if parts is None else parts
    target = Target(None) if target is None else target
    device = described_kind(target, devices)
    plan_step = functools.partial(_plan_step, resolved, devices, partitioner, task, target, device)
    with as_usage_error(ValueError):
        partitioner.start(devices)
        partitioner.bind(task)
        configs = training_configs(resolved)
        batches = {name: abstract_batch(config, partitioner) for name, config in configs.items()}
        largest = max(batches, key=lambda name: num_bytes(batches[name]))
        if check_state and device.usable_bytes is not None:
            tensors = tensor_memory(partitioner.abstract_state(task), {})
            held = [tensor for tensor in tensors if tensor.memory == "device"]
            if sum(tensor.bytes_per_device for tensor in held) > device.usable_bytes:
                raise StateTooLargeError("weights and optimizer state alone exceed the memory")
        if stages := run_stages(resolved):
            length = stages[0].row_length or 1
            rows = stage_rows(configs[largest], stages, partitioner, _place(partitioner))
            # Stages of one shape have one program.
            shapes = {
                (r.batch, r.length): stage_batch(batches[largest], r, length=length) for r in rows
            }
            plans = {shape: plan_step(batch) for shape, batch in shapes.items()}
            return _join_stages(stages, [plans[r.batch, r.length] for r in rows])
        plan = plan_step(batches[largest])
    if len(batches) == 1:
        return plan
    others = ", ".join(name for name in batches if name != largest)
    note = f"the step on {largest}, which has the largest batch; that on {others} is not compiled"
    return dataclasses.replace(plan, dataset=largest, notes=[note, *plan.notes])


def _plan_step(
    resolved: ResolvedExperiment,
    devices: Sequence[jax.Device],
    partitioner: Partitioner,
    task: SingleTask,
    target: Target,
    device: DeviceKind,
    batch: Any,
) -> Plan:
    begun = time.perf_counter()
    state = partitioner.abstract_state(task)
    with layer_notes() as notes, tracing_for(devices[0]):
        program = partitioner.train_step_fn(task).trace(state, batch)
        lowered = program.lower()
    batch_plan = _plan_batch(batch, partitioner, parts=task.train.gradient_accumulation_steps)
    stored = partitioner.abstract_stored_state(task)
    flops = model_flops_per_step(resolved.task, stored, batch, batch_plan.rows)
    traced = time.perf_counter()
    tensors = tensor_memory(state, batch, stored=stored)
    is_here, platform = target.kind is None, device.platform
    step = compile_step(lowered, platform=platform, is_here=is_here)
    trained, usable = task.train.learner.trained_weights, device.usable_bytes
    memory = step_memory(tensors, step, trained=trained.select(state.params))
    compiled = time.perf_counter()
    fits = None if usable is None else memory.peak <= usable
    if platform == "tpu" or step.refusal is not None:
        fits = step.refusal is None  # the compiler decides
    mesh, slices = dict(partitioner.mesh.shape), _slices(partitioner.mesh, target)
    collectives = collective_traffic(step.hlo_text, mesh, slices=slices)
    products = scoped_flops(program.jaxpr)
    layers = layer_flops(products, device, num_devices=len(devices))
    work = device_work(memory, collectives, layers)
    bounds = step_bounds(
        work, device, model_flops_per_device=flops / len(devices), tokens=batch_plan.tokens
    )
    padded = partitioner.padding_text(task)
    offloads_state = getattr(partitioner, "offload_optimizer_state", False)
    # Under pmap a program has the rows of one device.
    is_pmap = isinstance(partitioner, PmapPartitioner)
    num_programs = batch_plan.parts * (batch_plan.num_shards if is_pmap else 1)
    return Plan(
        experiment=resolved.name,
        target=target.describe() if target.kind else f"{HERE} ({device.name})",
        num_devices=len(devices),
        versions=versions(),
        partitioner=type(partitioner).__name__,
        mesh=mesh,
        num_params=num_params(stored.params),
        param_dtypes=sorted({leaf.dtype.name for leaf in jax.tree.leaves(state.params)}),
        batch=batch_plan,
        flops_per_step=flops,
        flops_per_device=flops / len(devices),
        memory=memory,
        tensors=tensors,
        collectives=collectives,
        notes=[
            *([f"padded: {padded}"] if padded else []),
            *notes,
            *narrow_products(products, device),
            *([_ABSENT_HOST_NOTE] if offloads_state and platform == "gpu" and not is_here else []),
            *compiler_notes(
                step,
                platform=platform,
                is_here=is_here,
                offloads=offloads_activations(resolved.task),
            ),
        ],
        trace_seconds=traced - begun,
        compile_seconds=compiled - traced,
        placement=Placement(
            [device.id for device in partitioner.mesh.devices.flat],
            [device.process_index for device in partitioner.mesh.devices.flat],
            slices,
        ),
        layers=layers,
        device=device,
        num_slices=len(set(slices)),
        fits=fits,
        refusal=step.refusal,
        bounds=bounds if step.hlo_text else None,
        live=live_memory(step.hlo_text),
        pipelines=pipeline_plans(resolved.task, rows=batch_plan.rows // num_programs),
    )


def _join_stages(stages: Sequence[StageSteps], plans: Sequence[Plan]) -> Plan:
    """Return the plan of the stage with the largest memory, with all stages."""
    joined = [
        StagePlan(
            steps=stage.num_steps,
            last_step=stage.last_step,
            batch=plan.batch.rows,
            length=plan.batch.length,
            tokens=plan.batch.tokens and plan.batch.tokens * stage.num_steps,
            seconds=None
            if plan.bounds is None or plan.bounds.step_seconds is None
            else plan.bounds.step_seconds * stage.num_steps,
            peak=plan.memory.peak,
            fits=plan.fits,
        )
        for stage, plan in zip(stages, plans, strict=True)
    ]
    largest = max(plans, key=lambda plan: (plan.fits is False, plan.memory.peak))
    return dataclasses.replace(largest, stages=joined)


def _place(partitioner: Partitioner) -> HostTopology:
    # Devices of other machines belong to other processes.
    processes = sorted({device.process_index for device in partitioner.mesh.devices.flat})
    return HostTopology(processes[0], len(processes), lambda device: device.process_index)


def abstract_batch(config: Config, partitioner: Partitioner) -> Any:
    """Return shapes, dtypes and sharding of the global batch of all processes."""
    place = _place(partitioner)
    feeds = plan_input(config, partitioner, place)
    rows = feeds.batch_size * feeds.num_infeed_hosts
    sharding = partitioner.batch_sharding()
    return jax.tree.map(
        lambda leaf: batch_spec(leaf, rows=rows, sharding=sharding),
        example_batch(config, partitioner, place),
    )


def _slices(mesh: Mesh, target: Target) -> list[int]:
    """Return the index of the slice or node of each device of a mesh, in the mesh's order."""
    devices = list(mesh.devices.flat)
    if target.kind is not None and target.kind.platform == "gpu":
        return [device.process_index for device in devices]  # one process per node
    indices: list[Any] = [getattr(device, "slice_index", None) for device in devices]
    if None not in indices:
        return indices
    # Simulated devices have no slice: `make_mesh` takes consecutive ones for a slice.
    per_slice = len(devices) // target.num_slices
    order = {device: i for i, device in enumerate(sorted(devices, key=lambda device: device.id))}
    return [order[device] // per_slice for device in devices]


def _plan_batch(batch: Any, partitioner: Partitioner, *, parts: int) -> BatchPlan:
    fields = dict(batch.flatten_items())
    rows = next(iter(fields.values())).shape[0]
    length = batch.ids.shape[1] if "ids" in batch and batch.ids.ndim > 1 else None
    return BatchPlan(
        rows=rows,
        rows_per_device=rows / partitioner.mesh.size,
        num_shards=partitioner.num_batch_shards(),
        split_over=list(partitioner.batch_axes()),
        length=length,
        tokens=None if length is None else rows * length,
        fields={
            path: f"{leaf.dtype.name}[{', '.join(map(str, leaf.shape))}]"
            for path, leaf in fields.items()
        },
        parts=parts,
    )
