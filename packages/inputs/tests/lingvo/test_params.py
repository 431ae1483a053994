"""The type of the params of LingvoInputAdaptor, which is checked at assignment."""

from __future__ import annotations

import pytest

from layerkit.config.field_types import FieldTypeError
from layerkit_inputs.lingvo import LingvoInputAdaptor


@pytest.mark.parametrize("value", ["MyInput", {"batch_size": 2}])
def test_input_of_another_type_raises_when_it_is_assigned(raises, value):
    config = LingvoInputAdaptor.HParams.config()
    with raises(FieldTypeError, owner="LingvoInputAdaptor", field="input", value=value):
        config.input = value


def test_params_of_a_generator_are_assigned_unchanged(lingvo):
    params = lingvo.Count.Params()
    config = LingvoInputAdaptor.HParams.config(input=params)
    assert config.input is params


def test_generator_instead_of_its_params_raises_when_it_is_assigned(lingvo):
    with pytest.raises(FieldTypeError) as caught:
        LingvoInputAdaptor.HParams.config(input=lingvo.Count)
    assert caught.value.field == "input"
