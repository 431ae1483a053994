"""HuggingFaceColumns: numbers in columns of a Hugging Face data set as arrays, every row by number.

For data that are no text: pixels, features, labels, ids that were padded before.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from layerkit.nested_map import NestedMap
from layerkit_inputs.bad_records import BadRecordError
from layerkit_inputs.extras import require
from layerkit_inputs.hugging_face.data import HuggingFaceData
from layerkit_inputs.indexed_input import IndexedInput

_CHECKED_ROWS = 16
"""How many rows a state checks the data by."""


class HuggingFaceColumns(HuggingFaceData, IndexedInput):
    """Batches with a field for each of `columns`, `[batch, ...]`.

    A column holds numbers, booleans, or lists of them to any depth, of one shape in all rows.
    Integers of 64 bits become int32 and floats float32, as JAX has them; an integer that does not
    fit is refused. Outside of training also `provenance` and `eval_sample_weights`, each `[batch]`.
    """

    columns: Sequence[str] | None = None
    """Which columns. Required."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.columns, str) or not self.columns:
            raise self._config_error(
                f"columns={self.columns!r}; expected a list of at least one column."
            )
        if self.on_bad_record != "refuse":
            raise self._config_error(
                f"on_bad_record={self.on_bad_record!r}; rows are found by number and cannot be "
                "left out. Filter the data set and save it, or leave on_bad_record='refuse'."
            )

    @functools.cached_property
    def _data(self) -> Any:
        data = self._open_mapped()
        assert self.columns is not None
        for column in self.columns:
            self._check_column("columns", column, data.column_names)
        return data.select_columns(list(self.columns)).with_format("arrow")

    @functools.cached_property
    def _row_shapes(self) -> dict[str, tuple[int, ...]]:
        """Those of the first row, which all rows must have."""
        first = self._arrays(np.zeros(1, np.int64))
        return {name: array.shape[1:] for name, array in first.items()}

    def _num_rows(self) -> int:
        return len(self._data)

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        batch = self._arrays(rows)
        for name, array in batch.items():
            if array.shape[1:] != self._row_shapes[name]:
                raise self._config_error(
                    f"column {name!r}, row {rows[0]}: shape {list(array.shape[1:])}, but row 0 has "
                    f"{list(self._row_shapes[name])}; pad the rows before, to one shape."
                )
        return NestedMap(batch)

    def _arrays(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        table = self._data[rows.tolist()]
        return {
            name: self._array(name, table.column(name).combine_chunks(), rows)
            for name in table.column_names
        }

    def _array(self, name: str, values: Any, rows: np.ndarray) -> np.ndarray:
        """A column's rows, `[rows, ...]`."""
        arrow = require("pyarrow", needed_by="HuggingFaceColumns")
        shape = [len(rows)]
        while True:
            if values.null_count:
                row = rows[int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])]
                where = f"row {row}" if len(shape) == 1 else f"rows {rows.tolist()}"
                raise BadRecordError(f"split {self.split!r}, {where}: null in column {name!r}.")
            if not (arrow.types.is_nested(values.type) and hasattr(values.type, "value_type")):
                break
            sizes = np.unique(values.value_lengths().to_numpy(zero_copy_only=False))
            if len(sizes) != 1:
                raise self._config_error(
                    f"column {name!r}, rows {rows.tolist()}: lists of {sizes.tolist()} values; "
                    "pad the rows before, to one shape."
                )
            shape.append(int(sizes[0]))
            values = values.flatten()
        array = values.to_numpy(zero_copy_only=False)
        if array.dtype.kind not in "biuf":
            raise self._config_error(
                f"column {name!r} holds {values.type}; expected numbers, booleans or lists of them."
            )
        return self._as_jax_has_it(name, array, rows).reshape(shape)

    def _as_jax_has_it(self, name: str, array: np.ndarray, rows: np.ndarray) -> np.ndarray:
        if array.dtype == np.float64:
            return array.astype(np.float32)
        if array.dtype.kind not in "iu" or array.dtype.itemsize < 8:
            return array.copy()  # what Arrow gives cannot be written to
        limits = np.iinfo(np.int32)
        if len(array) and not (limits.min <= array.min() and array.max() <= limits.max):
            raise self._config_error(
                f"column {name!r}, rows {rows.tolist()}: numbers from {array.min()} to "
                f"{array.max()}; expected int32."
            )
        return array.astype(np.int32)

    @functools.cached_property
    def _checksum(self) -> int:
        """CRC-32 of some of the rows."""
        checksum = 0
        for row in np.unique(np.linspace(0, len(self._data) - 1, _CHECKED_ROWS, dtype=np.int64)):
            for array in self._arrays(row[None]).values():
                checksum = zlib.crc32(np.ascontiguousarray(array).tobytes(), checksum)
        return checksum

    def _fingerprint(self) -> dict[str, Any]:
        assert self.columns is not None
        return {
            "split": self.split,
            "columns": list(self.columns),
            "rows_crc32": self._checksum,
        }
