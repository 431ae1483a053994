"""HuggingFaceColumns: columns of numbers of a Hugging Face data set as arrays.

The input is meant for data that are not text, such as pixels, features, labels and padded ids.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from layerkit.config.checks import check_choice, require
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.bad_records import BadRecordError
from layerkit_inputs.base.errors import require_extra
from layerkit_inputs.base.indexed_input import IndexedInput
from layerkit_inputs.hugging_face.dataset_base import HuggingFaceData

_CHECKED_ROWS = 16
"""Number of rows that identify the data in a state."""
_PAD_ROWS = "Pad the rows of the data set to one shape."


class HuggingFaceColumns(HuggingFaceData, IndexedInput):
    """An input of batches with one field `[batch, ...]` for each of `columns`.

    A column holds numbers, booleans, or nested lists of them with one shape in all rows. 64-bit
    integers become int32 and 64-bit floats become float32, the defaults of JAX. An integer that
    does not fit raises ConfigError. Evaluation batches also have `provenance` and
    `eval_sample_weights`, each `[batch]`.
    """

    columns: Sequence[str] | None = None
    """Names of the columns. Required."""

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        is_list = self.columns and not isinstance(self.columns, str)
        require(is_list, self._label, "columns", self.columns, "a list of at least one column")
        if self.on_bad_record != "refuse":
            raise self._config_error(
                field="on_bad_record",
                value=self.on_bad_record,
                expected="'refuse', since rows are read by number",
                hint="Filter the data set and save it.",
            )

    @functools.cached_property
    def _data(self) -> Any:
        data = self._open_mapped()
        assert self.columns is not None
        for column in self.columns:
            check_choice(self._label, data.column_names, columns=column)
        return data.select_columns(list(self.columns)).with_format("arrow")

    @functools.cached_property
    def _row_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each column in the first row, which all rows must have."""
        first = self._arrays(np.zeros(1, np.int64))
        return {name: array.shape[1:] for name, array in first.items()}

    def _num_rows(self) -> int:
        return len(self._data)

    def _num_documents(self) -> int:
        return len(self._data)

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        batch = self._arrays(rows)
        for name, array in batch.items():
            if array.shape[1:] != self._row_shapes[name]:
                raise self._config_error(
                    field=f"shape of column {name!r} in row {rows[0]}",
                    value=list(array.shape[1:]),
                    expected=f"{list(self._row_shapes[name])}, as in row 0",
                    hint=_PAD_ROWS,
                )
        return NestedMap(batch)

    def _arrays(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        table = self._data[rows.tolist()]
        return {
            name: self._array(name, table.column(name).combine_chunks(), rows)
            for name in table.column_names
        }

    def _array(self, name: str, values: Any, rows: np.ndarray) -> np.ndarray:
        """Return the values of a column in some rows, `[rows, ...]`."""
        arrow = require_extra("pyarrow", needed_by="HuggingFaceColumns")
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
                    field=f"list lengths of column {name!r} in rows {rows.tolist()}",
                    value=sizes.tolist(),
                    expected="one length",
                    hint=_PAD_ROWS,
                )
            shape.append(int(sizes[0]))
            values = values.flatten()
        array = values.to_numpy(zero_copy_only=False)
        if array.dtype.kind not in "biuf":
            raise self._config_error(
                field=f"type of column {name!r}",
                value=str(values.type),
                expected="numbers, booleans or lists of them",
            )
        return self._to_32_bits(name, array, rows).reshape(shape)

    def _to_32_bits(self, name: str, array: np.ndarray, rows: np.ndarray) -> np.ndarray:
        if array.dtype == np.float64:
            return array.astype(np.float32)
        if array.dtype.kind not in "iu" or array.dtype.itemsize < 8:
            return array.copy()  # arrays of Arrow are read-only
        limits = np.iinfo(np.int32)
        if len(array) and not (limits.min <= array.min() and array.max() <= limits.max):
            raise self._config_error(
                field=f"column {name!r} in rows {rows.tolist()}",
                value=[int(array.min()), int(array.max())],
                expected="integers that fit int32",
            )
        return array.astype(np.int32)

    @functools.cached_property
    def _checksum(self) -> int:
        """CRC-32 of a sample of the rows."""
        checksum = 0
        for row in np.unique(np.linspace(0, len(self._data) - 1, _CHECKED_ROWS, dtype=np.int64)):
            for array in self._arrays(row[None]).values():
                checksum = zlib.crc32(np.ascontiguousarray(array).tobytes(), checksum)
        return checksum

    def _fingerprint(self) -> dict[str, Any]:
        assert self.columns is not None
        return {"split": self.split, "columns": list(self.columns), "rows_crc32": self._checksum}
