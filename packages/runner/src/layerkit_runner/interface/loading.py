"""Loading of a trained model from a job folder, or of one in a Hugging Face folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import optax

from layerkit.config import Config, Partial
from layerkit.config.field_types import parse_literal
from layerkit_inputs.text.tokenizers import tokenizer_config
from layerkit_runner.config.config_tree import config_json
from layerkit_runner.config.experiment import BaseExperiment, experiment_fields
from layerkit_runner.config.recorded import add_recorded_experiment, read_recorded_config
from layerkit_runner.config.requests import Override, ParsedFlags, ResolvedExperiment, parse_fields
from layerkit_runner.distributed.devices import start_devices
from layerkit_runner.errors import UsageError
from layerkit_runner.files.atomic_write import absolute
from layerkit_runner.init_from.first_state import plan_first_state
from layerkit_runner.init_from.settings import weights_of
from layerkit_runner.init_from.sources import (
    CheckpointFolder,
    HuggingFaceFolder,
    PeftFolder,
    recognize,
)
from layerkit_runner.interface.experiments import (
    ExperimentLike,
    experiment_class,
    get_experiment,
    make_override,
)
from layerkit_runner.observers import Observers, Progress
from layerkit_runner.optim.learner import Learner
from layerkit_runner.run.job import Job, build_parts, choose_step
from layerkit_runner.run.job_errors import job_errors
from layerkit_runner.run.job_folder import changed_lines
from layerkit_runner.run.model.loaded_model import LoadedModel
from layerkit_runner.run.resolve import check_folder, resolve
from layerkit_runner.run_options import RunOptions
from layerkit_runner.step.task import SingleTask
from layerkit_runner.step.train_hparams import TrainHParams


def load(
    folder: str | os.PathLike[str],
    *,
    step: int | None = None,
    experiment: ExperimentLike | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> LoadedModel:
    """Load a model with its weights and its tokenizer.

    The weights are laid out over the devices as the experiment's partitioner says.

    Args:
      folder: Folder of a job, of its checkpoints or of one checkpoint; or a Hugging Face folder of
        a supported family.
      step: Training step; None for the newest checkpoint that is not damaged.
      experiment: Experiment of the job, where it differs from the recorded one or is defined in a
        notebook; see `get_experiment`. None for the recorded one with its overrides.
      overrides: Further overrides, such as `{"partitioner.ici_mesh_shape": [1, 4, 1]}` for other
        devices than those of training. Of a Hugging Face folder also `{"DTYPE": "float32"}`.

    Raises:
      UserError: The folder has no such model, or the model does not fit the devices.
    """
    added = [make_override(name, value) for name, value in (overrides or {}).items()]
    return load_folder(os.fspath(folder), step=step, experiment=experiment, overrides=added)


def load_folder(
    folder: str,
    *,
    step: int | None,
    experiment: ExperimentLike | None,
    overrides: Sequence[Override],
) -> LoadedModel:
    """Load a model as `load` does, with the overrides of a command line."""
    kind = recognize(folder)
    if isinstance(kind, HuggingFaceFolder) and (step is not None or experiment is not None):
        name, value = ("step", step) if step is not None else ("experiment", experiment)
        raise UsageError(field=name, value=value, expected="None for a Hugging Face folder")
    resolved, job_folder = folder_experiment(folder, experiment=experiment, overrides=overrides)
    if isinstance(kind, CheckpointFolder):
        if step is not None and kind.step not in (None, step):
            raise UsageError(field="step", value=step, expected=f"the step of {folder}")
        return load_checkpoint(resolved, job_folder, kind.step if step is None else step)
    from layerkit.interop.hugging_face import generation_notes

    with job_errors("load", resolved):
        job = start_reading(resolved, job_folder)
        decoder = getattr(resolved.task.model, "decoder", None)
        for line in () if decoder is None else generation_notes(str(kind.directory), decoder):
            job.observers.message(line)
        state = plan_first_state(job.partitioner, job.task)().state
        return LoadedModel(job, state.for_inference(), path=folder, step=0)


def folder_experiment(
    folder: str, *, experiment: ExperimentLike | None = None, overrides: Sequence[Override] = ()
) -> tuple[ResolvedExperiment, str]:
    """Return the experiment of a folder, by default the recorded one, and the job's folder."""
    kind = recognize(folder)
    if isinstance(kind, HuggingFaceFolder):
        # Absolute, since the working folder may change.
        return _resolve_class(FolderModel, overrides, FOLDER=str(kind.directory)), folder
    if isinstance(kind, PeftFolder):
        problem = "an adapter of PEFT has no model"
        hint = "Give the folder of its model, and --fdl.ADAPTERS='{\"DIR\": 1.0}'."
        raise UsageError(problem, field="folder", value=folder, hint=hint)
    if not isinstance(kind, CheckpointFolder):
        problem = "a checkpoint of Paxml has no configuration"
        hint = "Continue its run by InitFrom with load_step (docs/init_from.md)."
        raise UsageError(problem, field="folder", value=folder, hint=hint)
    is_default = kind.directory.name == "checkpoints"
    job_folder = str(kind.directory.parent if is_default else kind.directory)
    if experiment is None:
        resolved = _recorded(job_folder, overrides)
    elif isinstance(experiment, (str, type)):
        resolved = _resolve_class(experiment_class(experiment), overrides)
    else:
        resolved = get_experiment(experiment, {o.path: parse_literal(o.text) for o in overrides})
    return resolved, job_folder


def resolve_folder(flags: ParsedFlags) -> ResolvedExperiment:
    """Return the experiment of the Hugging Face folder that `--init_from` names."""
    check_folder(flags)
    folder = flags.options.init_from or ""
    if flags.exp is not None or not isinstance(recognize(folder), HuggingFaceFolder):
        expected = "a Hugging Face folder, without --exp; a job is read by --job_log_dir"
        raise UsageError(field="--init_from", value=folder, expected=expected)
    return folder_experiment(folder, overrides=flags.overrides)[0]


def _resolve_class(
    cls: type[BaseExperiment], overrides: Sequence[Override], **values: Any
) -> ResolvedExperiment:
    declared = {name: text for name, text in experiment_fields(cls).items() if name not in values}
    fields = parse_fields(cls.__qualname__, declared, overrides)
    return resolve(cls(**values, **fields), [o for o in overrides if o.is_deep])


def _recorded(folder: str, overrides: Sequence[Override]) -> ResolvedExperiment:
    """Return the experiment that a job folder records, with further overrides."""

    def resolve_with(added: Sequence[Override]) -> ResolvedExperiment:
        flags = ParsedFlags(None, "export", tuple(added), RunOptions(job_log_dir=folder))
        flags = add_recorded_experiment(flags, lambda _: None)
        return _resolve_class(experiment_class(flags.exp or ""), flags.overrides)

    resolved = resolve_with(overrides)
    changed = _edited_fields(folder, resolved, resolve_with(()) if overrides else resolved)
    if changed:
        problem = f"the model was trained with another configuration (recorded → now): {changed[0]}"
        hint = "Give the experiment with the edited configs as load(…, experiment=…)."
        raise UsageError(problem, owner=folder, field="experiment", hint=hint)
    return resolved


def _edited_fields(
    folder: str, resolved: ResolvedExperiment, without_overrides: ResolvedExperiment
) -> list[str]:
    """Return a line for each field of the model that training used with another value.

    Fields that overrides change are left out.
    """
    recorded = read_recorded_config(folder)
    if recorded is None:
        return []
    now, before = (config_json(e)["config"] for e in (resolved, without_overrides))
    shared = [
        path
        for path, value in now.items()
        if path.startswith("task.model.")
        and path in recorded.config
        and before.get(path) == value  # An override does not change it.
    ]
    return changed_lines(
        {path: recorded.config[path] for path in shared}, {path: now[path] for path in shared}
    )


def load_checkpoint(resolved: ResolvedExperiment, folder: str, step: int | None) -> LoadedModel:
    """Load the weights of a job folder into the model of an experiment; see `load`."""
    with job_errors("load", resolved):
        job = start_reading(resolved, folder)
        with job.checkpoints(read_only=True) as checkpoints:
            step = choose_step(checkpoints, step)
            state = job.restore(checkpoints, step, for_training=False).state
        return LoadedModel(job, state.for_inference(), path=folder, step=step)


def start_reading(resolved: ResolvedExperiment, folder: str) -> Job:
    """Build the parts of a job that only reads; nothing is written."""
    if jax.process_count() > 1:
        hint = "Use the command `runner` for jobs of several processes."
        raise UsageError("the Python interface runs in one process", hint=hint)
    start_devices()
    partitioner, task = build_parts(resolved)
    partitioner.start()
    partitioner.bind(task)
    options = RunOptions(job_log_dir=folder)
    # Standard output may hold generated text.
    observers = Observers([Progress(stream=sys.stderr)])
    return Job("load", resolved, options, absolute(folder), task, partitioner, observers)


class FolderModel(BaseExperiment, abstract=True):
    """The model of a Hugging Face folder, without data."""

    FOLDER: str
    """Folder with config.json and safetensors files."""
    DTYPE: str | None = None
    """Dtype of the weights and of the computation; None for that in which they are stored."""
    ADAPTERS: dict[str, float] | None = None
    """Weights of folders of PEFT, whose adapters are added; None for none."""
    CHAT_TEMPLATE: str | None = None
    """Chat template: a name such as `chatml`, a file or a folder; None for that of the folder."""

    def chat_template(self) -> str | None:
        """Return the chat template."""
        return self.CHAT_TEMPLATE

    def task(self) -> Config:
        """Return the config of a task with the model and its weights."""
        from layerkit.interop import hugging_face
        from layerkit.interop.peft import add_adapters

        dtype = self.DTYPE or hugging_face.stored_dtype(self.FOLDER)
        model = hugging_face.model_config(self.FOLDER, dtype=dtype, fprop_dtype=dtype)
        if hasattr(model, "decoder"):
            model.decoder = hugging_face.decoder_config(self.FOLDER)
        if self.ADAPTERS:
            model = add_adapters(model, self.ADAPTERS)
        learner = Learner.HParams.config(optimizer=Partial(optax.sgd), learning_rate=0.0)
        return SingleTask.HParams.config(
            name="lm",
            model=model,
            train=TrainHParams.HParams.config(learner=learner, num_train_steps=1),
            initial_weights=weights_of(self.FOLDER, self.ADAPTERS),
        )

    def datasets(self) -> list[Config]:
        """Return no data sets."""
        return []

    def tokenizer(self) -> Config | None:
        """Return the config of the folder's tokenizer; None if it has none."""
        for name in ("tokenizer.json", "tokenizer.model", "spiece.model"):
            if Path(self.FOLDER, name).is_file():
                return tokenizer_config(str(Path(self.FOLDER, name)))
        return None
