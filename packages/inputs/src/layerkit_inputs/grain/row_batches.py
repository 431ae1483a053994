"""Functions that check rows, which are dictionaries of arrays, and stack them into batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.errors import BadRecordError
from layerkit_inputs.base.evaluation import map_fields
from layerkit_inputs.base.host_batches import ArraySpec


def to_arrays(row: Any) -> NestedMap:
    """Return a row as a NestedMap of arrays.

    Args:
      row: Mapping of names to arrays, numbers or such mappings.

    Raises:
      BadRecordError: The row is not a mapping, is empty, or holds values that are not numbers.
    """
    if not isinstance(row, Mapping) or not row:
        expected = "a dictionary of arrays, such as {'ids': array}"
        raise BadRecordError(field="row", value=row, expected=expected)
    checked: dict[str, Any] = {}
    for name, value in row.items():
        if type(value) is np.ndarray:  # the most frequent type first
            array = value
        elif isinstance(value, Mapping):
            checked[name] = to_arrays(value)
            continue
        else:
            array = _to_array(value)
        if array.dtype.kind not in "biufc" and array.dtype.name != "bfloat16":
            raise BadRecordError(
                field=f"dtype of {name}",
                value=str(array.dtype),
                expected="numbers or booleans",
                hint="Convert text to ids first, or remove the field.",
            )
        checked[name] = array
    return NestedMap(checked)


def stack_rows(rows: Sequence[NestedMap], *, name_of: Callable[[int], str]) -> NestedMap:
    """Stack rows with the same fields, shapes and dtypes.

    Args:
      rows: One or more rows from `to_arrays`.
      name_of: Function that returns the name of the row with an index in `rows`, for errors.

    Raises:
      BadRecordError: A row differs from the first; the error lists all fields that differ.
    """
    for index, row in enumerate(rows):
        if not _is_alike(row, rows[0]) and (specs := _specs(row)) != (first := _specs(rows[0])):
            paths = sorted(path for path in {*specs, *first} if specs.get(path) != first.get(path))
            fields = (f"{path} is {specs.get(path)}, not {first.get(path)}" for path in paths)
            raise BadRecordError(
                f"the row differs from {name_of(0)}: {'; '.join(fields)}",
                owner=name_of(index),
                hint="Pad, cut or pack rows to one shape.",
            )
    return map_fields(lambda _, *values: np.array(values), *rows)


def _to_array(value: Any) -> np.ndarray:
    try:
        return np.asarray(value)
    except ValueError:  # a list of lists of different lengths
        return np.empty(0, object)


def _is_alike(value: Any, other: Any) -> bool:
    """Return whether two rows or arrays have equal fields, shapes and dtypes."""
    if isinstance(value, NestedMap) and isinstance(other, NestedMap):
        return value.keys() == other.keys() and all(map(_is_alike, value.values(), other.values()))
    return type(value) is type(other) and (value.shape, value.dtype) == (other.shape, other.dtype)


def _specs(row: NestedMap) -> dict[str, str]:
    """Return dtype and shape of each array by its path. A dtype has no byte order."""
    return {path: str(ArraySpec(x.shape, x.dtype)) for path, x in row.flatten_items()}
