"""The data sets of a job: which ones it trains on, and whether all processes read the same data.

Readers that go by index cut one global order into the rows of each process. Processes whose files
differ (another patch release of Python has other sources, say) would each cut an order of their
own, and their evaluations would end apart and wait for one another.
"""

from __future__ import annotations

import json
import numbers
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from layerkit.config import Config, assigned_fields
from layerkit.errors import first_names
from layerkit.near_names import near_names
from layerkit_inputs.base_input import BaseInput
from layerkit_inputs.eval_padding import AllGather
from layerkit_runner.config.resolve import ResolvedExperiment
from layerkit_runner.data.infeed import as_usage_error, dataset_name
from layerkit_runner.errors import UsageError


def datasets_by_name(configs: Iterable[Config]) -> dict[str, Config]:
    """Configs of data sets by what they are called.

    Raises:
      UsageError: two have one name.
    """
    by_name: dict[str, Config] = {}
    for config in configs:
        name = dataset_name(config)
        if name in by_name:
            raise UsageError(f"two data sets are named {name!r}; give each a name of its own")
        by_name[name] = config
    return by_name


def chosen_dataset(program: Config, path: str, datasets: Iterable[str]) -> str | None:
    """The data set that the config of a program names, if it names one.

    Args:
      program: The config.
      path: Where it stands, for messages.
      datasets: Those there are for it.

    Raises:
      UsageError: it is none of them.
    """
    name: Any = assigned_fields(program).get("dataset")
    if name is not None and name not in datasets:
        raise UsageError(
            f"{path}.dataset={name!r} is no data set for it{near_names(str(name), datasets)}"
            f" There are {first_names(datasets) or 'none'}."
        )
    return name


def training_configs(resolved: ResolvedExperiment) -> dict[str, Config]:
    """Configs of the inputs to train on by name, in the order of the training programs.

    Raises:
      UsageError: there is none, or several and no programs that name each of them once.
    """
    configs = [config for config in resolved.datasets if config.is_training]
    if resolved.datasets and not configs:
        raise UsageError(_only_evaluates(resolved))
    if resolved.train_programs is None:
        if len(configs) != 1:
            turns = "; several take turns where train_programs() lists them" if configs else ""
            raise UsageError(
                f"{resolved.name}.datasets() must hold one input with is_training=True to train on,"
                f" not {len(configs)}{turns}"
            )
        return datasets_by_name(configs)
    by_name = datasets_by_name(configs)
    chosen: dict[str, Config] = {}
    for index, program in enumerate(resolved.train_programs):
        path = f"train_programs.{index}"
        steps: Any = assigned_fields(program).get("steps", 1)
        if not isinstance(steps, numbers.Integral) or steps < 1:
            raise UsageError(f"{path}.steps={steps!r} must be a whole number of at least 1")
        name = chosen_dataset(program, path, by_name)
        if name is None:
            raise UsageError(f"{path} needs a dataset; there are {first_names(by_name) or 'none'}")
        if name in chosen:
            raise UsageError(
                f"{path}.dataset={name!r} is that of another training program, and both would read"
                " the same examples; give it more steps there, or a data set of its own here"
            )
        chosen[name] = by_name[name]
    unread = [name for name in by_name if name not in chosen]
    if unread:
        raise UsageError(
            f"no training program reads {first_names(unread)}; train_programs() lists a"
            " Config(TrainProgram, dataset=…) for each data set with is_training=True"
        )
    return chosen


def training_config(resolved: ResolvedExperiment) -> Config:
    """The config of the only input to train on.

    Raises:
      UsageError: there is not exactly one.
    """
    configs = training_configs(resolved)
    if len(configs) > 1:
        raise UsageError(
            f"{resolved.name} trains on several data sets, {first_names(configs)}, and this needs"
            " an experiment that trains on one"
        )
    return next(iter(configs.values()))


def _only_evaluates(resolved: ResolvedExperiment) -> str:
    text = (
        f"{resolved.name} only evaluates, for none of its datasets() has is_training=True: use"
        " --mode=eval_once or --mode=eval"
    )
    trainer = resolved.experiment.trained_by
    if trainer is None:
        return text
    name = f"{trainer.__module__}.{trainer.__qualname__}"
    return f"{text}; to train or to plan, take {name}, whose model it evaluates"


def check_same_data(inputs: Mapping[str, BaseInput], all_gather: AllGather) -> None:
    """Compares where the inputs stand, and in which data, across processes.

    Args:
      inputs: By name; those whose state is not the same on every process are left out.
      all_gather: A JSON value of this process → those of all processes.

    Raises:
      UsageError: on every process, naming the inputs and the processes that differ from process 0;
        or the data cannot be read.
    """
    names = [name for name, dataset in inputs.items() if dataset.state_scope == "global"]
    with as_usage_error():
        mine = [_digest(inputs[name].get_state()) for name in names]
    digests = all_gather(mine)
    for column, name in enumerate(names):
        others = [
            process
            for process, theirs in enumerate(digests)
            if theirs[column] != digests[0][column]
        ]
        if others:
            raise UsageError(
                f"the data of {name!r} differ between processes: {others} read other data than"
                " process 0. Give every machine the same files (and Python release, where the text"
                " is Python's own)."
            )


def _digest(state: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(state, sort_keys=True).encode())
