"""Batches from rows: dictionaries of arrays become arrays `[rows, ...]`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from layerkit.nested_map import NestedMap
from layerkit_inputs.bad_records import BadRecordError
from layerkit_inputs.eval_padding import PADDING_VALUES


def check_row(row: Any, *, where: Callable[[], str]) -> NestedMap:
    """A row as a NestedMap of arrays.

    Args:
      row: A mapping of names to arrays, numbers or such mappings.
      where: Says which row it is, for the errors.

    Raises:
      BadRecordError: it is no mapping, is empty, or holds something that is no number.
    """
    if not isinstance(row, Mapping):
        raise BadRecordError(
            f"{where()}: a {type(row).__qualname__}, expected a dictionary of arrays, such as "
            "{'ids': array}."
        )
    if not row:
        raise BadRecordError(f"{where()}: an empty dictionary, expected arrays in it.")
    checked: dict[str, Any] = {}
    for name, value in row.items():
        if type(value) is np.ndarray:  # asked first, being what rows mostly hold
            array = value
        elif isinstance(value, Mapping):
            checked[name] = check_row(value, where=functools.partial(_field_of, where, name))
            continue
        else:
            array = _as_array(value)
        if array.dtype.kind not in "biufc" and array.dtype.name != "bfloat16":
            raise BadRecordError(
                f"{where()}, {name}: {_shown(value)} of dtype {array.dtype}, expected numbers or "
                "booleans; turn text into ids first, or leave the field out."
            )
        checked[name] = array
    return NestedMap(checked)


def _field_of(where: Callable[[], str], name: str) -> str:
    return f"{where()}, {name}"


def stack_rows(rows: Sequence[NestedMap], *, name_of: Callable[[int], str]) -> NestedMap:
    """Rows of the same fields, shapes and dtypes, one below the other.

    Args:
      rows: At least one, from `check_row`.
      name_of: Says which row it is that stands at a place of `rows`, for the errors.

    Raises:
      BadRecordError: a row is unlike the first; all fields that differ are listed.
    """
    for place, row in enumerate(rows):
        if not _are_alike(row, rows[0]) and (differing := _differing(row, rows[0])):
            raise BadRecordError(
                f"{name_of(place)} is unlike {name_of(0)}: {'; '.join(differing)}. Pad, cut or "
                "pack rows to one shape."
            )
    return _stacked(rows)


def blank_rows(batch: NestedMap, is_blank: np.ndarray) -> NestedMap:
    """`batch` with some rows made padding: weight 0, provenance -1; bool `[rows]` says which."""

    def blank(name: str, value: Any) -> Any:
        if isinstance(value, NestedMap):
            return NestedMap({key: blank(key, item) for key, item in value.items()})
        array = np.array(value)
        array[is_blank] = PADDING_VALUES.get(name, 0)
        return array

    return NestedMap({name: blank(name, value) for name, value in batch.items()})


def _as_array(value: Any) -> np.ndarray:
    try:
        return np.asarray(value)
    except ValueError:  # a list of lists of unlike lengths
        return np.empty(0, object)


def _are_alike(row: NestedMap, first: NestedMap) -> bool:
    """Whether names, dtypes and shapes are the same."""
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
    """In words, how a row is unlike the first; byte orders may differ."""
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


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
