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
from layerkit_inputs.base.errors import require_extra
from layerkit_inputs.base.eval_padding import ROW_MARKS

_NEEDED_BY = "SeqIOInput"

# Names of the arrays of a batch, which a feature that is passed through must not replace.
_BATCH_NAMES = frozenset(
    (
        *("ids", "labels", "weights", "paddings", "segment_ids", "segment_pos"),
        *("inputs_indicator", "prompt_lengths", "src", "tgt"),
        *ROW_MARKS,
    )
)


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
    owner: str,
) -> list[WeightedTask]:
    """Return the tasks of a mixture, or a single task, that have a split, sorted by name.

    Args:
      mixture_or_task: Registered name of a task or mixture, or the object itself.
      split: Name of the split.
      feature_lengths: Largest number of tokens by task feature; every feature must be present.
      tfds_data_dir: Folder of TFDS data. None: the folder that the task gives.
      is_training: True if tasks are mixed by their rates.
      owner: Label of the input, for errors.

    Raises:
      ConfigError: The mixture, task, split, feature or folder does not exist, or the tasks cannot
        be mixed.
    """
    seqio = import_seqio()
    mixture_or_task = find_provider(mixture_or_task, owner=owner)
    if tfds_data_dir is not None:
        mixture_or_task = _with_data_dir(seqio, mixture_or_task, tfds_data_dir, owner)
    tasks = seqio.get_subtasks(mixture_or_task)
    _check_features(tasks, feature_lengths, owner)
    _check_vocabularies(tasks, owner)
    if cached := [task.name for task in tasks if task.requires_caching]:
        raise ConfigError(
            "SeqIO's offline cache is not supported",
            owner=owner,
            field="tasks with required caching",
            value=cached,
            hint="Make their CacheDatasetPlaceholder with required=False.",
        )
    splits = {task.name: list(_splits(seqio, task, owner)) for task in tasks}
    chosen = [task for task in tasks if split in splits[task.name]]
    if not chosen:
        known = sorted(set().union(*splits.values()))
        hint = (
            "To read parts or sums of splits, name them in the task: TfdsDataSource(..., "
            "splits={'name': 'train[:90%]'})."
        )
        raise ConfigError(
            owner=owner,
            field="split_name",
            value=split,
            choices=known,
            hint=hint if set(split) & set("+[") else None,
        )
    if without := [task.name for task in tasks if task not in chosen]:
        logging.getLogger(__name__).warning(
            "%s: skipping tasks without the split %r: %s",
            mixture_or_task.name,
            split,
            ", ".join(without),
        )
    if isinstance(mixture_or_task, seqio.Task):
        return [WeightedTask(mixture_or_task, lambda: 1.0)]
    mixture = mixture_or_task
    if is_training:
        _check_sampling(seqio, mixture, owner)
    return [WeightedTask(task, functools.partial(mixture.get_rate, task)) for task in chosen]


def find_provider(mixture_or_task: Any, *, owner: str) -> Any:
    """Return the task or mixture of a registered name, or the object that is given.

    Raises:
      ConfigError: The name is not registered, or the object is neither task nor mixture.
    """
    seqio = import_seqio()
    if isinstance(mixture_or_task, str):
        return _find_registered(seqio, mixture_or_task, owner)
    is_provider = isinstance(mixture_or_task, seqio.Task | seqio.Mixture)
    expected = "a seqio.Task, a seqio.Mixture or a registered name"
    require_valid(is_provider, owner, "mixture_or_task", mixture_or_task, expected)
    return mixture_or_task


def _find_registered(seqio: ModuleType, name: str, owner: str) -> Any:
    known = sorted({*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()})
    if name not in known:
        raise ConfigError(
            "not registered" if known else "no task or mixture is registered",
            owner=owner,
            field="mixture_name",
            value=name,
            choices=known,
            hint="Import the module that registers it.",
        )
    return seqio.get_mixture_or_task(name)


def _check_features(tasks: list[Any], lengths: Mapping[str, int], owner: str) -> None:
    features = tasks[0].output_features
    for name in lengths:
        check_choice(owner, sorted(features), task_feature_lengths=name)
    missing = [name for name, feature in features.items() if feature.required]
    missing = [name for name in missing if name not in lengths]
    expected = f"a length for each feature of {tasks[0].name}; missing: {', '.join(missing)}"
    require_valid(not missing, owner, "task_feature_lengths", dict(lengths), expected)
    for name in lengths:
        field = f"task_feature_lengths[{name!r}]"
        expected = "a feature with another name than the arrays of a batch"
        require_valid(name not in _BATCH_NAMES, owner, field, name, expected)
        dtype, rank = features[name].dtype, features[name].rank
        is_vector = rank == 1 and (dtype.is_integer or dtype.is_floating or dtype.is_bool)
        expected = "a feature of numbers in one dimension"
        require_valid(is_vector, owner, field, f"{dtype.name} of rank {rank}", expected)


def _check_vocabularies(tasks: list[Any], owner: str) -> None:
    first, *others = tasks
    for task in others:
        for name, feature in first.output_features.items():
            if task.output_features[name].vocabulary != feature.vocabulary:
                raise ConfigError(
                    "tasks of a mixture have different vocabularies",
                    owner=owner,
                    field=f"vocabulary of {name!r} in task {task.name}",
                    value=type(task.output_features[name].vocabulary).__name__,
                    expected=f"that of task {first.name}, {type(feature.vocabulary).__name__}",
                )


def _check_sampling(seqio: ModuleType, mixture: Any, owner: str) -> None:
    default = inspect.signature(seqio.Mixture.__init__).parameters["sample_fn"].default
    if mixture._sample_fn is not default:
        raise ConfigError(
            owner=owner,
            field=f"sample_fn of mixture {mixture.name}",
            value=mixture._sample_fn,
            expected="the default, since the state of another one cannot be saved",
            hint="Use rates only.",
        )


def _splits(seqio: ModuleType, task: Any, owner: str) -> Any:
    """Return the names of the splits, or raise if the data are missing; SeqIO would download."""
    if not isinstance(task.source, seqio.TfdsDataSource):
        return task.splits
    loader = task.source.tfds_dataset
    if loader.tfds_splits is None:
        _check_prepared(loader, task, owner)
    return task.splits


def _check_prepared(loader: Any, task: Any, owner: str) -> None:
    tfds = require_extra("tensorflow_datasets", needed_by=_NEEDED_BY)
    where = f"{loader.name} in {loader.data_dir or tfds.core.constants.DATA_DIR}"
    try:
        builder = loader.builder
    except (tfds.core.DatasetNotFoundError, AssertionError, OSError, ValueError) as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"task {task.name}: cannot find {where}: {first_line}",
            owner=owner,
            field="tfds_data_dir",
            value=loader.data_dir,
        ) from None
    if not builder.is_prepared():
        raise ConfigError(
            f"task {task.name}: {builder.data_path} holds no complete data set for {where}",
            owner=owner,
            field="tfds_data_dir",
            value=loader.data_dir,
            expected="the folder of the prepared data set",
            hint="To prepare it, run tfds.load(name, data_dir=...) once.",
        )


def _with_data_dir(seqio: ModuleType, provider: Any, data_dir: str, owner: str) -> Any:
    """Return a copy of a task or mixture whose TFDS sources read from `data_dir`."""
    moved: dict[str, Any] = {}

    def move(provider: Any) -> Any:
        if provider.name not in moved:
            change = move_task if isinstance(provider, seqio.Task) else move_mixture
            moved[provider.name] = change(copy.copy(provider))
        return moved[provider.name]

    def move_task(task: Any) -> Any:
        if isinstance(task.source, seqio.TfdsDataSource):
            loader = copy.copy(task.source.tfds_dataset)
            has_folders = loader.tfds_splits is not None
            expected = f"None, since task {task.name} has a folder for each split (seqio.TfdsSplit)"
            require_valid(not has_folders, owner, "tfds_data_dir", data_dir, expected)
            loader.override_data_dir(data_dir)
            task._source = copy.copy(task.source)
            task._source._tfds_dataset = loader
        return task

    def move_mixture(mixture: Any) -> Any:
        mixture._task_map = {name: move(part) for name, part in mixture._task_map.items()}
        mixture._tasks = [move(part) for part in mixture._tasks]
        mixture._sub_mixtures = [move(part) for part in mixture._sub_mixtures]
        return mixture

    result = move(provider)
    sources = [task.source for task in seqio.get_subtasks(result)]
    reads_tfds = any(isinstance(source, seqio.TfdsDataSource) for source in sources)
    expected = f"None, since {provider.name} reads no TFDS data"
    require_valid(reads_tfds, owner, "tfds_data_dir", data_dir, expected)
    return result
