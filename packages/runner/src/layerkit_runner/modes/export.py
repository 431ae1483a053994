"""`--mode=export`: writes a checkpoint of a job as a Hugging Face folder, or as StableHLO.

The weights are those that decoding uses, which are averaged ones if the task says so. Adapters
(LoRA) are merged into the weights, and a model trained on preferences (DPO) exports its policy.
"""

from __future__ import annotations

import contextlib

from etils import epath

from layerkit.base_layer import PARAMS
from layerkit.errors import UserError
from layerkit.interop.hugging_face import HuggingFaceWeights, export_model
from layerkit_runner.config.flags import RunOptions
from layerkit_runner.config.resolve import ResolvedExperiment
from layerkit_runner.errors import UsageError, to_usage_error
from layerkit_runner.trainer.job import Job, choose_step, start_job
from layerkit_runner.training.train_state import recorded_hugging_face


def run_export(resolved: ResolvedExperiment, options: RunOptions) -> int:
    """Write the model of a checkpoint; return the exit code."""
    if options.export_dir is None:
        raise UsageError("--mode=export writes a folder", hint="Give one: --export_dir=DIR.")
    job = start_job("export", resolved, options)
    with contextlib.closing(job.observers):
        directory = options.restore_checkpoint_dir
        with job.checkpoints(read_only=True, directory=directory) as checkpoints:
            step = choose_step(checkpoints, options.only_restore_step)
            state = job.restore(checkpoints, step, for_training=False).state
        state = job.partitioner.stored_state(job.task, state)
        variables = job.task.decoded_variables(state)
        try:
            if options.export_format == "stablehlo":
                # Imports jax.export.
                from layerkit_runner.modes.export_stablehlo import export_stablehlo

                export_stablehlo(
                    options.export_dir,
                    resolved.task.model,
                    job.task.model,
                    variables,
                    bakes_weights=options.bakes_weights,
                    facts={"experiment": resolved.name, "step": step},
                )
            else:
                export_model(
                    options.export_dir,
                    resolved.task.model,
                    {PARAMS: variables[PARAMS]},
                    tokenizer_folder=_tokenizer_folder(job),
                )
        except (OSError, ImportError, UserError) as error:
            raise to_usage_error(error, owner=resolved.name) from error
        kind = "averaged weights" if job.task.train.decode_use_ema_states else "weights"
        job.observers.message(f"wrote the {kind} of step {step} to {options.export_dir}")
    return 0


def _tokenizer_folder(job: Job) -> str | None:
    """Return the Hugging Face folder from which training started; None if there is none."""
    origin = job.task.initial_weights
    if isinstance(origin, HuggingFaceWeights):
        return origin.folder
    folder = recorded_hugging_face(job.directory)
    if folder is not None and not epath.Path(folder).is_dir():
        job.observers.message(f"exporting without a tokenizer: {folder} does not exist")
        return None
    return folder
