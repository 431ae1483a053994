"""Optimizer numbers out of range raise an error that names the field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from layerkit.errors import ConfigError
from layerkit_experiments.lm.quickstart import LocalText
from layerkit_experiments.recipes.optimizers import AdamExponential, AdamWCosine
from layerkit_experiments.recipes.published_optimizers import (
    AdafactorSqrt,
    AdamInverseSqrt,
    AdamWLinear,
)
from layerkit_runner.run.resolve import resolve

_RECIPES = (AdamExponential, AdamWCosine, AdamWLinear, AdafactorSqrt, AdamInverseSqrt)
_WRONG: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(
        ("LEARNING_RATE", "LEARNING_RATE_SCALE", "ADAM_EPSILON", "WEIGHT_DECAY")
        + ("SECOND_MOMENT_DECAY",),
        (math.nan, math.inf, -1e-3),
    ),
    **dict.fromkeys(("ADAM_BETA1", "ADAM_BETA2"), (math.nan, -0.1, 1.0, 2.0)),
    "UPDATE_RMS_CAP": (math.nan, -1.0, 0.0),
}


def experiment(recipe: type, **fields: Any) -> Any:
    bases = (LocalText,) if issubclass(LocalText, recipe) else (recipe, LocalText)
    return type("Mine", bases, {})(**fields)


@pytest.mark.parametrize(
    ("recipe", "name"),
    [(recipe, name) for recipe in _RECIPES for name in _WRONG if hasattr(recipe, name)],
)
def test_number_out_of_range_raises(recipe: type, name: str):
    for value in _WRONG[name]:
        with pytest.raises(ConfigError) as caught:
            resolve(experiment(recipe, **{name: value}))
        assert (caught.value.owner, caught.value.field) == ("Mine", name)


@pytest.mark.parametrize("recipe", _RECIPES)
def test_zero_is_in_range(recipe: type):
    zeros = {name: 0.0 for name, wrong in _WRONG.items() if 0.0 not in wrong}
    resolve(experiment(recipe, **{n: zero for n, zero in zeros.items() if hasattr(recipe, n)}))
