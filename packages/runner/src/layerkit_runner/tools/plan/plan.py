"""Makes a plan: compiles the true training step for devices that need not be here, and measures it.

The step is the one that training runs, lowered from shapes: no weight is made and nothing is run.
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
from layerkit_runner.config.resolve import ResolvedExperiment
from layerkit_runner.data.infeed import Place, example_batch, plan_input
from layerkit_runner.data.training_data import training_configs
from layerkit_runner.errors import UsageError, layer_error_text
from layerkit_runner.modes.start_report import LayerNotes, num_params
from layerkit_runner.partitioning import Partitioner
from layerkit_runner.tools.plan.bounds import Bounds, bounds_of
from layerkit_runner.tools.plan.bubble import PipelinePlan, pipeline_plans
from layerkit_runner.tools.plan.collectives import Traffic, collective_traffic
from layerkit_runner.tools.plan.compiler_notes import compiler_notes
from layerkit_runner.tools.plan.compiling import CompiledStep, compile_step, tracing_for
from layerkit_runner.tools.plan.devices import described_kind
from layerkit_runner.tools.plan.hardware import DeviceKind
from layerkit_runner.tools.plan.memory import Memory, TensorMemory, step_memory, tensor_memory
from layerkit_runner.tools.plan.targets import HERE, Target
from layerkit_runner.tools.plan.temporaries import TemporaryTensor, largest_temporaries
from layerkit_runner.trainer.job import build_parts, versions
from layerkit_runner.training.batch_specs import batch_spec
from layerkit_runner.training.flops import program_flops
from layerkit_runner.training.step_flops import model_flops_per_step
from layerkit_runner.training.task import SingleTask
from layerkit_runner.training.train_state import TrainState

# More than a page shows, for the JSON form.
_TEMPORARIES = 30
# Beyond this share of a device's memory a quick plan does not tell whether the step fits.
_IN_DOUBT = 0.95


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
      parts: Into how many the batch is divided, whose gradients are added up one after another.
    """

    rows: int
    rows_per_device: float
    num_shards: int
    split_over: list[str]
    length: int | None
    tokens: int | None
    fields: dict[str, str]
    parts: int = 1


@dataclasses.dataclass(frozen=True)
class Plan:
    """A training step on paper. All bytes are per device; the JSON form has these very keys.

    Attributes:
      experiment: Its full name.
      target: As `--target` says it, such as `h100x256`.
      num_devices: How many.
      versions: Of the packages that decide the numbers.
      partitioner: Its class.
      mesh: Size of each mesh axis.
      num_params: Trained scalars.
      param_dtypes: Of the weights.
      batch: How a batch is put together.
      flops_per_step: Model FLOPs of all devices (`layerkit_runner.training.flops`), without what
        rematerialisation repeats.
      flops_per_device: The same, divided by the devices.
      memory: Bytes by kind.
      tensors: All tensors of state and batch, largest first.
      collectives: What devices send to one another in one step.
      notes: What layers said while they were traced, and what to know about the numbers.
      trace_seconds: Time that tracing and lowering took here.
      compile_seconds: Time that compiling took here.
      device: What is known of each device.
      num_slices: Slices or nodes that the devices lie in.
      fits: Whether the peak is within the memory that a program can have of a device; None where
        that is not known.
      refusal: What the compiler said of a step that is too large for the device; then there are no
        temporaries, outputs and collectives to tell.
      temporaries: The largest results that the step computes.
      bounds: The time that a step takes at least; None where there is no program to read.
      pipelines: Of the model.
      is_quick: Whether the compiler was asked for less effort than a run asks for.
      dataset: Whose step this is, where several data sets take turns.
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
    device: DeviceKind | None = None
    num_slices: int = 1
    fits: bool | None = None
    refusal: str | None = None
    temporaries: list[TemporaryTensor] = dataclasses.field(default_factory=list)
    bounds: Bounds | None = None
    pipelines: list[PipelinePlan] = dataclasses.field(default_factory=list)
    is_quick: bool = False
    dataset: str | None = None


@dataclasses.dataclass(frozen=True)
class PreparedStep:
    """A training step as shapes and shardings, before it is traced and compiled.

    Attributes:
      resolved: The experiment.
      devices: What to compile for.
      target: What the devices stand for.
      device: What is known of each device.
      partitioner: Started and bound to `task`.
      task: The task, built.
      batches: Global batch by training data set.
      state: State on the devices.
      turns: Names of all training data sets.
    """

    resolved: ResolvedExperiment
    devices: Sequence[jax.Device]
    target: Target
    device: DeviceKind
    partitioner: Partitioner
    task: SingleTask
    batches: dict[str, Any]
    state: TrainState
    turns: list[str]

    @property
    def state_bytes(self) -> int:
        """Bytes of weights and optimizer state on each device."""
        return sum(tensor.bytes_per_device for tensor in tensor_memory(self.state, {}))


def prepare_step(
    resolved: ResolvedExperiment,
    devices: Sequence[jax.Device],
    *,
    parts: tuple[Partitioner, SingleTask] | None = None,
    target: Target | None = None,
    dataset: str | None = None,
) -> PreparedStep:
    """Lay out state and batches of an experiment on `devices`; nothing is traced or compiled.

    Args:
      resolved: The experiment.
      devices: What to compile for; they need not be able to run the step.
      parts: Partitioner and task if they are built already; consumed.
      target: What the devices stand for; None for the devices themselves.
      dataset: The training data set whose step is planned; None for all of them.

    Raises:
      UsageError: fields that do not fit together, sizes that cannot be split over the mesh.
    """
    partitioner, task = build_parts(resolved) if parts is None else parts
    target = Target(None) if target is None else target
    try:
        partitioner.start(devices)
        partitioner.bind(task)
        configs = training_configs(resolved)
        return PreparedStep(
            resolved,
            devices,
            target,
            described_kind(target, devices),
            partitioner,
            task,
            batches={
                name: _abstract_batch(config, partitioner)
                for name, config in configs.items()
                if dataset is None or name == dataset
            },
            state=partitioner.abstract_state(task),
            turns=list(configs),
        )
    except ValueError as error:
        raise UsageError(f"{resolved.name}: {layer_error_text(error)}") from error


def make_plan(
    resolved: ResolvedExperiment,
    devices: Sequence[jax.Device],
    *,
    parts: tuple[Partitioner, SingleTask] | None = None,
    target: Target | None = None,
    effort: str = "full",
) -> Plan:
    """Compile the training step of an experiment for `devices` and measure it.

    See `prepare_step` and `compile_plan` for arguments and errors.
    """
    return compile_plan(prepare_step(resolved, devices, parts=parts, target=target), effort=effort)


def compile_plan(step: PreparedStep, *, effort: str = "full") -> Plan:
    """Compile a training step and measure it.

    Where several data sets take turns, each has a step of its own. The plan is of the step that
    needs most memory, and a note names it.

    Args:
      step: The step, laid out.
      effort: Effort of the compiler, `quick` or `full`; see `compile_step`. A quick step that needs
        nearly all memory of a device, or is rejected, is compiled again in full.

    Raises:
      UsageError: a layer rejects its fields or sizes.
    """
    plans = {name: _plan_step(step, batch, effort) for name, batch in step.batches.items()}
    largest = max(plans, key=lambda name: (plans[name].fits is False, plans[name].memory.peak))
    plan = plans[largest]
    if len(step.turns) == 1:
        return plan
    others = ", ".join(name for name in step.turns if name != largest)
    why = ", which needs most memory" if len(plans) == len(step.turns) else ""
    return dataclasses.replace(
        plan,
        dataset=largest,
        notes=[f"the step on {largest}{why}; it takes turns with {others}", *plan.notes],
        trace_seconds=sum(each.trace_seconds for each in plans.values()),
        compile_seconds=sum(each.compile_seconds for each in plans.values()),
    )


def _plan_step(prepared: PreparedStep, batch: Any, effort: str) -> Plan:
    resolved, target, state = prepared.resolved, prepared.target, prepared.state
    partitioner, task, device = prepared.partitioner, prepared.task, prepared.device
    devices = prepared.devices
    begun = time.perf_counter()
    try:
        with LayerNotes() as notes, tracing_for(devices[0]):
            program = partitioner.train_step_fn(task).trace(state, batch)
            lowered = program.lower()
        batch_plan = _plan_batch(batch, partitioner, parts=task.train.gradient_accumulation_steps)
        flops = model_flops_per_step(resolved.task, batch, batch_plan.rows)
    except ValueError as error:
        raise UsageError(f"{resolved.name}: {layer_error_text(error)}") from error
    traced = time.perf_counter()
    tensors = tensor_memory(state, batch, stored=partitioner.abstract_stored_state(task))
    compiled_for = functools.partial(
        compile_step, lowered, platform=device.platform, is_here=target.is_here
    )
    step = compiled_for(effort=effort)
    if step.is_quick and _is_in_doubt(step_memory(tensors, step), device, step):
        step = compiled_for(effort="full")
    compiled_at = time.perf_counter()
    mesh = dict(partitioner.mesh.shape)
    slices = _slices(partitioner.mesh, target)
    memory = step_memory(tensors, step)
    collectives = collective_traffic(step.hlo_text, mesh, slices=slices)
    bounds = bounds_of(
        memory,
        collectives,
        device,
        flops_per_device=program_flops(program.jaxpr) / len(devices),
        model_flops_per_device=flops / len(devices),
        tokens=batch_plan.tokens,
    )
    padded = partitioner.padding_text(task)
    return Plan(
        experiment=resolved.name,
        target=target.describe() if target.kind else f"{HERE} ({device.name})",
        num_devices=len(devices),
        versions=versions(),
        partitioner=type(partitioner).__name__,
        mesh=mesh,
        num_params=num_params(partitioner.abstract_stored_state(task)),
        param_dtypes=sorted({leaf.dtype.name for leaf in jax.tree.leaves(state.params)}),
        batch=batch_plan,
        flops_per_step=flops,
        flops_per_device=flops / len(devices),
        memory=memory,
        tensors=tensors,
        collectives=collectives,
        notes=[
            *([f"padded: {padded}"] if padded else []),
            *notes.lines,
            *compiler_notes(lowered, step, platform=device.platform, is_here=target.is_here),
        ],
        trace_seconds=traced - begun,
        compile_seconds=compiled_at - traced,
        device=device,
        num_slices=len(set(slices)),
        fits=_fits(memory, device, step),
        refusal=step.refusal,
        temporaries=largest_temporaries(step.hlo_text, most=_TEMPORARIES),
        bounds=bounds if step.hlo_text else None,
        pipelines=pipeline_plans(resolved.task, rows=batch_plan.rows // batch_plan.parts),
        is_quick=step.is_quick,
    )


def _abstract_batch(config: Config, partitioner: Partitioner) -> Any:
    """Shapes, dtypes and sharding of the global batch, as all processes put it together."""
    # Devices that are elsewhere belong to processes that are elsewhere.
    processes = sorted({device.process_index for device in partitioner.mesh.devices.flat})
    place = Place(processes[0], len(processes), lambda device: device.process_index)
    feeds = plan_input(config, partitioner, place)
    rows = feeds.batch_size * feeds.num_infeed_hosts
    sharding = partitioner.batch_sharding()
    return jax.tree.map(
        lambda leaf: batch_spec(leaf, rows=rows, sharding=sharding),
        example_batch(config, partitioner, place),
    )


def _slices(mesh: Mesh, target: Target) -> list[int]:
    """In which slice or node each device of a mesh lies, in the mesh's order."""
    devices = list(mesh.devices.flat)
    if target.kind is not None and target.kind.platform == "gpu":
        return [device.process_index for device in devices]  # one for each node
    found: list[int] = [device.slice_index for device in devices if _tells_its_slice(device)]
    if len(found) == len(devices):
        return found
    # Simulated ones do not say: `make_mesh` takes consecutive ones for a slice.
    per_slice = len(devices) // target.num_slices
    order = {device: i for i, device in enumerate(sorted(devices, key=lambda each: each.id))}
    return [order[device] // per_slice for device in devices]


def _tells_its_slice(device: Any) -> bool:
    return getattr(device, "slice_index", None) is not None


def _is_in_doubt(memory: Memory, device: DeviceKind, step: CompiledStep) -> bool:
    """Whether a quick plan leaves open if the step fits."""
    # Compilers refuse a step before they make code of it, so asking again costs little.
    if step.refusal is not None or device.usable_bytes is None:
        return True
    return memory.peak > _IN_DOUBT * device.usable_bytes


def _fits(memory: Memory, device: DeviceKind, step: CompiledStep) -> bool | None:
    if device.platform == "tpu":
        return step.refusal is None  # its compiler decides
    return None if device.usable_bytes is None else memory.peak <= device.usable_bytes


def _plan_batch(batch: Any, partitioner: Partitioner, *, parts: int) -> BatchPlan:
    fields = dict(batch.flatten_items())
    rows = next(iter(fields.values())).shape[0]
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
            for path, leaf in fields.items()
        },
        parts=parts,
    )
