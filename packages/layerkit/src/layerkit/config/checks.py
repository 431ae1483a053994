"""Checks of configuration fields and of arguments, which raise `ConfigError` with their data.

Each function takes the owner of the fields first and then the fields by name:

    check_sizes(self, input_dims=self.input_dims, output_dims=self.output_dims)

The owner is a layer, which is shown as `Linear(lm/softmax)`, or text such as a class or file name.
"""

from __future__ import annotations

import math
import numbers
import re
import sys
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from layerkit.errors import ConfigError


class Named(Protocol):
    """A layer, which knows its path in the model."""

    @property
    def path_name(self) -> str:
        """Class and path of the layer, such as `Linear(lm/softmax)`."""


Owner = Named | str | None


def owner_name(owner: Owner) -> str | None:
    """Return the text that names an owner in messages."""
    return owner if isinstance(owner, str | None) else owner.path_name


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_symbolic(value: Any) -> bool:
    """Return whether a value is a dimension of `jax.export` whose size is open, such as `b`."""
    export = sys.modules.get("jax.export")  # makes such dimensions; this module needs no JAX
    return export is not None and bool(export.is_symbolic_dim(value))


def require(is_valid: Any, owner: Owner, field: str, value: Any, expected: str) -> None:
    """Raise `ConfigError` with the data of a field unless `is_valid`."""
    if not is_valid:
        raise ConfigError(owner=owner_name(owner), field=field, value=value, expected=expected)


def check_integers(owner: Owner, *, minimum: int, **fields: Any) -> None:
    """Raise `ConfigError` unless each field is an integer of at least `minimum`, or None."""
    names = {0: "an integer of 0 or more", 1: "a positive integer"}
    expected = names.get(minimum, f"an integer of at least {minimum}")
    for name, value in fields.items():
        is_integer = _is_number(value) and isinstance(value, numbers.Integral)
        is_integer = is_integer or _is_symbolic(value)
        require(value is None or (is_integer and value >= minimum), owner, name, value, expected)


def check_sizes(owner: Owner, **fields: int | None) -> None:
    """Raise `ConfigError` unless each field, such as a dimension, is a positive integer or None."""
    check_integers(owner, minimum=1, **fields)


def check_positive(owner: Owner, **fields: float | None) -> None:
    """Raise `ConfigError` unless each field is a finite number above zero, or None."""
    for name, value in fields.items():
        valid = value is None or (_is_number(value) and math.isfinite(value) and value > 0)
        require(valid, owner, name, value, "a number above 0")


def check_non_negative(owner: Owner, **fields: float | None) -> None:
    """Raise `ConfigError` unless each field is a finite number of zero or more, or None."""
    for name, value in fields.items():
        valid = value is None or (_is_number(value) and math.isfinite(value) and value >= 0)
        require(valid, owner, name, value, "a number of 0 or more")


def check_rates(owner: Owner, **fields: float | None) -> None:
    """Raise `ConfigError` unless each field is a number in [0, 1), or None."""
    for name, value in fields.items():
        valid = value is None or (_is_number(value) and 0 <= value < 1)
        require(valid, owner, name, value, "a number in [0, 1)")


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
        require(not isinstance(patterns, str), owner, name, patterns, "a tuple of patterns")
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
        valid = array.ndim >= 1 and array.shape[-1] == dims
        require(valid, owner, "shape of inputs", list(array.shape), f"[..., {field}={dims}]")


def check_same_shape(owner: Owner, expected: Any, **arrays: Any) -> None:
    """Raise `ConfigError` unless each array has the shape of `expected`, another array."""
    for name, array in arrays.items():
        shape = list(expected.shape)
        valid = list(array.shape) == shape
        require(valid, owner, f"shape of {name}", list(array.shape), f"{shape}")


def check_integer_arrays(owner: Owner, **arrays: Any) -> None:
    """Raise `ConfigError` unless each array, such as ids or positions, holds integers."""
    for name, array in arrays.items():
        is_valid = array.dtype.kind in "iu"
        require(is_valid, owner, f"dtype of {name}", str(array.dtype), "an integer dtype")
