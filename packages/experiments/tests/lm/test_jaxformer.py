"""The model with everything in it: latent attention, shared experts, noise, and a pipeline."""

from __future__ import annotations

from typing import Any

import pytest

from layerkit.errors import ConfigError
from layerkit_experiments.lm.jaxformer import Jaxformer1B
from layerkit_runner.run.resolve import resolve


def test_a_billion_weights_three_hundred_million_of_them_for_each_token(num_params: Any):
    count = num_params("lm.jaxformer.Jaxformer1B")
    assert 0.8e9 < count < 1.0e9
    unused = 16 * 6 * 2 * 768 * 3072
    assert 0.25e9 < count - unused - 100_277 * 768 < 0.35e9


@pytest.mark.parametrize(("field", "value"), [("DIMS_PER_HEAD", 64), ("POSITIONS", "rotary")])
def test_field_of_plain_attention_raises(raises: Any, field: str, value: Any):
    with raises(ConfigError, field=field, value=value):
        resolve(Jaxformer1B(**{field: value}))
