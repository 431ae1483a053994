"""StoredRows, the rows of another input with arrays that a model computed for them, from a file.

Examples are the most likely tokens of a teacher, and log-probabilities under a reference model.
FOLDER/NAME-DIGEST.npy has a record of each row, in the order of their numbers. DIGEST identifies
the model, the rows, and how the arrays were computed.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from layerkit.config import Config, sub_config_field
from layerkit.config.checks import require
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.base_input import BaseInput
from layerkit_inputs.base.errors import MissingFileError
from layerkit_inputs.base.indexed_input import IndexedInput
from layerkit_inputs.mixing.components import build_components


class StoredRows(IndexedInput):
    """An input of the rows of another one, with arrays `[batch, ...]` of a file."""

    source: Config[BaseInput] | None = sub_config_field(None)
    """Config of the other input, which reads rows by their numbers."""
    folder: str
    """Folder of the file."""
    about: Mapping[str, Any] | None = None
    """JSON values that identify the arrays, such as a digest of the weights of the model."""

    def __post_init__(self) -> None:
        """Check the fields and build the other input."""
        super().__post_init__()
        configs = {} if self.source is None else {self.name or "": self.source}
        sizes = dict.fromkeys(configs, self.local_batch_size)
        (source,) = build_components(self, configs, field="source", batch_sizes=sizes).values()
        self._source: Any = source
        self.token_unit = source.token_unit  # type: ignore[misc]

    def write(self, compute: Callable[[NestedMap], Mapping[str, np.ndarray]]) -> None:
        """Write the file.

        Args:
          compute: Function from a batch of the other input, with the numbers of the rows as
            `provenance` `[batch]`, to arrays `[batch, ...]` by name.
        """
        unfinished, records = self._path.with_suffix(".tmp"), None
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        num_rows, size = self._source._num_rows(), self.local_batch_size
        for first in range(0, num_rows, size):
            # All batches have one shape, so the last one repeats a row.
            rows = np.minimum(np.arange(first, first + size), num_rows - 1)
            arrays = compute(NestedMap(self._source._read_rows(rows), provenance=rows))
            if records is None:
                dtype = np.dtype([(name, x.dtype, x.shape[1:]) for name, x in arrays.items()])
                records = np.lib.format.open_memmap(unfinished, "w+", dtype, (num_rows,))
            for name, array in arrays.items():
                records[name][rows] = array
            records.flush()
        unfinished.replace(self._path)

    @functools.cached_property
    def _path(self) -> Path:
        is_finite = isinstance(self._source, IndexedInput) and self._source._num_rows() is not None
        expected, kind = "an input that reads rows by number, such as text", type(self._source)
        require(is_finite, self._label, "source", kind.__qualname__, expected)
        identity = [self.about, self._source._num_rows(), self._source._cached_fingerprint]
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        return Path(self.folder, f"{self.name}-{digest[:16]}.npy")

    @functools.cached_property
    def _stored(self) -> np.ndarray:
        """Records of the file, which are read when they are used."""
        if not self._path.is_file():
            raise MissingFileError(
                f"no arrays for these rows with {self.about}",
                owner=self._label,
                field="file",
                value=str(self._path),
                hint="Write them anew; see docs/distillation.md or docs/preferences.md.",
            )
        rows: np.ndarray = np.load(self._path, mmap_mode="r")
        return rows

    def _num_rows(self) -> int:
        return len(self._stored)

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        stored, batch = self._stored[rows], self._source._read_rows(rows)
        self._is_unreadable = self._source._is_unreadable
        return NestedMap(batch, **{n: np.ascontiguousarray(stored[n]) for n in stored.dtype.names})

    def _fingerprint(self) -> dict[str, Any]:
        return {**self._source._cached_fingerprint, "about": self.about}

    def _data_text(self) -> str:
        return f"{self._source._data_text()}; stored for them: {self._path}"

    def text_tokenizer(self, key: str | None = None) -> Any:
        """Return the tokenizer of the other input."""
        return self._source.text_tokenizer(key)


def add_stored_arrays(config: Config, *, folder: str, about: Mapping[str, Any]) -> Config:
    """Return the config of `StoredRows` with the rows of an input; see its fields."""
    names = ("name", "is_training", "percore_batch_size", "batch_size")
    fields = {name: getattr(config, name) for name in names}
    return StoredRows.HParams.config(source=config, folder=folder, about=about, **fields)
