"""The programs of a job, made from the configs that an experiment lists.

Names are checked before any input is opened, and everything is made before a file is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from layerkit.config import Config, assigned_fields, target_of
from layerkit.near_names import near_names
from layerkit_inputs.base_input import BaseInput
from layerkit_runner.errors import UsageError, first_names
from layerkit_runner.feeds.infeed import dataset_name, make_input
from layerkit_runner.job import Job
from layerkit_runner.programs import (
    BaseProgram,
    DecodeProgram,
    EvalProgram,
    TrainProgram,
    eval_train,
)


def eval_programs(job: Job, training: TrainProgram | None = None) -> list[BaseProgram]:
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
    if of_training and any(program.name == eval_train.NAME for program in programs):
        raise UsageError(
            f"the name {eval_train.NAME!r} of an evaluation is that of the training batches, which"
            " task.train.eval_skip_train=False evaluates too; give it another name"
        )
    return [*of_training, *programs]


def eval_train_programs(job: Job, training: TrainProgram) -> list[BaseProgram]:
    """What evaluates the next training batch: one program, or none with `eval_skip_train`."""
    if job.task.train.eval_skip_train:
        return []
    next_batch = training.next_batch
    return [eval_train.NextBatchEvalProgram(job.task, job.partitioner, next_batch)]


def decode_programs(job: Job) -> list[BaseProgram]:
    """What decodes: as the experiment lists it, else one program per decode data set.

    Raises:
      UsageError: as `eval_programs` does.
    """
    return _programs(job, "decode_programs", job.resolved.decode_datasets, DecodeProgram)


def inputs_of(programs: Iterable[BaseProgram]) -> dict[str, BaseInput]:
    """The inputs of those programs that read one, by the name of the program."""
    return {p.name: p.dataset for p in programs if p.dataset is not None}


def _programs(
    job: Job, root: str, datasets: Sequence[Config], default: type[BaseProgram]
) -> list[BaseProgram]:
    by_name: dict[str, Config] = {}
    for dataset in datasets:
        name = dataset_name(dataset)
        if name in by_name:
            raise UsageError(f"two data sets are named {name!r}; give each a name of its own")
        by_name[name] = dataset
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
    fields = assigned_fields(config)
    dataset = fields.get("dataset")
    if dataset is not None and dataset not in datasets:
        raise UsageError(
            f"{path}.dataset={dataset!r} is no data set for it{near_names(str(dataset), datasets)}"
            f" There are {first_names(datasets) or 'none'}."
        )
    if dataset is None and issubclass(target_of(config), (EvalProgram, DecodeProgram)):
        raise UsageError(
            f"{path} needs a dataset; there are {first_names(datasets) or 'none'} for it"
        )
    name = fields.get("name", dataset)
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
