"""Batches from rows: dictionaries of arrays become arrays `[rows, ...]`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from layerkit.nested_map import NestedMap
from layerkit_inputs.bad_records import BadRecordError
from layerkit_inputs.eval_padding import PADDING_VALUES


def check_row(row: Any, *, where: str) -> NestedMap:
    """A row as a NestedMap of arrays.

    Args:
      row: A mapping of names to arrays, numbers or such mappings.
      where: Which row it is, for the errors.

    Raises:
      BadRecordError: it is no mapping, is empty, or holds something that is no number.
    """
    if not isinstance(row, Mapping):
        raise BadRecordError(
            f"{where}: a {type(row).__qualname__}, expected a dictionary of arrays, such as "
            "{'ids': array}."
        )
    if not row:
        raise BadRecordError(f"{where}: an empty dictionary, expected arrays in it.")
    checked = NestedMap()
    for name, value in row.items():
        if isinstance(value, Mapping):
            checked[name] = check_row(value, where=f"{where}, {name}")
            continue
        try:
            array = np.asarray(value)
        except ValueError:
            array = np.empty(0, object)  # a list of lists of unlike lengths
        if array.dtype.kind not in "biufc" and array.dtype.name != "bfloat16":
            raise BadRecordError(
                f"{where}, {name}: {_shown(value)} of dtype {array.dtype}, expected numbers or "
                "booleans; turn text into ids first, or leave the field out."
            )
        checked[name] = array
    return checked


def stack_rows(rows: Sequence[NestedMap], *, names: Sequence[str]) -> NestedMap:
    """Rows of the same fields, shapes and dtypes, one below the other.

    Args:
      rows: At least one, from `check_row`.
      names: Which row each is, for the errors.

    Raises:
      BadRecordError: a row is unlike the first; all fields that differ are listed.
    """
    first = _described(rows[0])
    for row, name in zip(rows, names, strict=True):
        described = _described(row)
        if described != first:
            differing = [
                f"{path} is {described.get(path, 'missing')}, not {first.get(path, 'missing')}"
                for path in sorted({*described, *first})
                if described.get(path) != first.get(path)
            ]
            raise BadRecordError(
                f"{name} is unlike {names[0]}: {'; '.join(differing)}. Pad, cut or pack rows to "
                "one shape."
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


def _described(row: NestedMap) -> dict[str, str]:
    return {path: f"{array.dtype.name}{list(array.shape)}" for path, array in row.flatten_items()}


def _stacked(rows: Sequence[NestedMap]) -> NestedMap:
    batch = NestedMap()
    for name, value in rows[0].items():
        values = [row[name] for row in rows]
        batch[name] = _stacked(values) if isinstance(value, NestedMap) else np.stack(values)
    return batch


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
