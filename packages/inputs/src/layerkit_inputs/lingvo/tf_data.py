"""Deterministic `tf.data` pipelines of Lingvo.

Lingvo disables the deterministic order of `tf.data` and shuffles without a seed. Resuming needs the
same stream again, and hosts that share an epoch need one order. So this module makes datasets with
a fixed order and a seed.
"""

from __future__ import annotations

import contextlib
import importlib
import random
import threading
from collections.abc import Iterator
from typing import Any

from layerkit_inputs.base.tf_iterator import TensorIterator, has_tensors_only

_MISSING = object()
_LOCK = threading.RLock()


@contextlib.contextmanager
def tensorflow_seed(seed: int) -> Iterator[None]:
    """Set TensorFlow's global seed while pipelines are built, and restore it afterwards.

    Shuffles and random ops draw their seeds when they are built.
    """
    # The public tf.random.set_seed cannot be undone. It also drops all kernels, which hangs on
    # running kernels of Lingvo's native ops.
    context = importlib.import_module("tensorflow.python.eager.context").context()
    with _LOCK:
        before = {name: getattr(context, name, _MISSING) for name in ("_seed", "_rng")}
        context._seed, context._rng = seed, random.Random(seed)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is _MISSING:
                    delattr(context, name)
                else:
                    setattr(context, name, value)


def is_tf_data(lingvo_input: Any) -> bool:
    """Return True if the data source of a generator is a tf.data pipeline."""
    datasource = importlib.import_module("lingvo.core.datasource")
    return isinstance(getattr(lingvo_input, "datasource", None), datasource.TFDatasetSource)


def start_over(tensorflow: Any, source: Any) -> Any:
    """Make the tf.data pipeline of a Lingvo data source again, at its first element.

    The pipeline is stored in the source, so that the generator reads from it. Call this within the
    cluster and the infeed context of the input.

    Args:
      tensorflow: The module `tensorflow`.
      source: The `TFDatasetSource`.

    Returns:
      The dataset.
    """
    py_utils = importlib.import_module("lingvo.core.py_utils")
    # Otherwise a variable of Lingvo's global step becomes part of the pipeline.
    with py_utils.GlobalStepContext(None):
        dataset = source.GetDataset()
    options = tensorflow.data.Options()
    options.deterministic = True
    dataset = dataset.with_options(options)
    source._dataset = {source.host_id: dataset}
    source._iterator = {source.host_id: _batches_of(tensorflow, dataset)}
    return dataset


class _Batches:
    """A replacement of TensorFlow's iterator, whose Python code takes as long as a batch."""

    def __init__(self, tensorflow: Any, dataset: Any):
        self._spec = dataset.element_spec
        self._tensors = TensorIterator(tensorflow, dataset)

    def get_next(self) -> Any:
        """Return the next batch; raise the errors of TensorFlow."""
        return _packed(self._spec, iter(self._tensors.get_next()))


def _batches_of(tensorflow: Any, dataset: Any) -> Any:
    if _is_map_of_fields(dataset.element_spec) and has_tensors_only(tensorflow, dataset):
        return _Batches(tensorflow, dataset)
    return iter(dataset)


def _is_map_of_fields(spec: Any) -> bool:
    """Return True for a dict or Lingvo NestedMap of tensors or of such maps."""
    maps = (dict, importlib.import_module("lingvo.core.nested_map").NestedMap)
    if type(spec) not in maps:
        return False
    return all(_is_map_of_fields(part) or hasattr(part, "dtype") for part in spec.values())


def _packed(spec: Any, tensors: Iterator[Any]) -> Any:
    """Return tensors in the structure of `spec`; they are in the order of sorted names."""
    if not isinstance(spec, dict):
        return next(tensors)
    parts = {name: _packed(spec[name], tensors) for name in sorted(spec)}
    return type(spec)((name, parts[name]) for name in spec)


def stop(source: Any) -> None:
    """Stop the threads of the pipeline of a source.

    Source and generator form a reference cycle, so the threads would run until garbage collection.
    TensorFlow takes up to a minute to stop old pipelines.
    """
    source._iterator = {}
    source._dataset = {}


def is_endless(tensorflow: Any, dataset: Any) -> bool:
    """Return True if tf.data reports an infinite dataset."""
    return int(dataset.cardinality()) == tensorflow.data.INFINITE_CARDINALITY
