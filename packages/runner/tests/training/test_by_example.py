"""ByExample: one value for each example, for any order of rows."""

from __future__ import annotations

import numpy as np
import pytest

from layerkit.nested_map import NestedMap
from layerkit_runner.errors import UsageError
from layerkit_runner.training.metrics import ByExample, as_floats, check_has_provenance


def test_values_are_collected_by_example_without_padding():
    scores = ByExample[float]("dev")
    scores.add(np.array([3, -1, 0]), [1.0, 99.0, 2.5])
    scores.add(np.array([-1, -1, 1]), [99.0, 99.0, 0.0])
    assert scores.values == {3: 1.0, 0: 2.5, 1: 0.0}


@pytest.mark.parametrize("batches", [([4, 4],), ([4], [4])])
def test_example_that_occurs_twice_is_an_error(raises, batches):
    scores = ByExample[float]("dev")
    *before, last = batches
    for numbers in before:
        scores.add(np.array(numbers), [0.0] * len(numbers))
    with raises(UsageError, field="provenance", value=4):
        scores.add(np.array(last), [0.0] * len(last))


def test_provenance_has_one_number_for_each_row(raises):
    with raises(UsageError, field="shape of provenance", value=[2, 1]):
        ByExample[float]("dev").add(np.zeros((2, 1), int), [0.0, 0.0])


def test_batch_without_provenance_is_an_error(raises):
    check_has_provenance(NestedMap(ids=0, provenance=0), "dev")
    with raises(UsageError, owner="data set 'dev'", value=["ids", "weights"]):
        check_has_provenance(NestedMap(ids=0, weights=0), "dev")


def test_metrics_become_python_numbers():
    metrics = as_floats({"a": np.float32(0.5), "b": 3})
    assert metrics == {"a": 0.5, "b": 3.0}
    assert all(type(value) is float for value in metrics.values())
