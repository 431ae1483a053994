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
from layerkit_inputs.base.errors import BadRecordError, require_extra
from layerkit_inputs.base.indexed_input import IndexedInput
from layerkit_inputs.hugging_face.dataset_base import HuggingFaceData

_CHECKED_ROWS = 16
"""Number of rows that identify the data in a state."""


class HuggingFaceColumns(HuggingFaceData, IndexedInput):
    """An input of batches with one field `[batch, ...]` for each of `columns`.

    A column holds numbers, booleans, or nested lists of them with one shape in all rows. 64-bit
    integers become int32 and 64-bit floats become float32, the defaults of JAX. An integer that
    does not fit raises ConfigError. Evaluation batches also have `provenance` and
    `eval_sample_weights`, each `[batch]`.
    """

    columns: Sequence[str] | None = None
    """Names of the columns. Required."""

    @functools.cached_property
    def _data(self) -> Any:
        require(self.columns, self._label, "columns", self.columns, "a list of columns")
        data = self._open_mapped()
        for column in self.columns or ():
            check_choice(self._label, data.column_names, columns=column)
        return data.select_columns(list(self.columns or ())).with_format("arrow")

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
            shape, expected = list(array.shape[1:]), list(self._row_shapes[name])
            field = f"shape of column {name!r} in row {rows[0]}"
            require(shape == expected, self._label, field, shape, f"{expected}, as in row 0")
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
                problem = f"null in column {name!r} of rows {rows.tolist()}"
                raise BadRecordError(problem, owner=f"split {self.split!r}")
            if not (arrow.types.is_nested(values.type) and hasattr(values.type, "value_type")):
                break
            sizes = np.unique(values.value_lengths().to_numpy(zero_copy_only=False))
            if len(sizes) != 1:
                field = f"list lengths of column {name!r} in rows {rows.tolist()}"
                raise self._config_error(field=field, value=sizes.tolist(), expected="one length")
            shape.append(int(sizes[0]))
            values = values.flatten()
        array = values.to_numpy(zero_copy_only=False)
        kind = str(values.type)
        expected = "numbers, booleans or lists of them"
        is_number = array.dtype.kind in "biuf"
        require(is_number, self._label, f"type of column {name!r}", kind, expected)
        return self._narrow(name, array, rows).reshape(shape)

    def _narrow(self, name: str, array: np.ndarray, rows: np.ndarray) -> np.ndarray:
        if array.dtype == np.float64:
            return array.astype(np.float32)
        if array.dtype.kind not in "iu" or array.dtype.itemsize < 8:
            return array.copy()  # arrays of Arrow are read-only
        limits, ends = np.iinfo(np.int32), [int(array.min(initial=0)), int(array.max(initial=0))]
        if ends[0] < limits.min or ends[1] > limits.max:
            field = f"column {name!r} in rows {rows.tolist()}"
            expected = "integers that fit int32"
            raise self._config_error(field=field, value=ends, expected=expected)
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
        return {
            "split": self.split,
            "columns": list(self.columns or ()),
            "rows_crc32": self._checksum,
        }
