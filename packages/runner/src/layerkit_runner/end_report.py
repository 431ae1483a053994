"""What a training job says when it is done: held-out losses, a sample, a picture, what next."""

from __future__ import annotations

import math
from typing import Any

import jax

from layerkit_runner.executor import Executor
from layerkit_runner.experiment import experiment_fields
from layerkit_runner.job import Job
from layerkit_runner.job_folder import command_line
from layerkit_runner.observers import draw_loss_curve, metrics_path
from layerkit_runner.train_state import TrainState

_SAMPLE_CHARACTERS = 600


def finish(job: Job, executor: Executor, state: TrainState, step: int) -> None:
    """Evaluates and decodes the finished model and reports both."""
    say = job.observers.message
    means = executor.evaluate(state, step) if job.task.train.eval_at_end else {}
    baselines: dict[str, float] = {}
    for program in executor.eval_programs:
        if program.name in means:
            say(
                held_out_line(program.name, means[program.name]["loss"], program.dataset.token_unit)
            )
            for name, loss in program.dataset.baselines().items():
                baselines[name] = loss
                say(held_out_line(f"  for comparison: {name}", loss, program.dataset.token_unit))
    rates = executor.throughput.overall()
    if "tokens_per_sec" in rates:
        speed = (
            f"{rates['tokens_per_sec']:,.0f} tokens/s, {rates['step_time'] * 1e3:.1f} ms per step"
        )
        if "tflops_per_sec_per_device" in rates:
            speed += f", {rates['tflops_per_sec_per_device'] * 1e3:,.1f} model GFLOP/s per device"
        say(f"speed: {speed}")
    for name, records in executor.decode(state, step).items():
        for record in records[:1]:
            say(sample_text(name, record))
    if executor.checkpoints is not None:
        executor.checkpoints.wait_until_finished()
    job.observers.flush()
    if jax.process_index() == 0 and job.directory is not None:
        picture = job.directory / "loss_curve.png"
        draw_loss_curve(metrics_path(job.directory), picture, baselines=baselines)
        say(f"loss curve: {picture}")
        for line in next_commands(job, step):
            say(line)


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

    def command(*more: str) -> str:
        return "  " + command_line(job.resolved, job.options, *more)

    devices = ["--num_devices=8"]
    if "ICI_MESH_SHAPE" in experiment_fields(type(job.resolved.experiment)):
        devices.append("--fdl.ICI_MESH_SHAPE=[2,4,1]")
    return [
        "next: every setting and the path that sets it; twice as many steps; the same on 8 devices",
        command("--mode=inspect"),
        command(f"--fdl.task.train.num_train_steps={2 * step}"),
        command("--mode=plan", *devices),
    ]
