"""ByExample: one value for each example, whatever the batches look like."""

from __future__ import annotations

import numpy as np
import pytest

from layerkit.nested_map import NestedMap
from layerkit_runner.errors import UsageError
from layerkit_runner.training.metrics import ByExample, as_floats, check_has_provenance


def test_padding_is_left_out_and_order_does_not_matter():
    scores = ByExample[float]("dev")
    scores.add(np.array([3, -1, 0]), [1.0, 99.0, 2.5])
    scores.add(np.array([-1, -1, 1]), [99.0, 99.0, 0.0])
    assert scores.values == {3: 1.0, 0: 2.5, 1: 0.0}


@pytest.mark.parametrize("batches", [([4, 4],), ([4], [4])])
def test_an_example_that_comes_twice_is_refused(batches):
    scores = ByExample[float]("dev")
    *before, last = batches
    for numbers in before:
        scores.add(np.array(numbers), [0.0] * len(numbers))
    with pytest.raises(UsageError) as caught:
        scores.add(np.array(last), [0.0] * len(last))
    assert str(caught.value) == (
        "the data set 'dev' gave example 4 twice in one evaluation, so its metrics would count it"
        " twice. Evaluate one epoch (reset_for_eval=True, repeat=False), and give each example a"
        " provenance of its own."
    )


def test_a_number_for_each_row():
    with pytest.raises(UsageError, match=r"provenance of shape \[2, 1\] in a batch of 2 rows"):
        ByExample[float]("dev").add(np.zeros((2, 1), int), [0.0, 0.0])
    with pytest.raises(UsageError, match="there is no provenance .* beside ids, weights"):
        check_has_provenance(NestedMap(ids=0, weights=0), "dev")
    check_has_provenance(NestedMap(ids=0, provenance=0), "dev")


def test_metrics_of_any_library_become_plain_numbers():
    metrics = as_floats({"a": np.float32(0.5), "b": 3})
    assert metrics == {"a": 0.5, "b": 3.0}
    assert all(type(value) is float for value in metrics.values())
