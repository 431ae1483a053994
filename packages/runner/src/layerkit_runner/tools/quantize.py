"""`runner quantize SOURCE OUT`: write a model with weights in 8-bit or 4-bit integers.

OUT is a job folder without optimizer state. Its recorded override `task.model.weight_format` makes
the model store integers. A new local OUT is written as a hidden folder beside it and renamed, so
that the command can be repeated after an interruption.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerkit.errors import ConfigError
from layerkit_runner.config.help import read_words
from layerkit_runner.errors import UsageError, as_usage_error
from layerkit_runner.files.text import size_text
from layerkit_runner.run_options import Flag, non_negative

if TYPE_CHECKING:
    from etils import epath

    from layerkit_runner.config.requests import ResolvedExperiment
    from layerkit_runner.run.job import Job

_PAGE = """\
runner quantize SOURCE OUT [flags]

Write a model with weights in 8-bit or 4-bit integers. The new folder has no optimizer state.
Evaluate it by `runner --job_log_dir=OUT --mode=eval`; see docs/quantization.md."""
_FLAGS = (
    Flag(
        "weight_format",
        str,
        "int8, int4 or nf4, with the number of inputs that share a scale after a colon",
        "FORMAT",
        default="int8",
    ),
    Flag("step", non_negative, "checkpoint step; by default the newest", "STEP"),
)
_FORMAT_PATH = "task.model.weight_format"
# The description and the tokenizer of a Hugging Face model, in the new folder.
_HUGGING_FACE = "hugging_face"


def run_quantize(words: Sequence[str]) -> int:
    """Write the model of a folder with weights in integers; return the exit code."""
    if (read := read_words(words, _FLAGS, page=_PAGE)) is None:
        return 0
    values, folders = read
    if len(folders) != 2:
        expected = "the folder to read and the folder to write"
        raise UsageError(
            owner="`runner quantize`", field="folders", value=folders, expected=expected
        )
    print(quantize_folder(*folders, **values), flush=True)
    return 0


def quantize_folder(
    source: str, out: str, *, weight_format: str = "int8", step: int | None = None
) -> str:
    """Write the model of a folder with weights in integers; return a line with both sizes.

    The weights are those that decoding uses, which are averaged ones if the task says so.

    Args:
      source: Folder of a job, or a Hugging Face folder.
      out: Folder to write, which must not exist or be empty.
      weight_format: Format of the weights; see `layerkit.base.weight_formats`.
      step: Checkpoint step; None for the newest that is not damaged.
    """
    import jax
    from flax.traverse_util import unflatten_dict

    from layerkit.base.base_layer import PARAMS
    from layerkit.base.weight_formats import WeightFormat
    from layerkit.layers import quantize_model
    from layerkit_runner.files.atomic_write import absolute, is_remote
    from layerkit_runner.init_from import InitFrom, Source
    from layerkit_runner.init_from.first_state import weight_readers
    from layerkit_runner.interface.loading import FolderModel, folder_experiment, start_reading
    from layerkit_runner.run.job_errors import job_errors
    from layerkit_runner.tools.plan.memory import num_bytes

    WeightFormat.parse(weight_format)
    directory = absolute(out)
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise UsageError(field="out", value=out, expected="a new folder, or an empty one")
    resolved, job_folder = folder_experiment(source)
    if is_remote(directory) and isinstance(resolved.experiment, FolderModel):
        expected = "a local folder, to which the files of the Hugging Face folder are copied"
        raise UsageError(field="out", value=out, expected=expected)
    with job_errors("load", resolved):
        job = start_reading(resolved, job_folder)
        require_plain_weights(job, "source", source)
        use_ema = job.task.train.decode_use_ema_states
        settings = InitFrom(
            sources=[Source(folder=source, step=step, use_ema=use_ema)], label=source
        )
        readers, step = weight_readers(job.partitioner, job.task, settings)
        fields = unflatten_dict(readers)
        with as_usage_error(ConfigError, owner=source):
            # The weights are read one by one, each when it is rounded.
            weights = {PARAMS: fields.pop(PARAMS)}
            config = resolved.task.model
            _, stored = quantize_model(config, weights, weight_format=weight_format)
        others = jax.tree.map(lambda read: read(), fields)
        with as_usage_error(OSError, owner=out):
            _write(directory, resolved, weight_format, step, stored | others)
        state = job.abstract_stored_state()
    before = num_bytes([state.params, others])
    after = num_bytes([stored, others])
    line = f"{out}: {size_text(after)} in {weight_format}, {size_text(before)} before"
    if job.task.train.learner.ema_decay is None:
        return line
    kind = "averaged weights" if use_ema else "weights, not their averages"
    return f"{line}; the {kind} (decode_use_ema_states={use_ema})"


def require_plain_weights(job: Job, field: str, folder: str) -> None:
    """Raise an error if the weights to evaluate follow from the optimizer's state."""
    from layerkit_runner.optim.optimizer_updates import is_schedule_free

    if is_schedule_free(job.abstract_state().opt_state):
        raise UsageError(
            "a schedule-free optimizer computes the weights of evaluation from its state",
            field=field,
            value=folder,
            expected="a job with another optimizer, or a Hugging Face folder",
            hint="Export the job by --mode=export, and give that folder.",
        )


def _set_format(
    resolved: ResolvedExperiment, weight_format: str, **fields: Any
) -> ResolvedExperiment:
    """Return the experiment of the new folder with these fields, without averages of weights."""
    from layerkit_runner.config.requests import parse_override
    from layerkit_runner.run.resolve import resolve

    changes = {_FORMAT_PATH: weight_format}
    # The stored weights are averaged already.
    if resolved.task.train.learner.ema_decay is not None:
        changes["task.train.learner.ema_decay"] = "None"
        for name in ("eval_use_ema_states", "decode_use_ema_states"):
            changes[f"task.train.{name}"] = "False"
        for index, program in enumerate(resolved.eval_programs or ()):
            if getattr(program, "use_ema_states", None):
                changes[f"eval_programs.{index}.use_ema_states"] = "None"
    kept = [override for override in resolved.deep_overrides if override.path not in changes]
    added = [parse_override(path, text) for path, text in changes.items()]
    experiment = resolved.experiment
    return resolve(type(experiment)(**{**experiment.overrides, **fields}), [*kept, *added])


def _copy_description(
    resolved: ResolvedExperiment, weight_format: str, *, place: epath.Path, directory: epath.Path
) -> ResolvedExperiment:
    """Copy all but the weights of a Hugging Face folder into `place`, which becomes `directory`.

    It returns the experiment of the new folder.
    """
    from layerkit.interop.hugging_face import folder
    from layerkit_runner.init_from.settings import weights_of

    source: Any = resolved.experiment
    copy, moved = Path(place, _HUGGING_FACE), str(directory / _HUGGING_FACE)
    copy.mkdir(parents=True, exist_ok=True)
    folder.write_json(copy, folder.CONFIG, folder.read_json(source.FOLDER))
    folder.copy_companions(source.FOLDER, copy)
    written = _set_format(resolved, weight_format, FOLDER=str(copy))
    written.task.initial_weights = weights_of(moved, source.ADAPTERS)
    experiment = type(source)(**{**source.overrides, "FOLDER": moved})
    return dataclasses.replace(written, experiment=experiment)


def _write(
    directory: epath.Path,
    resolved: ResolvedExperiment,
    weight_format: str,
    step: int,
    fields: Mapping[str, Any],
) -> None:
    """Write the weights and the experiment of the new folder, which has a name once it is whole."""
    from layerkit_runner.files.atomic_write import is_remote
    from layerkit_runner.interface.loading import FolderModel
    from layerkit_runner.run.job_folder import write_config
    from layerkit_runner.run_options import RunOptions

    # A folder that exists may be the mount point of another disk, or in one that is read-only.
    place = directory
    if not (is_remote(directory) or directory.exists()):
        place = directory.with_name(f".{directory.name}.partial")
        place.rmtree(missing_ok=True)
    # An error of the new experiment precedes the long write of the weights.
    if isinstance(resolved.experiment, FolderModel):
        written = _copy_description(resolved, weight_format, place=place, directory=directory)
    else:
        written = _set_format(resolved, weight_format)
    _write_weights(place, step, fields)
    write_config(place, written, RunOptions(job_log_dir=str(directory)), report=print)
    if place != directory:
        os.replace(place, directory)


def _write_weights(directory: epath.Path, step: int, fields: Mapping[str, Any]) -> None:
    import jax.numpy as jnp

    from layerkit_runner.checkpointing import CheckpointManager
    from layerkit_runner.run.executor import ENDED
    from layerkit_runner.step.train_state import TrainState

    empty: dict[str, Any] = {"non_trainable": {}, "opt_state": (), "overwrite_with_gradient": {}}
    state = TrainState(step=jnp.asarray(step, jnp.int32), **{**empty, **fields})
    with CheckpointManager(directory / "checkpoints") as checkpoints:
        # No training goes on in this folder, for which an evaluation would wait.
        metadata = {ENDED: True}
        checkpoints.save(step, state, input_states={}, metadata=metadata, force=True)
