"""Functions that build the programs of a job from an experiment's configs, and check them.

Names are checked before any input is opened, and programs are built before a file is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from layerkit.config import Config, assigned_fields, target_of
from layerkit_inputs.base.base_input import BaseInput
from layerkit_runner.config.config_tree import check_required_fields
from layerkit_runner.config.requests import ResolvedExperiment
from layerkit_runner.data.host_inputs import make_input, prefetched
from layerkit_runner.data.train_inputs import (
    TrainInput,
    TrainInputs,
    chosen_dataset,
    datasets_by_name,
    training_configs,
)
from layerkit_runner.errors import UsageError
from layerkit_runner.optim.early_stopping import MetricRule, SkippedSteps, program_of
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
    by_name = check_train_programs(job.resolved)
    inputs = []
    for (name, dataset), config in zip(by_name.items(), _train_configs(job.resolved), strict=True):
        source = prefetched(make_input(dataset, job.partitioner))
        own_name = name if len(by_name) > 1 else None
        steps: Any = assigned_fields(config).get("steps", 1)
        inputs.append(TrainInput(source, job.partitioner, own_name, steps))
    return TrainInputs(inputs)


def train_programs(
    job: Job,
    inputs: TrainInputs,
    compiled: Sequence[CompiledStep],
    reports: Sequence[StepReports],
    skipped: SkippedSteps,
) -> TrainPrograms:
    """Build the training programs that the experiment lists, or one for its only data set."""
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
    """Return the configs of the training data sets by name, in the order of their programs."""
    by_name = training_configs(resolved)
    for index, config in enumerate(resolved.train_programs or []):
        kind = target_of(config)
        if not (isinstance(kind, type) and issubclass(kind, TrainProgram)):
            raise UsageError(
                field=f"train_programs.{index}",
                value=getattr(kind, "__qualname__", repr(kind)),
                expected="a config of TrainProgram",
            )
        check_required_fields(config, f"train_programs.{index}", by_job=_BY_JOB)
    return by_name


def eval_programs(job: Job, training: TrainInputs | None = None) -> list[BaseProgram]:
    """Build the eval programs that the experiment lists, or one for each held-out data set.

    The next batches of `training` are evaluated too unless `eval_skip_train` is set.
    """
    held_out = [config for config in job.resolved.datasets if not config.is_training]
    programs = _programs(job, "eval_programs", held_out, EvalProgram)
    of_training = [] if training is None else eval_train_programs(job, training)
    taken = {program.name for program in of_training} & {program.name for program in programs}
    for name in taken:
        raise UsageError(
            "two evaluations have the same name",
            field="name",
            value=name,
            expected="another name, since task.train.eval_skip_train=False evaluates the training"
            f" batches as {name!r}",
        )
    return [*of_training, *programs]


def eval_train_programs(job: Job, training: TrainInputs) -> list[BaseProgram]:
    """Build the programs that evaluate the next training batches; none with `eval_skip_train`."""
    if job.task.train.eval_skip_train:
        return []
    return [NextBatchEvalProgram(job.task, job.partitioner, data) for data in training.inputs]


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
            expected="a model that defines decode()",
            hint=f"Return [] from {method}(), or define decode() in the model.",
        )
    return _programs(job, "decode_programs", job.resolved.decode_datasets, DecodeProgram)


def inputs_of(programs: Iterable[BaseProgram]) -> dict[str, BaseInput]:
    """Return the inputs of the programs by program name."""
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
            raise UsageError(
                "two programs have the same name",
                owner=root,
                field="name",
                value=name,
                expected="a different name for each program",
            )
    pairs = zip(configs, names, strict=True)
    return [_build(job, config, name, by_name, root) for config, name in pairs]


def _name(config: Config, path: str, datasets: Iterable[str]) -> str:
    dataset = chosen_dataset(config, path, datasets)
    if dataset is None and issubclass(target_of(config), (EvalProgram, DecodeProgram)):
        raise UsageError("missing value", field=f"{path}.dataset", choices=datasets)
    name = assigned_fields(config).get("name", dataset)
    if name is None:
        raise UsageError(
            "missing value", field=f"{path}.name", hint="Give a name, or a dataset to name it."
        )
    return str(name)


def _build(
    job: Job, config: Config, name: str, datasets: dict[str, Config], root: str
) -> BaseProgram:
    dataset: Any = assigned_fields(config).get("dataset")
    if dataset is not None:
        # Each program has its own input, since several may read the same data set.
        dataset = make_input(datasets[dataset], job.partitioner)
    program = config.Instantiate(
        task=job.task,
        partitioner=job.partitioner,
        dataset=dataset,
        name=name,
        folder=job.directory / root.removesuffix("_programs"),
    )
    if not isinstance(program, BaseProgram):
        kind = type(program).__qualname__
        raise UsageError(owner=root, field=name, value=kind, expected="a config of BaseProgram")
    return program


def check_metric_names(
    task: SingleTask, programs: Sequence[BaseProgram], abstract_state: TrainState
) -> None:
    """Raise `UsageError` if an evaluation does not report a metric that a field of the task names.

    The named programs are traced. Otherwise a wrong name would fail at the first evaluation, which
    may be hours later.
    """
    wanted = {"task.train.save_best_metric": task.train.save_best_metric}
    if isinstance(task.early_stopping, MetricRule):
        wanted["task.early_stopping.metric"] = task.early_stopping.metric
    by_name = {program.name: program for program in programs}
    for field, path in wanted.items():
        name = None if path is None else program_of(path, by_name)
        names = None if name is None else by_name[name].trace(abstract_state)
        known = sorted(f"{name}/{metric}" for metric in names or ())
        if names is not None and path not in known:
            raise UsageError("unknown metric", field=field, value=path, choices=known)


def check_best_metric(train: TrainHParams, programs: Iterable[BaseProgram]) -> None:
    """Raise `UsageError` unless every checkpoint is evaluated by the metric of the best ones."""
    wanted = train.save_best_metric
    if wanted is None:
        return
    intervals = {program.name: program.interval_steps for program in programs}
    name = program_of(wanted, intervals)
    if name is None:
        raise UsageError(
            "unknown data set",
            field="task.train.save_best_metric",
            value=wanted,
            expected="DATASET/METRIC of a held-out data set",
            choices=[f"{name}/{wanted.rpartition('/')[2]}" for name in intervals],
        )
    interval, saves = intervals[name], train.save_interval_steps
    field = "task.train.eval_interval_steps" if interval is None else f"{name}.interval_steps"
    interval = train.eval_interval_steps if interval is None else interval
    if interval is None or saves % interval:
        raise UsageError(
            f"task.train.save_best_metric={wanted!r} needs an evaluation at every checkpoint",
            field=field,
            value=interval,
            expected=f"a divisor of task.train.save_interval_steps={saves}",
        )
