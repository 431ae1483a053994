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
    source._iterator = {source.host_id: iter(dataset)}
    return dataset


def stop(source: Any) -> None:
    """Stop the threads of the pipeline of a source.

    Source and generator form a reference cycle, so the threads would run until garbage collection.
    TensorFlow takes up to a minute to stop old pipelines.
    """
    source._iterator = {}
    source._dataset = {}
