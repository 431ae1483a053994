"""Functions that check rows, which are dictionaries of arrays, and stack them into batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.bad_records import BadRecordError


def check_row(row: Any, *, where: Callable[[], str]) -> NestedMap:
    """Return a row as a NestedMap of arrays.

    Args:
      row: Mapping of names to arrays, numbers or such mappings.
      where: Function that returns a description of the row's location, for errors.

    Raises:
      BadRecordError: The row is not a mapping, is empty, or holds values that are not numbers.
    """
    if not isinstance(row, Mapping):
        raise BadRecordError(
            owner=where(),
            field="type of row",
            value=type(row).__qualname__,
            expected="a dictionary of arrays, such as {'ids': array}",
        )
    if not row:
        raise BadRecordError(
            owner=where(), field="row", value=row, expected="a dictionary with at least one array"
        )
    checked: dict[str, Any] = {}
    for name, value in row.items():
        if type(value) is np.ndarray:  # the most frequent type first
            array = value
        elif isinstance(value, Mapping):
            checked[name] = check_row(value, where=functools.partial(_field_of, where, name))
            continue
        else:
            array = _as_array(value)
        if array.dtype.kind not in "biufc" and array.dtype.name != "bfloat16":
            raise BadRecordError(
                owner=where(),
                field=f"dtype of {name}",
                value=str(array.dtype),
                expected="numbers or booleans",
                hint="Convert text to ids first, or remove the field.",
            )
        checked[name] = array
    return NestedMap(checked)


def _field_of(where: Callable[[], str], name: str) -> str:
    return f"{where()}, {name}"


def stack_rows(rows: Sequence[NestedMap], *, name_of: Callable[[int], str]) -> NestedMap:
    """Stack rows with the same fields, shapes and dtypes.

    Args:
      rows: One or more rows from `check_row`.
      name_of: Function that returns the name of the row with an index in `rows`, for errors.

    Raises:
      BadRecordError: A row differs from the first; the error lists all fields that differ.
    """
    for place, row in enumerate(rows):
        if not _are_alike(row, rows[0]) and (differing := _differing(row, rows[0])):
            raise BadRecordError(
                f"the row differs from {name_of(0)}: {'; '.join(differing)}",
                owner=name_of(place),
                hint="Pad, cut or pack rows to one shape.",
            )
    return _stacked(rows)


def _as_array(value: Any) -> np.ndarray:
    try:
        return np.asarray(value)
    except ValueError:  # a list of lists of different lengths
        return np.empty(0, object)


def _are_alike(row: NestedMap, first: NestedMap) -> bool:
    """Return True if names, dtypes and shapes are equal."""
    if row.keys() != first.keys():
        return False
    for name, value in row.items():
        other = first[name]
        if type(value) is not type(other):
            return False
        if isinstance(value, NestedMap):
            if not _are_alike(value, other):
                return False
        elif value.shape != other.shape or value.dtype != other.dtype:
            return False
    return True


def _differing(row: NestedMap, first: NestedMap) -> list[str]:
    """Return a description of each field that differs from the first row, except byte order."""
    here, there = _described(row), _described(first)
    return [
        f"{path} is {here.get(path, 'missing')}, not {there.get(path, 'missing')}"
        for path in sorted({*here, *there})
        if here.get(path) != there.get(path)
    ]


def _described(row: NestedMap) -> dict[str, str]:
    return {path: f"{array.dtype.name}{list(array.shape)}" for path, array in row.flatten_items()}


def _stacked(rows: Sequence[NestedMap]) -> NestedMap:
    batch = NestedMap()
    for name, value in rows[0].items():
        values = [row[name] for row in rows]
        batch[name] = _stacked(values) if isinstance(value, NestedMap) else np.array(values)
    return batch
