"""GeneratedSeries: windows that are drawn by their number."""

from __future__ import annotations

import pytest

from layerkit_inputs import GeneratedSeries
from layerkit_inputs.testing import laws


@pytest.mark.parametrize("is_training", [True, False], ids=["training", "epoch"])
@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_input_obeys_the_laws(law, is_training):
    fields = {"window_length": 6, "num_examples": 21, "batch_size": 4, "is_training": is_training}
    law(lambda **more: GeneratedSeries(**{**fields, **more}))
