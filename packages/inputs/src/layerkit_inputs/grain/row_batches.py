"""Functions that check rows, which are dictionaries of arrays, and stack them into batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.errors import BadRecordError


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
        if differences := list(_differences(row, rows[0])):
            raise BadRecordError(
                f"the row differs from {name_of(0)}: {'; '.join(differences)}",
                owner=name_of(index),
                hint="Pad, cut or pack rows to one shape.",
            )
    return _stack(rows)


def _to_array(value: Any) -> np.ndarray:
    try:
        return np.asarray(value)
    except ValueError:  # a list of lists of different lengths
        return np.empty(0, object)


def _differences(row: NestedMap, first: NestedMap) -> Iterator[str]:
    """Yield a description of each field that differs from the first row, except byte order."""
    if row.keys() != first.keys():
        yield f"fields are {sorted(row)}, not {sorted(first)}"
        return
    for name, value in row.items():
        other = first[name]
        if isinstance(value, NestedMap) and isinstance(other, NestedMap):
            yield from _differences(value, other)
            continue
        is_array = type(value) is type(other)
        is_same = is_array and value.shape == other.shape and value.dtype == other.dtype
        if not is_same and _describe(value) != _describe(other):
            yield f"{name} is {_describe(value)}, not {_describe(other)}"


def _describe(value: np.ndarray | NestedMap) -> str:
    if isinstance(value, NestedMap):
        return f"fields {sorted(value)}"
    return f"{value.dtype.name}{list(value.shape)}"


def _stack(rows: Sequence[NestedMap]) -> NestedMap:
    batch = NestedMap()
    for name, value in rows[0].items():
        values = [row[name] for row in rows]
        batch[name] = _stack(values) if isinstance(value, NestedMap) else np.array(values)
    return batch
