"""TeacherRows, the rows of another input with the most likely tokens of a teacher, from files.

FOLDER/NAME/
  about.json      digests of the teacher's weights and of the rows; written last
  ids.npy         most likely tokens of each position, int32 [rows, length, k]
  log_probs.npy   their log-probabilities and that of all others, float32 [rows, length, k + 1]
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from layerkit.config import Config, sub_config_field
from layerkit.config.checks import require
from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError
from layerkit_inputs.base.base_input import BaseInput
from layerkit_inputs.base.indexed_input import IndexedInput
from layerkit_inputs.mixing.components import build_components

_ABOUT = "about.json"
_FILES = ("ids.npy", "log_probs.npy")


def write_teacher_rows(
    folder: str, source: Any, batches: Iterable[tuple[np.ndarray, ...]], **about: Any
) -> None:
    """Write the files of a data set, into the folder of its name.

    Args:
      folder: Folder for the files of all data sets.
      source: Input of the data set.
      batches: Row numbers `[batch]`, negative for padding, and the arrays of these rows.
      **about: Fields of `TeacherRows` that have to agree, `teacher` and `temperature`.
    """
    path = Path(folder, source.name or "")
    arrays: list[np.memmap] = []
    about["rows"] = _rows_digest(source)
    path.mkdir(parents=True, exist_ok=True)
    (path / _ABOUT).unlink(missing_ok=True)
    for numbers, *values in batches:
        for name, value in zip(_FILES, values, strict=True) if not arrays else ():
            shape = (source._num_rows(), *value.shape[1:])
            arrays.append(np.lib.format.open_memmap(path / name, "w+", value.dtype, shape))
        for array, value in zip(arrays, values, strict=True):
            array[numbers[numbers >= 0]] = value[numbers >= 0]
            array.flush()
    (path / _ABOUT).write_text(json.dumps(about) + "\n")


def _rows_digest(source: Any) -> str:
    """Return a SHA-256 of what identifies the rows of an input, in any order."""
    is_finite = isinstance(source, IndexedInput) and source._num_rows() is not None
    expected = "an input that reads rows by their numbers, such as text files"
    require(is_finite, source._label, "class", type(source).__qualname__, expected)
    identity = {"num_rows": source._num_rows(), **source._fingerprint()}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


class TeacherRows(IndexedInput):
    """An input of the rows of another one, with `teacher_ids` and `teacher_log_probs`."""

    source: Config[BaseInput] | None = sub_config_field(None)
    """Config of the other input, which reads rows by their numbers."""
    folder: str
    """Folder that `--mode=top_logits` wrote."""
    teacher: str | None = None
    """Digest of the teacher's weights that the files must have. None: any."""
    temperature: float = 1.0
    """Temperature that the files must have."""

    def __post_init__(self) -> None:
        """Check the fields and build the other input."""
        super().__post_init__()
        configs = {} if self.source is None else {self.name or "": self.source}
        sizes = dict.fromkeys(configs, self.local_batch_size)
        (source,) = build_components(self, configs, field="source", batch_sizes=sizes).values()
        self._source: Any = source
        self.token_unit = source.token_unit  # type: ignore[misc]

    @functools.cached_property
    def _stored(self) -> list[np.ndarray]:
        """Arrays of the files, which are read when they are used.

        Raises:
          ConfigError: They are missing, unfinished, or of another teacher, rows or temperature.
        """
        path, about = Path(self.folder, self.name or ""), {}
        if (path / _ABOUT).is_file():
            about = json.loads((path / _ABOUT).read_text())
        here = {"temperature": self.temperature, "rows": _rows_digest(self._source)}
        for name, value in {"teacher": self.teacher or about.get("teacher", ""), **here}.items():
            if about.get(name) != value:
                raise ConfigError(
                    f"the teacher's tokens are of another {name}, missing or unfinished",
                    owner=str(path / _ABOUT),
                    field=name,
                    value=about.get(name),
                    expected=repr(value),
                    hint="Write them with the same command and --mode=top_logits.",
                )
        return [np.load(path / name, mmap_mode="r") for name in _FILES]

    def _num_rows(self) -> int:
        return len(self._stored[0])

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        ids, log_probs = (array[rows] for array in self._stored)
        batch = self._source._read_rows(rows)
        self._is_unreadable = self._source._is_unreadable
        return NestedMap(batch, teacher_ids=ids, teacher_log_probs=log_probs)

    def _fingerprint(self) -> dict[str, Any]:
        return {**self._source._fingerprint(), "teacher": self.teacher}

    def _data_text(self) -> str:
        return f"{self._source._data_text()}; tokens of the teacher: {self.folder}"

    def text_tokenizer(self, key: str | None = None) -> Any:
        """Return the tokenizer of the other input."""
        return self._source.text_tokenizer(key)
