"""Functions that build the programs of a job from an experiment's configs, and check them.

Names are checked before any input is opened, and programs are built before a file is written.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from layerkit.config import Config, assigned_fields, target_of
from layerkit.config.checks import check_divisible, check_sizes
from layerkit_inputs.base.base_input import BaseInput
from layerkit_runner.config.config_tree import check_class, check_required_fields
from layerkit_runner.config.requests import ResolvedExperiment
from layerkit_runner.data.host_inputs import make_input, prefetched
from layerkit_runner.data.train_inputs import (
    TrainInput,
    TrainInputs,
    datasets_by_name,
    named_dataset,
    run_stages,
    training_configs,
)
from layerkit_runner.errors import UsageError, as_usage_error
from layerkit_runner.optim.early_stopping import MetricRule, program_of
from layerkit_runner.run.job import Job
from layerkit_runner.run.programs.decode_program import DecodeProgram
from layerkit_runner.run.programs.eval_program import BaseProgram, EvalProgram, NextBatchEvalProgram
from layerkit_runner.run.programs.train_program import (
    CompiledStep,
    StepReports,
    TrainProgram,
    TrainPrograms,
)
from layerkit_runner.step.task import SingleTask
from layerkit_runner.step.train_hparams import TrainHParams
from layerkit_runner.step.train_state import TrainState

# Arguments of a training program that the job sets, besides its data set.
_BY_JOB = ("compiled", "name", "reports")


def train_inputs(job: Job) -> TrainInputs:
    """Open the training data sets, in the order of the training programs."""
    by_name = train_dataset_configs(job.resolved)
    if stages := run_stages(job.resolved):
        from layerkit_runner.data.staged_inputs import staged_inputs  # late, for a fast start

        (dataset,) = by_name.values()
        staged = staged_inputs(dataset, stages, job.partitioner)
        # Devices split each part of a batch.
        num_parts = job.task.train.gradient_accumulation_steps
        num_shards = job.partitioner.num_batch_shards()
        name = "task.train.gradient_accumulation_steps times the devices of a batch"
        parts = (name, num_parts * num_shards)
        with as_usage_error():
            for index, stage in enumerate(staged):
                check_divisible(f"STAGES[{index}]", by=parts, batch=stage.rows.batch)
        return TrainInputs(staged)
    inputs = []
    configs = job.resolved.train_programs or [Config(TrainProgram)]
    for (name, dataset), config in zip(by_name.items(), configs, strict=True):
        source = prefetched(make_input(dataset, job.partitioner))
        steps: Any = assigned_fields(config).get("steps", 1)
        program_name = name if len(by_name) > 1 else None
        inputs.append(TrainInput(source, job.partitioner, program_name, steps))
    return TrainInputs(inputs)


def train_programs(
    job: Job,
    inputs: TrainInputs,
    compiled: Sequence[CompiledStep],
    reports: Sequence[StepReports],
    news: collections.deque[Callable[[], None]],
) -> TrainPrograms:
    """Build the training programs that the experiment lists, or one for its only data set."""
    configs = job.resolved.train_programs or [Config(TrainProgram) for _ in inputs.inputs]
    parts = zip(configs, inputs.inputs, compiled, reports, strict=True)
    programs = [
        config.Instantiate(compiled=step, dataset=data, name=data.name, reports=receivers)
        for config, data, step, receivers in parts
    ]
    return TrainPrograms(inputs, programs, job.task.train, news=news)


def train_dataset_configs(resolved: ResolvedExperiment) -> dict[str, Config]:
    """Return the configs of the training data sets by name, in the order of their programs."""
    by_name = training_configs(resolved)
    for index, config in enumerate(resolved.train_programs or []):
        path = f"train_programs.{index}"
        check_class(config, path, TrainProgram)
        check_required_fields(config, path, by_job=_BY_JOB)
        check_sizes(path, steps=assigned_fields(config).get("steps", 1))
    return by_name


def eval_programs(job: Job, training: TrainInputs | None = None) -> list[BaseProgram]:
    """Build the eval programs that the experiment lists, or one for each held-out data set.

    The next batches of `training` are evaluated too unless `eval_skip_train` is set.
    """
    held_out = [config for config in job.resolved.datasets if not config.is_training]
    next_batches = [] if training is None else eval_train_programs(job, training)
    return [*next_batches, *_programs(job, "eval_programs", held_out, EvalProgram, next_batches)]


def eval_train_programs(job: Job, training: TrainInputs) -> list[BaseProgram]:
    """Build the programs that evaluate the next training batches; none with `eval_skip_train`."""
    if job.task.train.eval_skip_train:
        return []
    return [NextBatchEvalProgram(job.task, job.partitioner, data) for data in training.datasets]


def decode_programs(job: Job) -> list[BaseProgram]:
    """Build the decode programs that the experiment lists, or one for each decode data set."""
    configs = job.resolved.decode_programs
    decodings = job.resolved.decode_datasets
    if configs is not None:
        decodings = [one for one in configs if issubclass(target_of(one), DecodeProgram)]
    if decodings and not job.task.model.can_decode:
        method = "decode_datasets" if configs is None else "decode_programs"
        raise UsageError(
            "the model cannot decode",
            owner=f"{job.resolved.name}.{method}()",
            field="model",
            value=type(job.task.model).__qualname__,
        )
    return _programs(job, "decode_programs", job.resolved.decode_datasets, DecodeProgram)


def inputs_of(programs: Iterable[BaseProgram]) -> dict[str, BaseInput]:
    """Return the inputs of the programs by program name."""
    return {p.name: p.dataset for p in programs if p.dataset is not None}


def _programs(
    job: Job,
    root: str,
    datasets: Sequence[Config],
    default: type[BaseProgram],
    others: Sequence[BaseProgram] = (),
) -> list[BaseProgram]:
    """Build the programs of `root`, whose names must differ from one another and from `others`."""
    by_name = datasets_by_name(datasets)
    configs = getattr(job.resolved, root)
    if configs is None:
        configs = [Config(default, dataset=name) for name in by_name]
    names = [_name(config, f"{root}.{index}", by_name) for index, config in enumerate(configs)]
    counts = collections.Counter([*names, *(program.name for program in others)])
    if repeated := [name for name, count in counts.items() if count > 1]:
        expected = "a different name for each program"
        raise UsageError(owner=root, field="name", value=repeated[0], expected=expected)
    pairs = zip(configs, names, strict=True)
    return [_build(job, config, name, by_name, root) for config, name in pairs]


def _name(config: Config, path: str, datasets: Iterable[str]) -> str:
    check_class(config, path, BaseProgram)
    dataset = named_dataset(config, path, datasets)
    name = assigned_fields(config).get("name", dataset)
    needs_data = issubclass(target_of(config), (EvalProgram, DecodeProgram))
    if name is None or (needs_data and dataset is None):
        field = "dataset" if needs_data else "name"
        raise UsageError("missing value", field=f"{path}.{field}", choices=datasets)
    return str(name)


def _build(
    job: Job, config: Config, name: str, datasets: dict[str, Config], root: str
) -> BaseProgram:
    dataset: Any = assigned_fields(config).get("dataset")
    if dataset is not None:
        # Each program has its own input, since several may read the same data set.
        dataset = make_input(datasets[dataset], job.partitioner)
    return config.Instantiate(
        task=job.task,
        partitioner=job.partitioner,
        dataset=dataset,
        name=name,
        folder=job.directory / root.removesuffix("_programs"),
    )


def check_metrics(
    task: SingleTask, programs: Sequence[BaseProgram], abstract_state: TrainState
) -> None:
    """Raise `UsageError` if a field of the task names a metric that no evaluation reports in time.

    The named programs are traced. Otherwise a wrong name would fail at the first evaluation, which
    may be hours later.
    """
    by_name = {program.name: program for program in programs}
    if (best := task.train.save_best_metric) is not None:
        _check_metric("task.train.save_best_metric", best, by_name, abstract_state)
        _check_evaluated_when_saved(task.train, by_name[str(program_of(best, by_name))])
    rule = task.early_stopping
    if isinstance(rule, MetricRule) and program_of(rule.metric, by_name) is not None:
        _check_metric("task.early_stopping.metric", rule.metric, by_name, abstract_state)


def _check_metric(
    field: str, path: str, programs: dict[str, BaseProgram], abstract_state: TrainState
) -> None:
    name = program_of(path, programs)
    names = {path} if name is None else programs[name].trace(abstract_state)
    known = sorted(f"{name}/{metric}" for metric in names or ())
    if name is None:
        known = [f"{program}/{path.rpartition('/')[2]}" for program in programs]
    if names is not None and path not in known:
        raise UsageError("unknown metric", field=field, value=path, choices=known)


def _check_evaluated_when_saved(train: TrainHParams, program: BaseProgram) -> None:
    """Raise `UsageError` unless a program runs at every checkpoint."""
    field, interval = f"{program.name}.interval_steps", program.interval_steps
    if interval is None:
        field, interval = "task.train.eval_interval_steps", train.eval_interval_steps
    if interval is None or train.save_interval_steps % interval:
        raise UsageError(
            "task.train.save_best_metric needs an evaluation at every checkpoint",
            field=field,
            value=interval,
            expected=f"a divisor of task.train.save_interval_steps={train.save_interval_steps}",
        )
