"""Compile, time and measure one training step of `accelerators.py` in its own process.

The step is `Partitioner.train_step_fn` of a training run, on the GPT-3 model of `lm.pile`, with
synthetic tokens that are on the device. Its state is donated. The clock is read only at the end of
each group of steps; steps of a group are dispatched without waiting for each other.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import math
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from memory_traffic import memory_traffic

from layerkit.config import Config
from layerkit.config.nested_map import NestedMap
from layerkit.ops.implementations import UnsupportedBackendError
from layerkit_experiments.lm.pile import Gpt126M
from layerkit_inputs import SyntheticInput
from layerkit_runner.config.experiment import experiment_fields
from layerkit_runner.config.requests import ResolvedExperiment, parse_fields, parse_override
from layerkit_runner.data.host_inputs import HostTopology, example_batch, make_input
from layerkit_runner.data.train_inputs import training_configs
from layerkit_runner.errors import UsageError
from layerkit_runner.partitioning import Partitioner
from layerkit_runner.run.job import build_parts
from layerkit_runner.run.resolve import resolve
from layerkit_runner.run.start_report import layer_notes, num_params
from layerkit_runner.step.step_cost import model_flops_per_step, scoped_flops
from layerkit_runner.step.task import SingleTask
from layerkit_runner.tools.plan.bounds import device_work, layer_flops, step_bounds
from layerkit_runner.tools.plan.collectives import collective_traffic
from layerkit_runner.tools.plan.compiling import (
    CompiledStep,
    compile_step,
    measured_step,
    tracing_for,
)
from layerkit_runner.tools.plan.hardware import DeviceKind, Target, parse_target
from layerkit_runner.tools.plan.memory import step_memory, tensor_memory
from layerkit_runner.tools.plan.targets import described_kind, target_devices

# Fields that differ from GPT-3 Small.
MODELS: Mapping[str, Mapping[str, Any]] = {
    "126m": {},
    "1.3b": {
        "NUM_LAYERS": 24,
        "MODEL_DIMS": 2048,
        "HIDDEN_DIMS": 8192,
        "NUM_HEADS": 16,
        "DIMS_PER_HEAD": 128,
    },
    "5b": {
        "NUM_LAYERS": 24,
        "MODEL_DIMS": 4096,
        "HIDDEN_DIMS": 16384,
        "NUM_HEADS": 32,
        "DIMS_PER_HEAD": 128,
    },
}
# Names of dtypes of the products in layers, and values of QUANTIZATION.
DTYPES: Mapping[str, str | None] = {
    "bf16": None,
    "fp8_delayed": "fp8_delayed",
    "fp8_current": "fp8_current",
    "int8": "int8",
}

_NUM_BATCHES, _LARGEST = 4, 10
_WARM_UP_STEPS, _WARM_UP_SECONDS = 3, 2.0
_CUSTOM_CALL = re.compile(r'custom_call_target="([^"]+)"')
# Prefix of XLA's cuBLAS calls, such as `__cublas$lt$matmul$f8`. Other products are `dot` ops.
_CUBLAS = "__cublas$"
_COMPUTATION = re.compile(r"\n(?=%|ENTRY)")
# TPUs multiply matrices by convolutions.
_DOT = re.compile(r"= \S+ (?:dot|convolution)\((%[\w.-]+), (%[\w.-]+)\)")
_8_BIT = ("f8", "s8")


@dataclasses.dataclass(frozen=True)
class Case:
    """The settings of one measured training step.

    Attributes:
      model: A name of `MODELS`.
      dtype: A name of `DTYPES`. Other activations are bfloat16; weights and optimizer state are
        float32.
      backend: Name of the attention backend.
      remat: Name of a policy of `layerkit.ops.remat`.
      rows: Number of rows of 2048 tokens per device.
      devices: Number of devices. Weights, optimizer state and batch are sharded over all of them.
      packed: Whether the batch has segment ids, as packed batches do.
    """

    model: str
    dtype: str
    backend: str
    remat: str
    rows: int
    devices: int = 1
    packed: bool = False


class WholeRows(SyntheticInput):
    """A synthetic input whose rows are one document each, without segment ids and positions."""

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        batch = super()._read_rows(rows)
        return NestedMap({name: batch[name] for name in ("ids", "labels", "weights")})


class Gpt(Gpt126M):
    """GPT-3 on synthetic tokens, with a scan over its layers to compile faster."""

    USE_REPEATED_LAYER = True
    PERCORE_BATCH_SIZE: float = 1.0
    PACKED: bool = False

    def datasets(self) -> list[Config]:
        """Return the config of the training input."""
        rows = SyntheticInput if self.PACKED else WholeRows
        return [
            rows.HParams.config(
                name="train",
                is_training=True,
                percore_batch_size=self.PERCORE_BATCH_SIZE,
                seq_length=self.MAX_SEQ_LEN,
                vocab_size=self.VOCAB_SIZE,
            )
        ]


def experiment_of(case: Case, overrides: Sequence[str] = ()) -> ResolvedExperiment:
    """Return the experiment of a case; `overrides` have the form `--fdl.NUM_LAYERS=2`."""
    given = [parse_override(*each.removeprefix("--fdl.").split("=", 1)) for each in overrides]
    fields = {
        **MODELS[case.model],
        "PERCORE_BATCH_SIZE": float(case.rows),
        "PACKED": case.packed,
        "QUANTIZATION": DTYPES[case.dtype],
        "ATTENTION_BACKEND": case.backend,
        "CHECKPOINT_POLICY": case.remat,
        "ICI_MESH_SHAPE": [1, case.devices, 1],
        **parse_fields("Gpt", experiment_fields(Gpt), given),
    }
    return resolve(Gpt(**fields), [each for each in given if each.is_deep])


@dataclasses.dataclass(frozen=True)
class Traced:
    """A traced training step that is not compiled yet.

    Attributes:
      resolved: Resolved experiment.
      partitioner: Partitioner, started with the devices.
      task: Task, bound to the partitioner.
      state: Shapes and shardings of the train state.
      batch: Shapes and shardings of the global batch.
      program: Traced JAX program.
      notes: Lines that layers logged while tracing.
    """

    resolved: ResolvedExperiment
    partitioner: Partitioner
    task: SingleTask
    state: Any
    batch: NestedMap
    program: Any
    notes: list[str]


def trace(resolved: ResolvedExperiment, devices: Sequence[jax.Device]) -> Traced:
    """Trace the training step of an experiment for devices, which may be on another machine."""
    partitioner, task = build_parts(resolved)
    partitioner.start(devices)
    partitioner.bind(task)
    state = partitioner.abstract_state(task)
    (config,) = training_configs(resolved).values()
    sharding = partitioner.batch_sharding()
    rows = round(config.percore_batch_size * len(devices))
    batch = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype, sharding=sharding),
        example_batch(config, partitioner, HostTopology(0, 1, lambda _: 0)),
    )
    with layer_notes() as notes:
        program = partitioner.train_step_fn(task).trace(state, batch)
    return Traced(resolved, partitioner, task, state, batch, program, notes)


def predictions(traced: Traced, step: CompiledStep, device: DeviceKind) -> dict[str, Any]:
    """Return sizes, FLOPs and bounds before execution, as `--mode=plan` computes them."""
    mesh = traced.partitioner.mesh
    memory = step_memory(tensor_memory(traced.state, traced.batch), step)
    rows, length = traced.batch.ids.shape
    stored = traced.partitioner.abstract_stored_state(traced.task)
    flops = model_flops_per_step(traced.resolved.task, stored, traced.batch, rows)
    collectives = collective_traffic(step.hlo_text, dict(mesh.shape), slices=[0] * mesh.size)
    layers = layer_flops(scoped_flops(traced.program.jaxpr), device, num_devices=mesh.size)
    work = device_work(memory, collectives, layers)
    bounds = step_bounds(
        work, device, model_flops_per_device=flops / mesh.size, tokens=rows * length
    )
    notes = [note for note in traced.notes if note.startswith("attention backend")]
    accesses = memory_traffic(step.hlo_text)
    copies = [access for access in accesses if access.is_copy]
    return {
        "num_params": num_params(traced.state.params),
        "tokens_per_device": rows * length / mesh.size,
        "flops_per_device": flops / mesh.size,
        "attention": "; ".join(notes).removeprefix("attention backend: "),
        "custom_calls": dict(collections.Counter(_CUSTOM_CALL.findall(step.hlo_text))),
        "products": products(step.hlo_text),
        "state_bytes": memory.weights + memory.non_trainable + memory.optimizer,
        "temporary_bytes": memory.temporaries,
        "predicted_bytes": memory.peak,
        "accessed_bytes": sum(access.bytes for access in accesses),
        "copied_bytes": sum(access.bytes for access in copies),
        "largest_copies": [dataclasses.asdict(access) for access in copies[:_LARGEST]],
        "usable_bytes": device.usable_bytes,
        "least_ms": None if bounds.step_seconds is None else 1e3 * bounds.step_seconds,
        "most_mfu": bounds.mfu,
    }


def products(hlo_text: str) -> dict[str, int]:
    """Count the matrix products of a program, and the 8-bit ones. A scan body counts once."""
    calls = [call for call in _CUSTOM_CALL.findall(hlo_text) if call.startswith(_CUBLAS)]
    result = {"all": len(calls), "8-bit": sum(call.endswith("$f8") for call in calls)}
    for computation in _COMPUTATION.split(hlo_text):
        dtypes = dict(re.findall(r"(%[\w.-]+) = (\w+)\[", computation))
        for operands in _DOT.findall(computation):
            result["all"] += 1
            result["8-bit"] += all(dtypes[each].startswith(_8_BIT) for each in operands)
    return result


def compiled_row(resolved: ResolvedExperiment, target: Target) -> dict[str, Any]:
    """Compile a case for devices that may be on another machine, and return its row.

    Compile seconds are of processor time, which other work on the machine does not change.
    """
    devices = target_devices(target)
    with tracing_for(devices[0]):
        traced = trace(resolved, devices)
        began = time.process_time()
        lowered = traced.program.lower()
    step = compile_step(lowered, platform=devices[0].platform, is_here=False)
    seconds = time.process_time() - began
    row = predictions(traced, step, described_kind(target, devices))
    fits = row["predicted_bytes"] <= row["usable_bytes"]
    status = "compiled" if fits else "does not fit"
    return {"status": status, "compile_seconds": seconds, **row}


def measured_row(
    resolved: ResolvedExperiment, devices: Sequence[jax.Device], *, steps: int, groups: int
) -> dict[str, Any]:
    """Run a case on local devices and return its row."""
    device = described_kind(Target(None), devices)
    traced = trace(resolved, devices)
    began = time.perf_counter()
    step = traced.program.lower().compile()
    row = {"compile_seconds": time.perf_counter() - began}
    row |= predictions(traced, measured_step(step, platform=devices[0].platform), device)
    if row["usable_bytes"] is not None and row["predicted_bytes"] > row["usable_bytes"]:
        return {"status": "does not fit", **row}
    partitioner, task = traced.partitioner, traced.task
    (config,) = training_configs(resolved).values()
    source = make_input(config, partitioner)
    batches = [partitioner.put_batch(source.get_next()) for _ in range(_NUM_BATCHES)]
    state = jax.block_until_ready(partitioner.init_fn(task)())
    at_start = _peak_bytes(devices)
    state, first = step(state, batches[0])
    first_loss = float(first[0]["loss"].value)
    seconds, last_loss = timed(step, state, batches, steps=steps, groups=groups)
    at_end = _peak_bytes(devices)
    # The peak shows the memory of the step only if it exceeds the peak before the steps.
    is_known = at_end is not None and at_start is not None and at_end > at_start
    low, median, high = statistics.quantiles([1e3 * each for each in seconds], n=4)
    flops_per_second = row["flops_per_device"] / (median / 1e3)
    return {
        "status": "measured" if math.isfinite(last_loss) else "loss is not finite",
        **row,
        "ms": {"quartile_1": low, "median": median, "quartile_3": high},
        "tokens_per_second_per_device": row["tokens_per_device"] / (median / 1e3),
        "tflops_per_second_per_device": flops_per_second / 1e12,
        "mfu": None if device.peak_flops is None else flops_per_second / device.peak_flops,
        "peak_bytes": at_end if is_known else None,
        "peak_bytes_before_steps": at_start,
        "first_loss": first_loss,
        "last_loss": last_loss,
    }


def timed(
    step: Any, state: Any, batches: Sequence[NestedMap], *, steps: int, groups: int
) -> tuple[list[float], float]:
    """Return the seconds per step of each group of `steps`, after a warm-up, and the last loss.

    Args:
      step: Compiled function `(state, batch) -> (state, (metrics, scalars))`.
      state: Initial train state; it is donated.
      batches: Batches on the devices, used round-robin.
      steps: Number of steps per group.
      groups: Number of timed groups.
    """
    seconds: list[float] = []
    began, warm_up, warm_steps = time.perf_counter(), True, 0
    reported: Any = None
    while len(seconds) < groups:
        started = time.perf_counter()
        for number in range(steps):
            state, reported = step(state, batches[number % len(batches)])
        jax.block_until_ready((state, reported))
        ended = time.perf_counter()
        if not warm_up:
            seconds.append((ended - started) / steps)
        warm_steps += steps
        warm_up = warm_up and (warm_steps < _WARM_UP_STEPS or ended - began < _WARM_UP_SECONDS)
    return seconds, float(reported[0]["loss"].value)


def _peak_bytes(devices: Sequence[jax.Device]) -> int | None:
    """Return the peak memory use of any device, or None if the devices do not report it."""
    stats = [device.memory_stats() or {} for device in devices]
    peaks = [each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each]
    return max(peaks, default=None)


def target_of(name: str, num_devices: int) -> Target:
    """Return the target of `--target`: `h100` with a number of devices, or a slice of TPUs.

    Raises:
      UsageError: The target is unknown, or the slice has another number of devices.
    """
    target = parse_target(name if ":" in name else f"{name}x{num_devices}")
    if target.num_devices != num_devices:
        raise UsageError(field="--devices", value=num_devices, expected=f"that of {name}")
    return target


def row_of(case: Case, overrides: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """Return the row of a case. An unsupported case or one without memory has a row, too."""
    try:
        resolved = experiment_of(case, overrides)
        if args.target is not None:
            return compiled_row(resolved, target_of(args.target, case.devices))
        devices = jax.devices()[: case.devices]
        return measured_row(resolved, devices, steps=args.steps, groups=args.groups)
    except (UnsupportedBackendError, UsageError) as error:
        return {"status": "refused", "reason": str(error)}
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"status": "out of memory", "reason": " ".join(str(error).split())[:300]}


def main() -> None:
    """Print the row of the case as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", required=True, help="fields of Case, as JSON")
    parser.add_argument("--steps", type=int, default=10, help="training steps per timed group")
    parser.add_argument("--groups", type=int, default=9, help="number of timed groups")
    parser.add_argument("--target", help="devices to compile for without running")
    args, overrides = parser.parse_known_args()
    print(json.dumps(row_of(Case(**json.loads(args.case)), overrides, args)))


if __name__ == "__main__":
    main()
