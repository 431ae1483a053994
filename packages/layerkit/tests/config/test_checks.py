from __future__ import annotations

import math

import numpy as np
import pytest

from layerkit.config import checks
from layerkit.errors import ConfigError


@pytest.mark.parametrize(
    ("check", "options", "field", "value"),
    [
        (checks.check_sizes, {}, "dims", 0),
        (checks.check_integers, {"minimum": 0}, "step", -1),
        (checks.check_integers, {"minimum": 2}, "step", 1),
        (checks.check_positive, {}, "scale", 0.0),
        (checks.check_positive, {}, "scale", math.inf),
        (checks.check_non_negative, {}, "scale", -0.5),
        (checks.check_rates, {}, "rate", 1.0),
        (checks.check_rates, {}, "rate", -0.1),
        (checks.check_divisible, {"by": ("num_heads", 8)}, "dims", 12),
        (checks.check_regex, {}, "pattern", "["),
    ],
)
def test_check_raises_for_an_invalid_value(raises, check, options, field, value):
    with raises(ConfigError, owner="Linear(lm)", field=field, value=value):
        check("Linear(lm)", **options, **{field: value})


def test_checks_accept_valid_values_and_none():
    checks.check_sizes(None, dims=1, other=None, numpy=np.int64(3))
    checks.check_integers(None, minimum=0, step=0)
    checks.check_positive(None, scale=0.5, other=None)
    checks.check_non_negative(None, scale=0)
    checks.check_rates(None, rate=0.0)
    checks.check_choice(None, ("a", "b"), name="b")
    checks.check_divisible(None, by=("num_heads", 8), dims=16)
    checks.check_regexes(None, patterns=("a.*", "b"), other=None)
    checks.check_last_axis(None, np.zeros((2, 3)), dims=3)
    checks.check_same_shape(None, np.zeros((2, 3)), outputs=np.ones((2, 3)))
    checks.check_integer_arrays(None, ids=np.zeros(2, np.int32))


def test_errors_of_choices_and_patterns_name_what_is_wrong(raises):
    with raises(ConfigError, field="activation", value="rely", choices=("gelu", "relu")):
        checks.check_choice("Linear(lm)", ("gelu", "relu"), activation="rely")
    with raises(ConfigError, field="bits", value=5, choices=(4, 8)):
        checks.check_choice("Linear(lm)", (4, 8), bits=5)
    with raises(ConfigError, field="patterns[1]", value="("):
        checks.check_regexes(None, patterns=("a", "("))


def test_array_errors_give_shape_and_dtype(raises):
    with raises(ConfigError, value=[2, 3]):
        checks.check_last_axis("Linear(lm)", np.zeros((2, 3)), dims=4)
    with raises(ConfigError, value=[2, 3]):
        checks.check_same_shape("Linear(lm)", np.zeros((3, 3)), outputs=np.zeros((2, 3)))
    with raises(ConfigError, value="float64"):
        checks.check_integer_arrays("Linear(lm)", ids=np.zeros(2))
