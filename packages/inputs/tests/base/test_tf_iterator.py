"""Elements by TensorFlow's own op are those that its iterators give."""

from __future__ import annotations

import numpy as np
import pytest

from layerkit_inputs.base.tf_iterator import TensorIterator, has_tensors_only

tf = pytest.importorskip("tensorflow")


def test_tensors_come_in_the_order_of_flatten_until_the_end():
    dataset = tf.data.Dataset.range(5).batch(2).map(lambda i: {"b": 2 * i, "a": {"c": i}})
    expected = [tf.nest.flatten(element) for element in dataset.as_numpy_iterator()]
    assert has_tensors_only(tf, dataset)
    iterator = TensorIterator(tf, dataset)
    for element in expected:
        for tensor, array in zip(iterator.get_next(), element, strict=True):
            np.testing.assert_array_equal(tensor, array)
    with pytest.raises(tf.errors.OutOfRangeError):
        iterator.get_next()


def test_an_error_of_the_pipeline_is_that_of_tensorflow():
    dataset = tf.data.Dataset.from_tensors(tf.constant("a")).map(tf.strings.to_number)
    with pytest.raises(tf.errors.InvalidArgumentError):
        TensorIterator(tf, dataset).get_next()


def test_a_shape_that_is_not_as_promised_is_refused():
    def promise(number):
        (tensor,) = tf.numpy_function(lambda n: [np.zeros([2, n], np.float32)], [number], ["float"])
        tensor.set_shape([None, 3])
        return tensor

    iterator = TensorIterator(tf, tf.data.Dataset.range(3, 5).map(promise))
    assert iterator.get_next()[0].shape == [2, 3]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"expected \[\?,3\] but got \[2,4\]"):
        iterator.get_next()


def test_ragged_elements_are_not_for_it():
    rows = tf.data.Dataset.range(3).map(lambda i: tf.range(i))
    assert has_tensors_only(tf, rows) and not has_tensors_only(tf, rows.ragged_batch(2))
