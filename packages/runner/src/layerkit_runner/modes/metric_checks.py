"""Metrics that fields name: whether the evaluations of a job report them.

Looked at before the first step, since a name that nobody reports would otherwise come to light at
the first evaluation, which may be hours later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from layerkit.near_names import near_names
from layerkit_runner.errors import UsageError, first_names
from layerkit_runner.files.metric_paths import program_of
from layerkit_runner.optim.early_stopping import EarlyStopping
from layerkit_runner.trainer import BaseProgram
from layerkit_runner.training.task import SingleTask
from layerkit_runner.training.train_hparams import TrainHParams
from layerkit_runner.training.train_state import TrainState


def check_metric_names(
    task: SingleTask, programs: Sequence[BaseProgram], abstract_state: TrainState
) -> None:
    """Whether the metrics that the fields of a task name are reported.

    Args:
      task: Names the metric of the best checkpoints, and that of early stopping.
      programs: The evaluations.
      abstract_state: Shapes, dtypes and shardings of the state on the devices.

    Raises:
      UsageError: an evaluation that is named does not report the metric.
    """
    wanted = {"task.train.save_best_metric": task.train.save_best_metric}
    if isinstance(task.early_stopping, EarlyStopping):
        wanted["task.early_stopping.metric"] = task.early_stopping.metric
    by_name = {program.name: program for program in programs}
    for field, path in wanted.items():
        name = None if path is None else program_of(path, by_name)
        names = None if name is None else by_name[name].metric_names(abstract_state)
        if names is None or path in (known := sorted(f"{name}/{metric}" for metric in names)):
            continue
        raise UsageError(
            f"{field}={path!r} is no metric of an evaluation{near_names(str(path), known)} There"
            f" are {first_names(known)}."
        )


def check_best_metric(train: TrainHParams, programs: Iterable[BaseProgram]) -> None:
    """Whether the metric by which the best checkpoints are told can be one of these evaluations.

    Args:
      train: Names the metric, and says how often is saved.
      programs: The evaluations.

    Raises:
      UsageError: it names none of them, or not every checkpoint is evaluated.
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
