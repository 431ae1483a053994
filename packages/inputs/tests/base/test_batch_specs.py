"""Specs of batches."""

from __future__ import annotations

import numpy as np

from layerkit_inputs import ArraySpec, SyntheticInput, batch_specs
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
