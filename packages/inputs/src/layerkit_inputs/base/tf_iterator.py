"""TensorIterator, a fast iterator over a `tf.data` pipeline by TensorFlow's op.

The iterators of `tf.data` convert each element in Python: they pack it, check for ragged tensors
and set shapes. For a batch of a few fields this takes about a tenth of a millisecond, as long as
making the batch. The op itself checks types and shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any


class TensorIterator:
    """An iterator over a dataset of tensors. Its threads end when the object is deleted."""

    def __init__(self, tensorflow: ModuleType, dataset: Any):
        """Open the dataset with its options.

        Args:
          tensorflow: The TensorFlow module.
          dataset: A `tf.data.Dataset` for which `has_tensors_only` is true.
        """
        specs = tensorflow.nest.flatten(dataset.element_spec)
        self._types = [spec.dtype for spec in specs]
        self._shapes = [spec.shape for spec in specs]
        self._dataset = dataset  # It holds the Python functions of the pipeline.
        self._get_next = tensorflow.raw_ops.IteratorGetNext
        self._iterator = tensorflow.raw_ops.AnonymousIteratorV3(
            output_types=self._types, output_shapes=self._shapes
        )
        variant = tensorflow.data.experimental.to_variant(dataset)
        tensorflow.raw_ops.MakeIterator(dataset=variant, iterator=self._iterator)

    def get_next(self) -> Sequence[Any]:
        """Return the tensors of the next element, in the order of `tf.nest.flatten`.

        Raises:
          tf.errors.OutOfRangeError: The dataset has no more elements.
          tf.errors.OpError: The pipeline failed, or the element has other shapes than declared.
        """
        tensors: Sequence[Any] = self._get_next(
            iterator=self._iterator, output_types=self._types, output_shapes=self._shapes
        )
        return tensors


def has_tensors_only(tensorflow: ModuleType, dataset: Any) -> bool:
    """Return whether all components of a dataset's elements are dense tensors."""
    specs = tensorflow.nest.flatten(dataset.element_spec)
    return bool(specs) and all(type(spec) is tensorflow.TensorSpec for spec in specs)
