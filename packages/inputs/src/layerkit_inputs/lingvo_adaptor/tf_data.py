"""tf.data inside Lingvo, made the same each time it is read.

Lingvo turns tf.data's order loose and shuffles without a seed. A run that is to go on where another
stopped needs the stream to come again as it was, and hosts that share an epoch need it in one
order; so datasets are made here with a fixed order and under a seed.
"""

from __future__ import annotations

import contextlib
import importlib
import random
import threading
from collections.abc import Iterator
from typing import Any

from layerkit_inputs.tensor_iterator import TensorIterator, has_tensors_only

_MISSING = object()
_LOCK = threading.RLock()


@contextlib.contextmanager
def tensorflow_seed(seed: int) -> Iterator[None]:
    """Gives what is built inside the seed `seed`; the program's own one is put back after it.

    Shuffles and random ops draw their seeds when they are built, so it matters no longer then.
    """
    # The public tf.random.set_seed cannot be undone, and it throws away all kernels, which waits
    # forever on those of Lingvo's native ops that are at work.
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
    """Whether the generator reads from a Lingvo data source that is a tf.data pipeline."""
    datasource = importlib.import_module("lingvo.core.datasource")
    return isinstance(getattr(lingvo_input, "datasource", None), datasource.TFDatasetSource)


def start_over(tensorflow: Any, source: Any) -> Any:
    """Makes the tf.data pipeline of a Lingvo data source anew, at its first element.

    It stands where the source looks for it, so that the generator's own way to read goes on.

    Args:
      tensorflow: The module.
      source: A `TFDatasetSource`; call within the cluster and the infeed context of the input.

    Returns:
      The dataset.
    """
    py_utils = importlib.import_module("lingvo.core.py_utils")
    # Else a variable of Lingvo's global step becomes part of the pipeline.
    with py_utils.GlobalStepContext(None):
        dataset = source.GetDataset()
    options = tensorflow.data.Options()
    options.deterministic = True
    dataset = dataset.with_options(options)
    source._dataset = {source.host_id: dataset}
    source._iterator = {source.host_id: _batches_of(tensorflow, dataset)}
    return dataset


class _Batches:
    """Stands in for an iterator of TensorFlow, whose Python takes as long as a batch."""

    def __init__(self, tensorflow: Any, dataset: Any):
        self._spec = dataset.element_spec
        self._tensors = TensorIterator(tensorflow, dataset)

    def get_next(self) -> Any:
        """The next batch; raises what TensorFlow raises."""
        return _packed(self._spec, iter(self._tensors.get_next()))


def _batches_of(tensorflow: Any, dataset: Any) -> Any:
    if _is_map_of_fields(dataset.element_spec) and has_tensors_only(tensorflow, dataset):
        return _Batches(tensorflow, dataset)
    return iter(dataset)


def _is_map_of_fields(spec: Any) -> bool:
    """Whether it is a dict or a NestedMap of Lingvo, and so are the maps in it."""
    maps = (dict, importlib.import_module("lingvo.core.nested_map").NestedMap)
    if type(spec) not in maps:
        return False
    return all(_is_map_of_fields(part) or hasattr(part, "dtype") for part in spec.values())


def _packed(spec: Any, tensors: Iterator[Any]) -> Any:
    """The tensors, which come in the order of sorted names, in the form of `spec`."""
    if not isinstance(spec, dict):
        return next(tensors)
    parts = {name: _packed(spec[name], tensors) for name in sorted(spec)}
    return type(spec)((name, parts[name]) for name in spec)


def stop(source: Any) -> None:
    """Ends the threads of a source's pipeline.

    Source and generator hold each other, so without this they would run until the garbage collector
    comes; and the older they are, the longer TensorFlow takes to stop them, up to a minute.
    """
    source._iterator = {}
    source._dataset = {}


def is_endless(tensorflow: Any, dataset: Any) -> bool:
    """Whether tf.data knows that the dataset never ends."""
    return int(dataset.cardinality()) == tensorflow.data.INFINITE_CARDINALITY
