"""Numbers of optimizers that no run can want are refused by the name of their field."""

from __future__ import annotations

from typing import Any

import pytest

from layerkit_experiments.lm.quickstart import LocalText
from layerkit_experiments.lm.recipes.optimization import AdamExponential, AdamWCosine
from layerkit_experiments.lm.recipes.published_optimizers import (
    AdafactorSqrt,
    AdamInverseSqrt,
    AdamWLinear,
)
from layerkit_runner.config.resolve import resolve
from layerkit_runner.errors import UsageError

_RECIPES = (AdamExponential, AdamWCosine, AdamWLinear, AdafactorSqrt, AdamInverseSqrt)
_WRONG: dict[str, tuple[tuple[float, ...], str]] = {
    **dict.fromkeys(
        ("LEARNING_RATE", "LEARNING_RATE_SCALE", "ADAM_EPSILON", "WEIGHT_DECAY")
        + ("SECOND_MOMENT_DECAY",),
        ((float("nan"), float("inf"), -1e-3), "a finite number from 0"),
    ),
    **dict.fromkeys(
        ("ADAM_BETA1", "ADAM_BETA2"), ((float("nan"), -0.1, 1.0, 2.0), "from 0 to below 1")
    ),
}


def experiment(recipe: type, **fields: Any) -> Any:
    bases = (LocalText,) if issubclass(LocalText, recipe) else (recipe, LocalText)
    return type("Mine", bases, {})(**fields)


@pytest.mark.parametrize(
    ("recipe", "name"),
    [(recipe, name) for recipe in _RECIPES for name in _WRONG if hasattr(recipe, name)],
)
def test_numbers_out_of_range_are_refused(recipe: type, name: str):
    values, expected = _WRONG[name]
    for value in values:
        with pytest.raises(UsageError) as caught:
            resolve(experiment(recipe, **{name: value}))
        assert str(caught.value) == f"Mine.{name}={value} must be {expected}"


@pytest.mark.parametrize("recipe", _RECIPES)
def test_the_ends_of_the_ranges_are_not(recipe: type):
    resolve(experiment(recipe, **{name: 0.0 for name in _WRONG if hasattr(recipe, name)}))
