"""`--mode=eval` and `--mode=decode_once`: the newest checkpoint of a job, once."""

from __future__ import annotations

import contextlib

import jax

from layerkit_runner.command_line.flags import RunOptions
from layerkit_runner.configuration.resolve import ResolvedExperiment
from layerkit_runner.errors import UsageError
from layerkit_runner.feeds.data_agreement import check_same_data
from layerkit_runner.job import Job, start_job
from layerkit_runner.modes.end_report import held_out_line, reported_metric, sample_text
from layerkit_runner.modes.start_report import num_params
from layerkit_runner.modes.train import choose_step
from layerkit_runner.observers import RunInfo
from layerkit_runner.processes.process_exchange import gather_values
from layerkit_runner.programs import DecodeProgram, EvalProgram
from layerkit_runner.steps.train_state import TrainState


def run_eval(resolved: ResolvedExperiment, options: RunOptions) -> int:
    """Evaluates every held-out data set."""
    job = start_job("eval", resolved, options)
    with contextlib.closing(job.observers):
        inputs = job.eval_inputs()
        if not inputs:
            raise UsageError(f"{resolved.name}.datasets() has no held-out input to evaluate")
        if jax.process_count() > 1:
            check_same_data(inputs, gather_values)
        state, step = _restore(job)
        for name, dataset in inputs.items():
            program = EvalProgram(job.task, job.partitioner, dataset, name)
            means = program.run(state, step, job.observers)
            loss = means[reported_metric(job.task)]
            job.observers.message(held_out_line(name, loss, dataset.token_unit))
    return 0


def run_decode_once(resolved: ResolvedExperiment, options: RunOptions) -> int:
    """Decodes every decode data set; finished outputs are not made again."""
    job = start_job("decode_once", resolved, options)
    with contextlib.closing(job.observers):
        inputs = job.decode_inputs()
        if not inputs:
            raise UsageError(f"{resolved.name}.decode_datasets() has nothing to decode")
        if jax.process_count() > 1:
            check_same_data(inputs, gather_values)
        state, step = _restore(job)
        for name, dataset in inputs.items():
            program = DecodeProgram(
                job.task, job.partitioner, dataset, name, job.directory / "decode"
            )
            for record in program.run(state, step, job.observers)[:1]:
                job.observers.message(sample_text(name, record))
            job.observers.message(f"decoded step {step} to {program.output_path(step)}")
    return 0


def _restore(job: Job) -> tuple[TrainState, int]:
    """The state to look at, and its step; tells the observers about the run."""
    directory = job.options.restore_checkpoint_dir
    with job.checkpoints(read_only=True, directory=directory) as checkpoints:
        step = choose_step(checkpoints, job.options.restore_checkpoint_step)
        state = job.restore(checkpoints, step, for_training=False).state
    device_kind = jax.devices()[0].device_kind
    job.observers.start(
        RunInfo(
            job_log_dir=job.directory,
            experiment=job.resolved.name,
            mode=job.mode,
            num_params=num_params(state),
            num_train_steps=step,
            start_step=step,
            tokens_per_step=0,
            examples_per_step=0,
            flops_per_step=None,
            num_devices=job.partitioner.mesh.size,
            device_kind=device_kind,
            peak_flops_per_device=None,
        )
    )
    return state, step
