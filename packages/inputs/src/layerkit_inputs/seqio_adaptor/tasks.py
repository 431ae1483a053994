"""Which SeqIO tasks an input reads, found and checked before anything is read.

SeqIO keeps some settings for the whole process, the folder of TFDS data among them. Here a folder
belongs to one input: its tasks are copied, and the copies are told where to read.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

from layerkit.near_names import near_names
from layerkit_inputs.extras import require

Refuse = Callable[[str], ValueError]
"""Makes the error that names the input and says what is wrong."""

_NEEDED_BY = "SeqIOInput"


class WeightedTask(NamedTuple):
    """A task and its share in the mixture."""

    task: Any
    """`seqio.Task`."""
    rate: Callable[[], float]
    """Its share, up to a common factor; may ask the data set for its size."""


@functools.cache
def import_tensorflow() -> ModuleType:
    """TensorFlow, kept off the accelerators: they belong to JAX."""
    tf = require("tensorflow", needed_by=_NEEDED_BY)
    for kind in ("GPU", "TPU"):
        if tf.config.get_visible_devices(kind):
            # Raises RuntimeError where TensorFlow was at work already: too late to give them back.
            tf.config.set_visible_devices([], kind)
    return tf


@functools.cache
def import_seqio() -> ModuleType:
    """SeqIO, after `import_tensorflow`."""
    import_tensorflow()
    return require("seqio", needed_by=_NEEDED_BY)


def find_tasks(
    mixture_or_task: Any,
    *,
    split: str,
    feature_lengths: Mapping[str, int],
    tfds_data_dir: str | None,
    is_training: bool,
    refuse: Refuse,
) -> list[WeightedTask]:
    """The tasks of a task (itself) or of a mixture that have the split, in order of their names.

    Args:
      mixture_or_task: The registered name of a task or mixture, or one itself.
      split: As the tasks name it.
      feature_lengths: Task feature -> most tokens; every feature must be there.
      tfds_data_dir: Where tasks that read TFDS are to read. None: where they say.
      is_training: Whether tasks are to be mixed by their rates.
      refuse: Makes the errors.

    Raises:
      ValueError: no such mixture or task, split, feature or folder, or tasks that do not go
        together.
    """
    seqio = import_seqio()
    if isinstance(mixture_or_task, str):
        mixture_or_task = _registered(seqio, mixture_or_task, refuse)
    if not isinstance(mixture_or_task, seqio.Task | seqio.Mixture):
        raise refuse(
            f"mixture_or_task={mixture_or_task!r}; expected a seqio.Task, a seqio.Mixture or a "
            "registered name."
        )
    if tfds_data_dir is not None:
        mixture_or_task = _reading_from(seqio, mixture_or_task, tfds_data_dir, refuse)
    tasks = seqio.get_subtasks(mixture_or_task)
    _check_features(tasks, feature_lengths, refuse)
    _check_vocabularies(tasks, refuse)
    if needing := [task.name for task in tasks if task.requires_caching]:
        raise refuse(
            f"tasks {needing} can only be read from SeqIO's offline cache (use_cached), which is "
            "not read here; make their CacheDatasetPlaceholder with required=False."
        )
    splits = {task.name: list(_splits(seqio, task, refuse)) for task in tasks}
    chosen = [task for task in tasks if split in splits[task.name]]
    if not chosen:
        known = sorted(set().union(*splits.values()))
        if set(split) & set("+["):
            raise refuse(
                f"split_name={split!r}; expected one of {known}. For parts or sums of splits, give "
                "them a name in the task: TfdsDataSource(..., splits={'name': 'train[:90%]'})."
            )
        raise refuse(
            f"split_name={split!r}{near_names(split, known)} {mixture_or_task.name} has {known}."
        )
    if without := [task.name for task in tasks if task not in chosen]:
        logging.getLogger(__name__).warning(
            "%s: these tasks have no split %r and are left out: %s",
            mixture_or_task.name,
            split,
            ", ".join(without),
        )
    if isinstance(mixture_or_task, seqio.Task):
        return [WeightedTask(mixture_or_task, lambda: 1.0)]
    mixture = mixture_or_task
    if is_training:
        _check_sampling(seqio, mixture, refuse)
    return [WeightedTask(task, functools.partial(mixture.get_rate, task)) for task in chosen]


def _registered(seqio: ModuleType, name: str, refuse: Refuse) -> Any:
    known = {*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()}
    if name not in known:
        advice = (
            "Import the module that registers it."
            if known
            else "No task or mixture is registered; import the module that does it."
        )
        raise refuse(f"mixture_name={name!r}{near_names(name, known)} {advice}")
    return seqio.get_mixture_or_task(name)


def _check_features(tasks: list[Any], lengths: Mapping[str, int], refuse: Refuse) -> None:
    features = tasks[0].output_features
    for name in lengths:
        if name not in features:
            raise refuse(
                f"task_feature_lengths names {name!r}{near_names(name, features)} "
                f"{tasks[0].name} has the features {sorted(features)}."
            )
    missing = [name for name, feature in features.items() if feature.required]
    missing = [name for name in missing if name not in lengths]
    if missing:
        raise refuse(
            f"task_feature_lengths={dict(lengths)} says nothing of {missing}, which "
            f"{tasks[0].name} has; give the most tokens of each feature."
        )


def _check_vocabularies(tasks: list[Any], refuse: Refuse) -> None:
    first, *others = tasks
    for task in others:
        for name, feature in first.output_features.items():
            if task.output_features[name].vocabulary != feature.vocabulary:
                raise refuse(
                    f"tasks {first.name} and {task.name} have different vocabularies for {name!r}; "
                    "tasks of one mixture must share them."
                )


def _check_sampling(seqio: ModuleType, mixture: Any, refuse: Refuse) -> None:
    default = inspect.signature(seqio.Mixture.__init__).parameters["sample_fn"].default
    if mixture._sample_fn is not default:
        raise refuse(
            f"mixture {mixture.name} has a sample_fn of its own, whose position cannot be kept; "
            "give the mixture rates alone."
        )


def _splits(seqio: ModuleType, task: Any, refuse: Refuse) -> Any:
    """Names of the splits, where the data are there; SeqIO would set out to download them."""
    if not isinstance(task.source, seqio.TfdsDataSource):
        return task.splits
    loader = task.source.tfds_dataset
    if loader.tfds_splits is None:
        _check_prepared(loader, task, refuse)
    return task.splits


def _check_prepared(loader: Any, task: Any, refuse: Refuse) -> None:
    tfds = require("tensorflow_datasets", needed_by=_NEEDED_BY)
    where = f"{loader.name} in {loader.data_dir or tfds.core.constants.DATA_DIR}"
    try:
        builder = loader.builder
    except (tfds.core.DatasetNotFoundError, AssertionError, OSError, ValueError) as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise refuse(
            f"task {task.name} reads {where}, which cannot be found: {first_line}"
        ) from None
    if not builder.is_prepared():
        raise refuse(
            f"task {task.name} reads {where}, but {builder.data_path} holds no finished data set. "
            "Prepare it once, before the run, as with tfds.load(name, data_dir=...), or set "
            "tfds_data_dir to where it is."
        )


def _reading_from(seqio: ModuleType, provider: Any, data_dir: str, refuse: Refuse) -> Any:
    """A copy of a task or mixture whose TFDS sources read from `data_dir`."""
    moved: dict[str, Any] = {}

    def move(provider: Any) -> Any:
        if provider.name not in moved:
            change = move_task if isinstance(provider, seqio.Task) else move_mixture
            moved[provider.name] = change(copy.copy(provider))
        return moved[provider.name]

    def move_task(task: Any) -> Any:
        if isinstance(task.source, seqio.TfdsDataSource):
            loader = copy.copy(task.source.tfds_dataset)
            if loader.tfds_splits is not None:
                raise refuse(
                    f"tfds_data_dir={data_dir!r}, but task {task.name} gives a folder for each "
                    "split (seqio.TfdsSplit); leave tfds_data_dir unset."
                )
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
    if not any(isinstance(source, seqio.TfdsDataSource) for source in sources):
        raise refuse(
            f"tfds_data_dir={data_dir!r}, but {provider.name} reads no TFDS data; leave it unset."
        )
    return result
