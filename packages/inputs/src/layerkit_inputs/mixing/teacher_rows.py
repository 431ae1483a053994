"""TeacherRows, the rows of another input with the most likely tokens of a teacher, from a file.

FOLDER/NAME-DIGEST.npy has a record of each row, in the order of their numbers: `teacher_ids` int32
`[length, k]` and `teacher_log_probs` float32 `[length, k + 1]`. DIGEST identifies the teacher, the
rows, and how the tokens were computed.
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


class TeacherRows(IndexedInput):
    """An input of the rows of another one, with `teacher_ids` and `teacher_log_probs`."""

    source: Config[BaseInput] | None = sub_config_field(None)
    """Config of the other input, which reads rows by their numbers."""
    folder: str
    """Folder that `--mode=top_logits` wrote."""
    about: Mapping[str, Any] | None = None
    """JSON values that identify the teacher's tokens, such as their temperature."""

    def __post_init__(self) -> None:
        """Check the fields and build the other input."""
        super().__post_init__()
        configs = {} if self.source is None else {self.name or "": self.source}
        sizes = dict.fromkeys(configs, self.local_batch_size)
        (source,) = build_components(self, configs, field="source", batch_sizes=sizes).values()
        self._source: Any = source
        self.token_unit = source.token_unit  # type: ignore[misc]

    def write(self, compute: Callable[[NestedMap], Mapping[str, np.ndarray]]) -> None:
        """Write the file from the arrays `[batch, length, ...]` of each batch of an epoch."""
        unfinished, rows = self._path.with_suffix(".tmp"), None
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        for batch in self._source.eval_batches():
            arrays, is_row = compute(batch), batch.provenance >= 0
            if rows is None:
                dtype = np.dtype([(name, x.dtype, x.shape[1:]) for name, x in arrays.items()])
                shape = (self._source._num_rows(),)
                rows = np.lib.format.open_memmap(unfinished, "w+", dtype, shape)
            for name, array in arrays.items():
                rows[name][batch.provenance[is_row]] = array[is_row]
            rows.flush()
        unfinished.replace(self._path)

    @functools.cached_property
    def _path(self) -> Path:
        is_finite = isinstance(self._source, IndexedInput) and self._source._num_rows() is not None
        expected, kind = "an input that reads rows by number, such as text", type(self._source)
        require(is_finite, self._label, "source", kind.__qualname__, expected)
        identity = [self.about, self._source._num_rows(), self._source._fingerprint()]
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        return Path(self.folder, f"{self.name}-{digest[:16]}.npy")

    @functools.cached_property
    def _stored(self) -> np.ndarray:
        """Records of the file, which are read when they are used."""
        if not self._path.is_file():
            raise MissingFileError(
                f"no tokens of these rows and this teacher, {self.about}",
                owner=self._label,
                field="file",
                value=str(self._path),
                hint="Write them with the same command and --mode=top_logits.",
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
        return {**self._source._fingerprint(), "about": self.about}

    def _data_text(self) -> str:
        return f"{self._source._data_text()}; tokens of the teacher: {self._path}"

    def text_tokenizer(self, key: str | None = None) -> Any:
        """Return the tokenizer of the other input."""
        return self._source.text_tokenizer(key)
