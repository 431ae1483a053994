"""One case of `gpu.py`, in a process of its own: a training step, compiled, timed, measured.

The step is that of a run (`Partitioner.train_step_fn`) on GPT-3 as `lm.pile` has it, with made-up
tokens that lie on the device. Its state is donated. The clock is read only at the ends of a group
of steps, of which the device has the next one before the last has ended.
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

from layerkit.config import Config
from layerkit.layers.attention.backends import UnsupportedBackendError
from layerkit.layers.products import with_dots
from layerkit.layers.quantization.fp8 import Fp8Dot
from layerkit.nested_map import NestedMap
from layerkit_experiments.lm.pile import Gpt126M
from layerkit_inputs import SyntheticInput
from layerkit_runner.config.experiment import experiment_fields
from layerkit_runner.config.overrides import parse_fields, parse_override
from layerkit_runner.config.resolve import ResolvedExperiment, resolve
from layerkit_runner.data.infeed import HostTopology, example_batch, make_input
from layerkit_runner.data.training_data import training_config
from layerkit_runner.errors import UsageError
from layerkit_runner.modes.start_report import LayerNotes, num_params
from layerkit_runner.partitioning import Partitioner
from layerkit_runner.tools.plan.bounds import device_work, step_bounds
from layerkit_runner.tools.plan.collectives import collective_traffic
from layerkit_runner.tools.plan.compiling import (
    CompiledStep,
    compile_step,
    measured_step,
    tracing_for,
)
from layerkit_runner.tools.plan.devices import described_kind, target_devices
from layerkit_runner.tools.plan.hardware import DeviceKind
from layerkit_runner.tools.plan.memory import step_memory, tensor_memory
from layerkit_runner.tools.plan.targets import Target, parse_target
from layerkit_runner.trainer.job import build_parts
from layerkit_runner.training.flops import program_flops
from layerkit_runner.training.step_cost import model_flops_per_step
from layerkit_runner.training.task import SingleTask

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
DTYPES = ("bf16", "fp8")

_NUM_BATCHES = 4
_WARM_UP_STEPS, _WARM_UP_SECONDS = 3, 2.0
_CUSTOM_CALL = re.compile(r'custom_call_target="([^"]+)"')
# What XLA calls cuBLAS for, `__cublas$lt$matmul$f8` among it; other products are `dot`s in kernels.
_CUBLAS = "__cublas$"
_COMPUTATION = re.compile(r"\n(?=%|ENTRY)")
_DOT = re.compile(r"= \S+ dot\((%[\w.-]+), (%[\w.-]+)\)")


@dataclasses.dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
      model: A name of `MODELS`.
      dtype: Of the products in the layers: `bf16`, or `fp8` for 8-bit floats with delayed scaling;
        all else is bfloat16, weights and optimizer float32.
      backend: Of attention.
      remat: What the backward pass keeps; a policy of `layerkit.layers.remat`.
      rows: Per device, of 2048 tokens.
      devices: How many GPUs; weights, optimizer and batch are split over all of them.
      packed: Whether rows say which document each token belongs to, as those of most runs do.
    """

    model: str
    dtype: str
    backend: str
    remat: str
    rows: int
    devices: int = 1
    packed: bool = False


class WholeRows(SyntheticInput):
    """Rows that are one document each, and so without fields that say where documents begin."""

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        batch = super()._read_rows(rows)
        return NestedMap({name: batch[name] for name in ("ids", "labels", "weights")})


class Gpt(Gpt126M):
    """GPT-3 on made-up tokens, its layers in a scan: depth costs no time to compile."""

    USE_REPEATED_LAYER = True
    PERCORE_BATCH_SIZE: float = 1.0
    PACKED: bool = False
    FP8: bool = False
    """Products of the layers in 8-bit floats; the head stays as it is."""

    def task(self) -> Config:
        """The task."""
        task = super().task()
        if self.FP8:
            task.model = with_dots(task.model, Fp8Dot.HParams.config(), only=r"lm_tpl\.stack_tpl.*")
        return task

    def datasets(self) -> list[Config]:
        """The config of the training input."""
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
    """The experiment of a case; `overrides` are as in `--fdl.NUM_LAYERS=2`."""
    given = [parse_override(*each.removeprefix("--fdl.").split("=", 1)) for each in overrides]
    fields = {
        **MODELS[case.model],
        "PERCORE_BATCH_SIZE": float(case.rows),
        "PACKED": case.packed,
        "FP8": case.dtype == "fp8",
        "ATTENTION_BACKEND": case.backend,
        "CHECKPOINT_POLICY": case.remat,
        "ICI_MESH_SHAPE": [1, case.devices, 1],
        **parse_fields("Gpt", experiment_fields(Gpt), given),
    }
    return resolve(Gpt(**fields), [each for each in given if each.is_deep])


@dataclasses.dataclass(frozen=True)
class Traced:
    """A training step before it is compiled.

    Attributes:
      resolved: The experiment.
      partitioner: Started with the devices.
      task: Bound to it.
      state: Shapes and shardings.
      batch: Likewise, of the global batch.
      program: Traced.
      notes: What layers said meanwhile.
    """

    resolved: ResolvedExperiment
    partitioner: Partitioner
    task: SingleTask
    state: Any
    batch: NestedMap
    program: Any
    notes: list[str]


def trace(resolved: ResolvedExperiment, devices: Sequence[jax.Device]) -> Traced:
    """Traces the step of an experiment for devices, which need not be here."""
    partitioner, task = build_parts(resolved)
    partitioner.start(devices)
    partitioner.bind(task)
    state = partitioner.abstract_state(task)
    config, sharding = training_config(resolved), partitioner.batch_sharding()
    rows = round(config.percore_batch_size * len(devices))
    batch = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype, sharding=sharding),
        example_batch(config, partitioner, HostTopology(0, 1, lambda _: 0)),
    )
    with LayerNotes() as notes:
        program = partitioner.train_step_fn(task).trace(state, batch)
    return Traced(resolved, partitioner, task, state, batch, program, notes.lines)


def predictions(traced: Traced, step: CompiledStep, device: DeviceKind) -> dict[str, Any]:
    """What is known before anything runs: sizes, FLOPs and bounds, as `--mode=plan` has them."""
    mesh = traced.partitioner.mesh
    memory = step_memory(tensor_memory(traced.state, traced.batch), step)
    rows, length = traced.batch.ids.shape
    flops = model_flops_per_step(traced.resolved.task, traced.batch, rows)
    collectives = collective_traffic(step.hlo_text, dict(mesh.shape), slices=[0] * mesh.size)
    work = device_work(memory, collectives, flops=program_flops(traced.program.jaxpr) / mesh.size)
    bounds = step_bounds(
        work, device, model_flops_per_device=flops / mesh.size, tokens=rows * length
    )
    notes = [note for note in traced.notes if note.startswith("attention backend")]
    return {
        "num_params": num_params(traced.state),
        "tokens_per_device": rows * length / mesh.size,
        "flops_per_device": flops / mesh.size,
        "attention": "; ".join(notes).removeprefix("attention backend: "),
        "custom_calls": dict(collections.Counter(_CUSTOM_CALL.findall(step.hlo_text))),
        "products": products(step.hlo_text),
        "state_bytes": memory.weights + memory.non_trainable + memory.optimizer,
        "temporary_bytes": memory.temporaries,
        "predicted_bytes": memory.peak,
        "usable_bytes": device.usable_bytes,
        # At the peak of bfloat16, which fp8 may pass.
        "least_ms": None if bounds.step_seconds is None else 1e3 * bounds.step_seconds,
        "most_mfu": bounds.mfu,
    }


def products(hlo_text: str) -> dict[str, int]:
    """How many products of matrices a program has (a scan's body once), and how many are of fp8."""
    calls = [call for call in _CUSTOM_CALL.findall(hlo_text) if call.startswith(_CUBLAS)]
    found = {"all": len(calls), "fp8": sum(call.endswith("$f8") for call in calls)}
    for computation in _COMPUTATION.split(hlo_text):
        dtypes = dict(re.findall(r"(%[\w.-]+) = (\w+)\[", computation))
        for operands in _DOT.findall(computation):
            found["all"] += 1
            found["fp8"] += all(dtypes[each].startswith("f8") for each in operands)
    return found


def compiled_row(resolved: ResolvedExperiment, target: Target) -> dict[str, Any]:
    """The row of a case that is compiled for a GPU that need not be here."""
    devices = target_devices(target)
    with tracing_for(devices[0]):
        traced = trace(resolved, devices)
        began = time.perf_counter()
        lowered = traced.program.lower()
    step = compile_step(lowered, platform="gpu", is_here=False)
    row = predictions(traced, step, described_kind(target, devices))
    fits = row["predicted_bytes"] <= row["usable_bytes"]
    status = "compiled" if fits else "does not fit"
    return {"status": status, "compile_seconds": time.perf_counter() - began, **row}


def measured_row(
    resolved: ResolvedExperiment, devices: Sequence[jax.Device], *, steps: int, groups: int
) -> dict[str, Any]:
    """The row of a case that is run on devices that are here."""
    device = described_kind(Target(None), devices)
    traced = trace(resolved, devices)
    began = time.perf_counter()
    step = traced.program.lower().compile()
    row = {"compile_seconds": time.perf_counter() - began}
    row |= predictions(traced, measured_step(step, platform=devices[0].platform), device)
    if row["usable_bytes"] is not None and row["predicted_bytes"] > row["usable_bytes"]:
        return {"status": "does not fit", **row}
    partitioner, task = traced.partitioner, traced.task
    source = make_input(training_config(resolved), partitioner)
    batches = [partitioner.put_batch(source.get_next()) for _ in range(_NUM_BATCHES)]
    state = jax.block_until_ready(partitioner.init_fn(task)())
    at_start = _peak_bytes(devices)
    state, first = step(state, batches[0])
    first_loss = float(first[0]["loss"].value)
    seconds, last_loss = timed(step, state, batches, steps=steps, groups=groups)
    at_end = _peak_bytes(devices)
    # A step that needs less than what came before it leaves no trace of what it needs.
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
    """Seconds of a step in each group of `steps`, after a warm-up; and the last loss.

    Args:
      step: Compiled `(state, batch) -> (state, (metrics, scalars))`.
      state: Consumed.
      batches: On the devices, taken in turns.
      steps: Of a group.
      groups: How many.
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
    """The most that was in use on any of the devices; None where they do not tell."""
    stats = [device.memory_stats() or {} for device in devices]
    peaks = [each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each]
    return max(peaks, default=None)


def row_of(case: Case, overrides: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """The row of a case; what it cannot have is a row, too."""
    try:
        resolved = experiment_of(case, overrides)
        if args.target is not None:
            return compiled_row(resolved, parse_target(f"{args.target}x{case.devices}"))
        devices = jax.devices()[: case.devices]
        return measured_row(resolved, devices, steps=args.steps, groups=args.groups)
    except (UnsupportedBackendError, UsageError) as error:
        return {"status": "refused", "reason": str(error)}
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"status": "out of memory", "reason": " ".join(str(error).split())[:300]}


def main() -> None:
    """Prints one line of JSON: the row of the case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", required=True, help="the fields of Case, as JSON")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--groups", type=int, default=9)
    parser.add_argument("--target", help="compile for such a GPU, and run nothing")
    args, overrides = parser.parse_known_args()
    print(json.dumps(row_of(Case(**json.loads(args.case)), overrides, args)))


if __name__ == "__main__":
    main()
