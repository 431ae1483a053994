"""The elements of a `tf.data` pipeline, by TensorFlow's own op.

The iterators of `tf.data` wrap each element anew: they pack it, look for ragged tensors and set
shapes, all in Python. For a batch of a few fields that can take as long as making it: about a tenth
of a millisecond. The op itself checks types and shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any


class TensorIterator:
    """Reads a dataset of tensors from its first element on; its threads end with this object."""

    def __init__(self, tensorflow: ModuleType, dataset: Any):
        """Opens the dataset, with the options that are set on it.

        Args:
          tensorflow: The module.
          dataset: A `tf.data.Dataset` of which `has_tensors_only` is true.
        """
        specs = tensorflow.nest.flatten(dataset.element_spec)
        self._types = [spec.dtype for spec in specs]
        self._shapes = [spec.shape for spec in specs]
        self._dataset = dataset  # holds the Python functions that the pipeline calls
        self._get_next = tensorflow.raw_ops.IteratorGetNext
        self._iterator = tensorflow.raw_ops.AnonymousIteratorV3(
            output_types=self._types, output_shapes=self._shapes
        )
        variant = tensorflow.data.experimental.to_variant(dataset)
        tensorflow.raw_ops.MakeIterator(dataset=variant, iterator=self._iterator)

    def get_next(self) -> Sequence[Any]:
        """The tensors of the next element, in the order of `tf.nest.flatten`.

        Raises:
          tf.errors.OutOfRangeError: there is none.
          tf.errors.OpError: it could not be made, or has not the shapes that were promised.
        """
        tensors: Sequence[Any] = self._get_next(
            iterator=self._iterator, output_types=self._types, output_shapes=self._shapes
        )
        return tensors


def has_tensors_only(tensorflow: ModuleType, dataset: Any) -> bool:
    """Whether its elements hold nothing ragged, sparse or of another kind."""
    specs = tensorflow.nest.flatten(dataset.element_spec)
    return bool(specs) and all(type(spec) is tensorflow.TensorSpec for spec in specs)
