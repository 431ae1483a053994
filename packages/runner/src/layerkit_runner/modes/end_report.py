"""What a training job says when it is done: held-out losses, a sample, a picture, what next."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax

from layerkit_runner.byte_sizes import megabytes
from layerkit_runner.executor import Executor
from layerkit_runner.experiment import experiment_fields
from layerkit_runner.job import Job
from layerkit_runner.job_folder import command_line, longer
from layerkit_runner.observers import draw_loss_curve, memory_scalars, metrics_path
from layerkit_runner.steps.train_state import TrainState
from layerkit_runner.task import SingleTask

_SAMPLE_CHARACTERS = 600


def finish(job: Job, executor: Executor, state: TrainState, step: int) -> None:
    """Evaluates and decodes the finished model and reports both."""
    say = job.observers.message
    means = executor.evaluate_rest(state, step) if job.task.train.eval_at_end else {}
    baselines: dict[str, float] = {}
    for program in executor.eval_programs:
        loss = means.get(program.name, {}).get(reported_metric(job.task))
        if loss is not None and program.dataset is not None:
            say(held_out_line(program.name, loss, program.dataset.token_unit))
            for name, baseline in program.dataset.baselines().items():
                if baselines.get(name) == baseline:  # told: several programs read this data set
                    continue
                baselines[name] = baseline
                unit = program.dataset.token_unit
                say(held_out_line(f"  for comparison: {name}", baseline, unit))
    rates = executor.throughput.overall()
    if "tokens_per_sec" in rates:
        speed = (
            f"{rates['tokens_per_sec']:,.0f} tokens/s, {rates['step_time'] * 1e3:.1f} ms per step"
        )
        if "tflops_per_sec_per_device" in rates:
            speed += f", {rates['tflops_per_sec_per_device'] * 1e3:,.1f} model GFLOP/s per device"
        speed += f", {rates['input_wait']:.1%} of the time waiting for input"
        say(f"speed: {speed}")
    for name, records in executor.decode(state, step).items():
        for record in records[:1]:
            if "continuation" in record:
                say(sample_text(name, record))
    if executor.checkpoints is not None:
        executor.checkpoints.wait_until_finished()
    job.observers.flush()
    say(job.goodput.summary())
    for line in memory_lines(memory_scalars()):
        say(line)
    if jax.process_index() == 0:
        say(_draw(job, baselines, executor.train_programs.programs[0].dataset.token_unit))
        for line in next_commands(job, step):
            say(line)


def memory_lines(scalars: Mapping[str, float]) -> list[str]:
    """How full the devices were at most, where they tell."""
    peak = scalars.get("memory/device_peak_bytes_in_use")
    return [] if peak is None else [f"memory: {megabytes(peak)} at most on one device"]


def _draw(job: Job, baselines: dict[str, float], token_unit: str) -> str:
    """Draws the loss curve; returns where it is, or why there is none."""
    name = "loss_curve.png"
    try:
        draw_loss_curve(
            metrics_path(job.directory),
            job.directory / name,
            baselines=baselines,
            key=reported_metric(job.task),
            y_label=f"loss (nats per {token_unit})",
        )
    except ValueError as error:
        # The run is done and saved; that its losses cannot be drawn must not make it fail.
        return f"no loss curve: {error}"
    return f"loss curve: {job.given_directory / name}"


def reported_metric(task: SingleTask) -> str:
    """Which metric is called the loss where people compare: the model's choice, else the loss."""
    return task.model.reported_metric or task.loss_name


def held_out_line(name: str, loss: float, unit: str) -> str:
    """`heldout: 1.534 nats per byte = 2.213 bits per byte`."""
    return f"{name}: {loss:.4f} nats per {unit} = {loss / math.log(2):.4f} bits per {unit}"


def sample_text(name: str, record: dict[str, Any]) -> str:
    """A prompt and what the model wrote after it."""
    continuation = record["continuation"][:_SAMPLE_CHARACTERS]
    return (
        f"sample ({name}, {record['num_tokens']} tokens after the mark):\n"
        f"{record['prompt']}⟫{continuation}"
    )


def next_commands(job: Job, step: int) -> list[str]:
    """Three commands to try next."""

    def command(**more: Any) -> str:
        return "  " + command_line(job.resolved, job.options, **more)

    return [
        "next: every setting and the path that sets it; twice as many steps; the same on 8 devices",
        command(mode="inspect"),
        command(changes=longer(job.resolved, 2 * step)),
        command(mode="plan", changes=_on_eight_devices(job), flags=["--num_devices=8"]),
    ]


def _on_eight_devices(job: Job) -> dict[str, str | None]:
    fields = experiment_fields(type(job.resolved.experiment))
    if "ICI_MESH_SHAPE" not in fields or len(job.partitioner.mesh.axis_names) != 3:
        return {}
    deep = {"partitioner.ici_mesh_shape": None, "partitioner.dcn_mesh_shape": None}
    one_slice = {"DCN_MESH_SHAPE": None} if "DCN_MESH_SHAPE" in fields else {}
    return {"ICI_MESH_SHAPE": "[2,4,1]", **one_slice, **deep}
