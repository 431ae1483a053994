"""Specs of batches, and what a wrong batch is told."""

from __future__ import annotations

import numpy as np

from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError
from layerkit_inputs import ArraySpec, SyntheticInput, batch_specs, check_batch
from layerkit_inputs.base.batch_specs import spec_of


def test_specs_are_those_of_the_padded_batch_and_nothing_is_consumed():
    def make():
        return SyntheticInput(batch_size=2, seq_length=8, is_training=True, batch_padding_size=1)

    source = make()
    specs = batch_specs(source)
    assert specs.ids == ArraySpec((3, 8), np.dtype("int32"))
    assert str(specs.weights) == "float32[3, 8]"
    batch = source.get_next_padded()
    assert specs == spec_of(batch)
    np.testing.assert_array_equal(batch.ids, make().get_next_padded().ids)


def test_correct_batch_passes():
    batch = NestedMap(ids=np.zeros((2, 3), np.int32), inner=NestedMap(mask=np.ones(2, bool)))
    check_batch(batch, spec_of(batch), num_rows=2)


def test_wrong_batch_raises_with_all_wrong_arrays(raises):
    expected = spec_of(NestedMap(ids=np.zeros((2, 3), np.int32), labels=np.zeros((2, 3), np.int32)))
    batch = NestedMap(ids=np.zeros((2, 4), np.int64), text=np.array(["a"]), scale=np.float32(1))
    with raises(ConfigError):
        check_batch(batch, expected, num_rows=2)
    with raises(ConfigError):
        check_batch(NestedMap(), num_rows=2)
