"""The programs of a job, built from the configs that an experiment lists, and their checks.

Names are checked before any input is opened, and everything is built before a file is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from layerkit.config import Config, assigned_fields, target_of
from layerkit.errors import first_names
from layerkit.near_names import near_names
from layerkit_inputs.base_input import BaseInput
from layerkit_inputs.prefetch import Prefetch
from layerkit_runner.config.config_tree import check_filled_in
from layerkit_runner.config.resolve import ResolvedExperiment
from layerkit_runner.data.infeed import make_input
from layerkit_runner.data.training_data import chosen_dataset, datasets_by_name, training_configs
from layerkit_runner.errors import UsageError
from layerkit_runner.optim.early_stopping import EarlyStopping, program_of
from layerkit_runner.trainer.base import BaseProgram
from layerkit_runner.trainer.decode import DecodeProgram
from layerkit_runner.trainer.eval import EvalProgram, NextBatchEvalProgram
from layerkit_runner.trainer.job import Job
from layerkit_runner.trainer.skipped_steps import SkippedSteps
from layerkit_runner.trainer.train import (
    CompiledStep,
    StepReports,
    TrainInput,
    TrainInputs,
    TrainProgram,
    TrainPrograms,
)
from layerkit_runner.training.task import SingleTask
from layerkit_runner.training.train_hparams import TrainHParams
from layerkit_runner.training.train_state import TrainState

# Arguments of a training program that the job fills in, besides its data set.
_BY_JOB = ("compiled", "name", "reports")


def train_inputs(job: Job) -> TrainInputs:
    """Open the training data sets, in the order of the training programs.

    Raises:
      UsageError: Data sets and programs do not go together, or a field is refused.
    """
    by_name = check_train_programs(job.resolved)
    return TrainInputs(
        [
            TrainInput(
                Prefetch(source=make_input(dataset, job.partitioner)),
                job.partitioner,
                name if len(by_name) > 1 else None,
                assigned_fields(config).get("steps", 1),
            )
            for (name, dataset), config in zip(
                by_name.items(), _train_configs(job.resolved), strict=True
            )
        ]
    )


def train_programs(
    job: Job,
    inputs: TrainInputs,
    compiled: Sequence[CompiledStep],
    reports: Sequence[StepReports],
    skipped: SkippedSteps,
) -> TrainPrograms:
    """Build the training programs that the experiment lists, or else the one of its data set.

    Args:
      job: The job.
      inputs: Data sets.
      compiled: Compiled step of each data set.
      reports: Receivers of what the steps of each program report.
      skipped: Counts of steps that were not valid.
    """
    parts = zip(_train_configs(job.resolved), inputs.inputs, compiled, reports, strict=True)
    programs = [
        config.Instantiate(compiled=step, dataset=data, name=data.name, reports=receivers)
        for config, data, step, receivers in parts
    ]
    inflight = job.task.train.max_inflight_steps
    return TrainPrograms(inputs, programs, max_inflight_steps=inflight, skipped=skipped)


def _train_configs(resolved: ResolvedExperiment) -> list[Config]:
    return resolved.train_programs or [Config(TrainProgram)]


def check_train_programs(resolved: ResolvedExperiment) -> dict[str, Config]:
    """Return the configs of the training data sets by name, in the order of their programs.

    Raises:
      UsageError: They do not go together, or what is listed is no training program.
    """
    by_name = training_configs(resolved)
    for index, config in enumerate(resolved.train_programs or []):
        kind = target_of(config)
        if not (isinstance(kind, type) and issubclass(kind, TrainProgram)):
            raise UsageError(f"train_programs.{index} is a {kind.__qualname__}, no TrainProgram")
        check_filled_in(config, f"train_programs.{index}", by_job=_BY_JOB)
    return by_name


def eval_programs(job: Job, training: TrainInputs | None = None) -> list[BaseProgram]:
    """Build the eval programs that the experiment lists, or else one for each held-out data set.

    Args:
      job: The job.
      training: Training data sets, whose next batches are evaluated too if the task says so; None
        for a job that does not train.

    Raises:
      UsageError: A name is missing, unknown or given twice, or a field is refused.
    """
    held_out = [config for config in job.resolved.datasets if not config.is_training]
    programs = _programs(job, "eval_programs", held_out, EvalProgram)
    of_training = [] if training is None else eval_train_programs(job, training)
    taken = {program.name for program in of_training}
    for name in (program.name for program in programs if program.name in taken):
        raise UsageError(
            f"the name {name!r} of an evaluation is that of the training batches, which"
            " task.train.eval_skip_train=False evaluates too; give it another name"
        )
    return [*of_training, *programs]


def eval_train_programs(job: Job, training: TrainInputs) -> list[BaseProgram]:
    """Build the programs that evaluate the next training batches; none with `eval_skip_train`."""
    if job.task.train.eval_skip_train:
        return []
    return [NextBatchEvalProgram(job.task, job.partitioner, data) for data in training.inputs]


def decode_programs(job: Job) -> list[BaseProgram]:
    """Build the decode programs that the experiment lists, or else one for each decode data set.

    Raises:
      UsageError: As for `eval_programs`, or the model cannot decode.
    """
    configs = job.resolved.decode_programs
    decodings = job.resolved.decode_datasets
    if configs is not None:
        decodings = [one for one in configs if issubclass(target_of(one), DecodeProgram)]
    if decodings and not job.task.model.can_decode:
        method = "decode_datasets" if configs is None else "decode_programs"
        raise UsageError(
            f"{job.resolved.name}.{method}() has {len(decodings)} to decode, but"
            f" {type(job.task.model).__qualname__} cannot decode. Expected a model that defines"
            f" decode(). Return [] from {method}(), or define decode() in the model."
        )
    return _programs(job, "decode_programs", job.resolved.decode_datasets, DecodeProgram)


def inputs_of(programs: Iterable[BaseProgram]) -> dict[str, BaseInput]:
    """Return the inputs of the programs that read one, by the name of the program."""
    return {p.name: p.dataset for p in programs if p.dataset is not None}


def _programs(
    job: Job, root: str, datasets: Sequence[Config], default: type[BaseProgram]
) -> list[BaseProgram]:
    by_name = datasets_by_name(datasets)
    configs = getattr(job.resolved, root)
    if configs is None:
        configs = [Config(default, dataset=name) for name in by_name]
    names = [_name(config, f"{root}.{index}", by_name) for index, config in enumerate(configs)]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{root}: two programs are named {name!r}; give each a name")
    return [
        _build(job, config, name, by_name, root)
        for config, name in zip(configs, names, strict=True)
    ]


def _name(config: Config, path: str, datasets: Iterable[str]) -> str:
    """Return the name of a program; raise UsageError if its data set is unknown."""
    dataset = chosen_dataset(config, path, datasets)
    if dataset is None and issubclass(target_of(config), (EvalProgram, DecodeProgram)):
        raise UsageError(
            f"{path} needs a dataset; there are {first_names(datasets) or 'none'} for it"
        )
    name = assigned_fields(config).get("name", dataset)
    if name is None:
        raise UsageError(f"{path} needs a name, or a dataset, after which it is called")
    return str(name)


def _build(
    job: Job, config: Config, name: str, datasets: dict[str, Config], root: str
) -> BaseProgram:
    dataset: Any = assigned_fields(config).get("dataset")
    if dataset is not None:
        # Each program has an input of its own, since several may read the same data set.
        dataset = make_input(datasets[dataset], job.partitioner)
    program = config.Instantiate(
        task=job.task,
        partitioner=job.partitioner,
        dataset=dataset,
        name=name,
        folder=job.directory / root.removesuffix("_programs"),
    )
    if not isinstance(program, BaseProgram):
        raise UsageError(f"{root}: {name!r} is a {type(program).__qualname__}, not a BaseProgram")
    return program


def check_metric_names(
    task: SingleTask, programs: Sequence[BaseProgram], abstract_state: TrainState
) -> None:
    """Check that the evaluations report the metrics that fields of the task name.

    The programs that are named are traced, since a wrong name would otherwise be found at the first
    evaluation, which may be hours later.

    Args:
      task: Task, which names the metrics of the best checkpoints and of early stopping.
      programs: Eval programs.
      abstract_state: Shapes, dtypes and shardings of the state on the devices.

    Raises:
      UsageError: An evaluation that is named does not report the metric.
    """
    wanted = {"task.train.save_best_metric": task.train.save_best_metric}
    if isinstance(task.early_stopping, EarlyStopping):
        wanted["task.early_stopping.metric"] = task.early_stopping.metric
    by_name = {program.name: program for program in programs}
    for field, path in wanted.items():
        name = None if path is None else program_of(path, by_name)
        names = None if name is None else by_name[name].trace(abstract_state)
        if names is None or path in (known := sorted(f"{name}/{metric}" for metric in names)):
            continue
        raise UsageError(
            f"{field}={path!r} is no metric of an evaluation{near_names(str(path), known)} There"
            f" are {first_names(known)}."
        )


def check_best_metric(train: TrainHParams, programs: Iterable[BaseProgram]) -> None:
    """Check that every checkpoint is evaluated by the metric that chooses the best checkpoints.

    Args:
      train: Hyperparameters, which name the metric and the save interval.
      programs: Eval programs.

    Raises:
      UsageError: The metric names none of the programs, or not every checkpoint is evaluated.
    """
    wanted = train.save_best_metric
    if wanted is None:
        return
    own_intervals = {program.name: program.interval_steps for program in programs}
    name = program_of(wanted, own_intervals)
    if name is None:
        raise UsageError(
            f"task.train.save_best_metric={wanted!r} names no held-out data set"
            f"{near_names(wanted.split('/')[0], own_intervals)} It is written DATASET/METRIC, and"
            f" the data sets are {first_names(own_intervals) or 'none'}."
        )
    own, saves = own_intervals[name], train.save_interval_steps
    interval = train.eval_interval_steps if own is None else own
    if interval is None or saves % interval:
        field = "eval_interval_steps" if own is None else f"{name}.interval_steps"
        raise UsageError(
            f"task.train.save_best_metric={wanted!r} needs an evaluation at every checkpoint:"
            f" save_interval_steps={saves} must be a multiple of {field}={interval}"
        )
