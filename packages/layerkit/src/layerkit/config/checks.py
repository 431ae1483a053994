"""Checks of configuration fields and of arguments, which raise `ConfigError` with their data.

Each function takes the owner of the fields first and then the fields by name:

    check_sizes(self, input_dims=self.input_dims, output_dims=self.output_dims)

The owner is a layer, which is shown as `Linear(lm/softmax)`, or text such as a class or file name.
The types of values were checked when a config was set, and are not checked again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from layerkit.errors import ConfigError, UserError


class Named(Protocol):
    """A layer, which knows its path in the model."""

    @property
    def path_name(self) -> str:
        """Class and path of the layer, such as `Linear(lm/softmax)`."""


Owner = Named | str | None


def owner_name(owner: Owner) -> str | None:
    """Return the text that names an owner in messages."""
    return owner if isinstance(owner, str | None) else owner.path_name


def require(
    condition: Any,
    owner: Owner,
    field: str,
    value: Any,
    expected: str,
    error: type[UserError] = ConfigError,
) -> None:
    """Raise an error with the data of a field unless a condition holds."""
    if not condition:
        raise error(owner=owner_name(owner), field=field, value=value, expected=expected)


def check_integers(owner: Owner, *, minimum: int, **fields: Any) -> None:
    """Raise `ConfigError` unless each field, an integer or None, is at least `minimum`."""
    names = {0: "an integer of 0 or more", 1: "a positive integer"}
    expected = names.get(minimum, f"an integer of at least {minimum}")
    _require_all(owner, fields, lambda value: value >= minimum, expected)


def check_sizes(owner: Owner, **fields: int | None) -> None:
    """Raise `ConfigError` unless each field, such as a dimension, is 1 or more, or None."""
    check_integers(owner, minimum=1, **fields)


def check_positive(owner: Owner, **fields: float | None) -> None:
    """Raise `ConfigError` unless each field is a finite number above zero, or None."""
    _require_all(owner, fields, lambda value: 0 < value < math.inf, "a number above 0")


def check_non_negative(owner: Owner, **fields: float | None) -> None:
    """Raise `ConfigError` unless each field is a finite number of zero or more, or None."""
    _require_all(owner, fields, lambda value: 0 <= value < math.inf, "a number of 0 or more")


def check_rates(owner: Owner, **fields: float | None) -> None:
    """Raise `ConfigError` unless each field is a number in [0, 1), or None."""
    _require_all(owner, fields, lambda value: 0 <= value < 1, "a number in [0, 1)")


def _require_all(
    owner: Owner, fields: Mapping[str, Any], holds: Callable[[Any], bool], expected: str
) -> None:
    for name, value in fields.items():
        require(value is None or holds(value), owner, name, value, expected)


def check_choice(owner: Owner, choices: Collection[Any], **fields: Any) -> None:
    """Raise `ConfigError` with the valid values unless each field is one of them."""
    for name, value in fields.items():
        if value not in choices:
            raise ConfigError(owner=owner_name(owner), field=name, value=value, choices=choices)


def check_divisible(owner: Owner, *, by: tuple[str, int], **fields: int) -> None:
    """Raise `ConfigError` unless each field is a multiple of another field.

    Args:
      owner: Owner of the fields.
      by: Name and value of the divisor, such as `("num_heads", 8)`.
      **fields: Fields and their values.
    """
    divisor, size = by
    for name, value in fields.items():
        require(value % size == 0, owner, name, value, f"a multiple of {divisor}={size}")


def check_regexes(owner: Owner, **fields: Sequence[str] | None) -> None:
    """Raise `ConfigError` unless each field is a sequence of regular expressions, or None."""
    for name, patterns in fields.items():
        for index, pattern in enumerate(patterns or ()):
            check_regex(owner, **{f"{name}[{index}]": pattern})


def check_regex(owner: Owner, **fields: str) -> None:
    """Raise `ConfigError` unless each field is a regular expression."""
    for name, pattern in fields.items():
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ConfigError(
                owner=owner_name(owner),
                field=name,
                value=pattern,
                expected=f"a regular expression ({error})",
            ) from None


def check_last_axis(owner: Owner, array: Any, **size: int) -> None:
    """Raise `ConfigError` unless the last axis of an array `[..., dims]` has a field's size."""
    for field, dims in size.items():
        shape, expected = list(array.shape), f"[..., {field}={dims}]"
        require(shape[-1:] == [dims], owner, "shape of inputs", shape, expected)


def check_same_shape(owner: Owner, expected: Any, **arrays: Any) -> None:
    """Raise `ConfigError` unless each array has the shape of `expected`, another array."""
    for name, array in arrays.items():
        shape, other = list(array.shape), list(expected.shape)
        require(shape == other, owner, f"shape of {name}", shape, f"{other}")


def check_integer_arrays(owner: Owner, **arrays: Any) -> None:
    """Raise `ConfigError` unless each array, such as ids or positions, holds integers."""
    for name, array in arrays.items():
        dtype = array.dtype
        require(dtype.kind in "iu", owner, f"dtype of {name}", str(dtype), "an integer dtype")
