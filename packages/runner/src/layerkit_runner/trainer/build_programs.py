"""The programs of a job, made from the configs that an experiment lists.

Names are checked before any input is opened, and everything is made before a file is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from layerkit.config import Config, assigned_fields, target_of
from layerkit_inputs.base_input import BaseInput
from layerkit_inputs.prefetch import Prefetch
from layerkit_runner.config.required_fields import check_filled_in
from layerkit_runner.config.resolve import ResolvedExperiment
from layerkit_runner.data.infeed import make_input
from layerkit_runner.data.training_data import chosen_dataset, datasets_by_name, training_configs
from layerkit_runner.errors import UsageError, first_names
from layerkit_runner.trainer import (
    BaseProgram,
    DecodeProgram,
    EvalProgram,
    TrainProgram,
    TrainPrograms,
    eval_train,
)
from layerkit_runner.trainer.job import Job
from layerkit_runner.trainer.skipped_steps import SkippedSteps

# Of a training program, besides its data set: an experiment names that and job makes it.
_FILLED_IN = ("task", "partitioner", "name")


def train_programs(job: Job) -> TrainPrograms:
    """What trains: as the experiment lists it, else one program on the one training data set.

    Raises:
      UsageError: data sets and programs that do not go together, or fields that are refused.
    """
    by_name = check_train_programs(job.resolved)
    configs = job.resolved.train_programs or [Config(TrainProgram)]
    programs = [
        config.Instantiate(
            task=job.task,
            partitioner=job.partitioner,
            dataset=Prefetch(source=make_input(dataset, job.partitioner)),
            name=name if len(by_name) > 1 else None,
        )
        for (name, dataset), config in zip(by_name.items(), configs, strict=True)
    ]
    train = job.task.train
    skipped = SkippedSteps(
        train.max_consecutive_skipped_steps,
        train.num_train_steps,
        are_applied=not train.learner.skips_steps,
    )
    return TrainPrograms(programs, max_inflight_steps=train.max_inflight_steps, skipped=skipped)


def check_train_programs(resolved: ResolvedExperiment) -> dict[str, Config]:
    """The configs of the data sets to train on by name, in the order of the training programs.

    Raises:
      UsageError: they do not go together, or what is listed is no training program.
    """
    by_name = training_configs(resolved)
    for index, config in enumerate(resolved.train_programs or []):
        kind = target_of(config)
        if not (isinstance(kind, type) and issubclass(kind, TrainProgram)):
            raise UsageError(f"train_programs.{index} is a {kind.__qualname__}, no TrainProgram")
        check_filled_in(config, f"train_programs.{index}", by_job=_FILLED_IN)
    return by_name


def eval_programs(job: Job, training: TrainPrograms | None = None) -> list[BaseProgram]:
    """What evaluates: as the experiment lists it, else one program per held-out data set.

    Args:
      job: The job.
      training: Whose batches are evaluated too, if the task says so; None in a job without.

    Raises:
      UsageError: a name that is missing, unknown or there twice, or fields that are refused.
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


def eval_train_programs(job: Job, training: TrainPrograms) -> list[BaseProgram]:
    """What evaluates the next batch of each training program; nothing with `eval_skip_train`."""
    if job.task.train.eval_skip_train:
        return []
    return [
        eval_train.NextBatchEvalProgram(
            job.task,
            job.partitioner,
            program.next_batch,
            program.abstract_batch,
            eval_train.name_beside(program.name),
        )
        for program in training.programs
    ]


def decode_programs(job: Job) -> list[BaseProgram]:
    """What decodes: as the experiment lists it, else one program per decode data set.

    Raises:
      UsageError: as `eval_programs` does, or the model cannot decode.
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
    """The inputs of those programs that read one, by the name of the program."""
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
    """What a program is called; refuses a data set that is not there."""
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
        # One of its own: several programs may read the same data set.
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
