"""Lookup and checks of the SeqIO tasks of an input, before any data are read.

SeqIO keeps some settings per process, such as the folder of TFDS data. In this module a folder
belongs to one input: the tasks are copied, and the copies read from the folder.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple, Protocol, runtime_checkable

from layerkit.config.checks import check_choice
from layerkit.config.checks import require as require_valid
from layerkit.errors import ConfigError
from layerkit_inputs.base.errors import first_line, require_extra

_NEEDED_BY = "SeqIOInput"


@runtime_checkable
class TaskOrMixture(Protocol):
    """A `seqio.Task` or `seqio.Mixture`."""

    def get_dataset(self, sequence_length: Any, split: str) -> Any:
        """Return the examples of a split."""


class WeightedTask(NamedTuple):
    """A task with its rate in the mixture."""

    task: Any
    """The `seqio.Task`."""
    rate: Callable[[], float]
    """Function that returns the rate, in any unit; it may read the size of the data set."""


@functools.cache
def import_tensorflow() -> ModuleType:
    """Import TensorFlow and hide accelerators from it, since JAX uses them."""
    tf = require_extra("tensorflow", needed_by=_NEEDED_BY)
    for kind in ("GPU", "TPU"):
        if tf.config.get_visible_devices(kind):
            # Raises RuntimeError if TensorFlow has already initialized the devices.
            tf.config.set_visible_devices([], kind)
    return tf


@functools.cache
def import_seqio() -> ModuleType:
    """Import SeqIO, after `import_tensorflow`."""
    import_tensorflow()
    return require_extra("seqio", needed_by=_NEEDED_BY)


def find_tasks(
    mixture_or_task: Any,
    *,
    split: str,
    feature_lengths: Mapping[str, int],
    tfds_data_dir: str | None,
    is_training: bool,
) -> list[WeightedTask]:
    """Return the tasks of a mixture, or a single task, that have a split, sorted by name.

    Args:
      mixture_or_task: Registered name of a task or mixture, or the object itself.
      split: Name of the split.
      feature_lengths: Largest number of tokens by task feature; every feature must be present.
      tfds_data_dir: Folder of TFDS data. None: the folder that the task gives.
      is_training: True if tasks are mixed by their rates.

    Raises:
      ConfigError: The mixture, task, split, feature or folder does not exist, or the tasks cannot
        be mixed.
    """
    seqio = import_seqio()
    original = find_provider(mixture_or_task)
    provider = original
    if tfds_data_dir is not None:
        provider = _move_data_dir(seqio, original, tfds_data_dir)
    tasks = seqio.get_subtasks(provider)
    features = tasks[0].output_features
    for name in feature_lengths:
        check_choice(None, sorted(features), task_feature_lengths=name)
    required = [name for name, feature in features.items() if feature.required]
    missing = [name for name in required if name not in feature_lengths]
    expected = f"a length for each feature of {tasks[0].name}; missing: {', '.join(missing)}"
    require_valid(not missing, None, "task_feature_lengths", dict(feature_lengths), expected)
    for task in tasks:
        if isinstance(task.source, seqio.TfdsDataSource) and (problem := _data_problem(task)):
            raise ConfigError(f"task {task.name}: {problem}", field="tfds_data_dir")
    splits = {name for task in tasks for name in task.splits}
    check_choice(None, sorted(splits), split_name=split)
    if without := [task.name for task in tasks if split not in task.splits]:
        logging.getLogger(__name__).warning(
            "%s: skipping tasks without the split %r: %s", provider.name, split, ", ".join(without)
        )
    if isinstance(provider, seqio.Task):
        return [WeightedTask(provider, lambda: 1.0)]
    if len(tasks) > 1:
        provider._check_compatible_features()
    if is_training:
        default = inspect.signature(seqio.Mixture.__init__).parameters["sample_fn"].default
        field = f"sample_fn of mixture {provider.name}"
        expected = "the default, since the state of another one cannot be saved"
        is_default = original._sample_fn is default
        require_valid(is_default, None, field, original._sample_fn, expected)
    return [
        WeightedTask(task, functools.partial(provider.get_rate, task))
        for task in tasks
        if split in task.splits
    ]


def find_provider(mixture_or_task: Any) -> Any:
    """Return the task or mixture of a registered name, or the object itself.

    Raises:
      ConfigError: The name is not registered, or the object is neither task nor mixture.
    """
    seqio = import_seqio()
    if isinstance(mixture_or_task, seqio.Task | seqio.Mixture):
        return mixture_or_task
    names = sorted({*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()})
    if mixture_or_task not in names:
        raise ConfigError(
            "not a registered task or mixture",
            field="mixture_name",
            value=mixture_or_task,
            choices=names,
            hint="Import the module that registers it, or set mixture_or_task.",
        )
    return seqio.get_mixture_or_task(mixture_or_task)


def _data_problem(task: Any) -> str | None:
    """Return why TFDS data cannot be read, or None. SeqIO would download missing data."""
    loader = task.source.tfds_dataset
    if loader.tfds_splits is not None:
        return None
    tfds = require_extra("tensorflow_datasets", needed_by=_NEEDED_BY)
    problem = "no complete data set there; run tfds.load(name, data_dir=...) once"
    try:
        if loader.builder.is_prepared():
            return None
    except (tfds.core.DatasetNotFoundError, AssertionError, OSError, ValueError) as error:
        problem = first_line(error)
    folder = loader.data_dir or tfds.core.constants.DATA_DIR
    return f"cannot find {loader.name} in {folder}: {problem}"


def _move_data_dir(seqio: ModuleType, provider: Any, data_dir: str) -> Any:
    """Return a copy of a task or mixture whose TFDS sources read from `data_dir`."""
    tasks = {id(task): task for task in seqio.get_subtasks(provider)}
    moved = {}
    for key, task in tasks.items():
        source = task.source
        if isinstance(source, seqio.TfdsDataSource) and source.tfds_dataset.tfds_splits is None:
            moved[key], loader = copy.copy(task), copy.copy(source.tfds_dataset)
            loader.override_data_dir(data_dir)
            moved[key]._source = copy.copy(source)
            moved[key]._source._tfds_dataset = loader
    expected = f"None, since {provider.name} reads no TFDS data of one folder"
    require_valid(moved, None, "tfds_data_dir", data_dir, expected)
    # Copies the mixtures, with these tasks in place of theirs.
    return copy.deepcopy(provider, tasks | moved)
