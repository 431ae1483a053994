"""`--mode=export`: the newest checkpoint of a job as a folder of Hugging Face.

The weights are those that decoding uses, averaged ones where the task says so. The folder holds the
model as others load it: adapters (LoRA) are added to the weights beside them, and of a model that
was trained on preferences (DPO) the policy is written.
"""

from __future__ import annotations

import contextlib

from etils import epath

from layerkit.base_layer import PARAMS
from layerkit.interop.hugging_face import (
    HuggingFaceWeights,
    TensorMismatchError,
    UnsupportedModelError,
    export_model,
)
from layerkit_runner.config.flags import RunOptions
from layerkit_runner.config.resolve import ResolvedExperiment
from layerkit_runner.errors import UsageError
from layerkit_runner.init_from.provenance import recorded_hugging_face
from layerkit_runner.modes.start_state import choose_step
from layerkit_runner.trainer.job import Job, start_job


def run_export(resolved: ResolvedExperiment, options: RunOptions) -> int:
    """Writes the weights of a checkpoint, and the tokenizer of the folder that training began from.

    Raises:
      UsageError: no folder to write to, no checkpoint, or a model that no family can hold.
    """
    if options.export_dir is None:
        raise UsageError("--mode=export needs a folder to write: --export_dir=DIR")
    job = start_job("export", resolved, options)
    with contextlib.closing(job.observers):
        directory = options.restore_checkpoint_dir
        with job.checkpoints(read_only=True, directory=directory) as checkpoints:
            step = choose_step(checkpoints, options.only_restore_step)
            state = job.restore(checkpoints, step, for_training=False).state
        state = job.partitioner.stored_state(job.task, state)
        weights = job.task.decoded_state(state).params
        try:
            export_model(
                options.export_dir,
                resolved.task.model,
                {PARAMS: weights},
                tokenizer_folder=_tokenizer_folder(job),
            )
        except (OSError, ImportError, TensorMismatchError, UnsupportedModelError) as error:
            raise UsageError(f"{resolved.name}: {error}") from error
        kind = "averaged weights" if job.task.train.decode_use_ema_states else "weights"
        job.observers.message(f"wrote the {kind} of step {step} to {options.export_dir}")
    return 0


def _tokenizer_folder(job: Job) -> str | None:
    """The Hugging Face folder that the weights began from, by the task or by the job's record."""
    origin = job.task.initial_weights
    if isinstance(origin, HuggingFaceWeights):
        return origin.folder
    folder = recorded_hugging_face(job.directory)
    if folder is not None and not epath.Path(folder).is_dir():
        job.observers.message(f"{folder} is not there any more: exported without its tokenizer")
        return None
    return folder
