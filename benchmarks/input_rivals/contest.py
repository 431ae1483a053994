"""The definition of a contest between a reader and its rival, and their shared text."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from layerkit_inputs import BaseInput
from layerkit_inputs.base.find_files import standard_library_files

BATCH_SIZE = 32
LENGTH = 512
EVAL_ROWS = 1000
"""Approximate rows of an evaluation epoch, not a multiple of the batch size."""
SHUFFLED = 1024
"""Examples in the shuffle window or buffer."""


Batch = Mapping[str, Any]


class Contest(NamedTuple):
    """Two ways to read the same batches."""

    ours: Callable[[], BaseInput]
    """Factory of the reader, which is endless."""
    bare: Callable[[], Iterator[Batch]]
    """Factory of the rival's endless iterator."""
    is_same_order: bool = False
    """Whether both read the same batches, so that values are compared, too."""
    least_batches: int = 1
    """Minimum number of batches per slice, for sides that prefetch or work in bursts."""
    is_evaluation: bool = False
    """Whether both read padded evaluation epochs in order."""
    renamed: Mapping[str, str] | None = None
    """The reader's field name by the rival's, for the shared fields. None: all, same names."""


@functools.cache
def texts(characters: int = 2000) -> list[str]:
    """Return the standard library's sources, cut into documents of `characters` characters."""
    pieces = []
    for file in standard_library_files():
        text = file.path.read_text("utf-8", "replace")
        starts = range(0, len(text), characters)
        pieces += [text[start : start + characters] for start in starts]
    return pieces


def write_json_lines(folder: Path, *, num_files: int, most: int | None = None) -> list[str]:
    """Write the first `most` texts as `{"text": …}` lines; return the paths."""
    paths = [folder / f"text-{number}.jsonl" for number in range(num_files)]
    for number, path in enumerate(paths):
        lines = [json.dumps({"text": text}) for text in texts()[:most][number::num_files]]
        path.write_text("\n".join(lines) + "\n")
    return [str(path) for path in paths]


def token_rows() -> np.ndarray:
    """Return the bytes of the texts as token rows, int32 `[rows, LENGTH + 1]`."""
    ids = np.frombuffer("".join(texts()).encode(), np.uint8).astype(np.int32) + 3
    return ids[: len(ids) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)


def fields_of_batch(batch: Batch, path: str = "") -> dict[str, np.ndarray]:
    """Return the arrays of a batch by dotted name."""
    fields: dict[str, np.ndarray] = {}
    for name, value in batch.items():
        if isinstance(value, Mapping):
            fields |= fields_of_batch(value, f"{path}{name}.")
        else:
            fields[f"{path}{name}"] = np.asarray(value)
    return fields


def evaluations(epoch: Callable[[], Iterable[Batch]]) -> Iterator[Batch]:
    """Yield the epochs of a rival endlessly, with row numbers and a padded last batch."""
    while True:
        first = 0
        for batch in epoch():
            fields = fields_of_batch(batch)
            num_rows = len(next(iter(fields.values())))
            fields["provenance"] = np.arange(first, first + num_rows, dtype=np.int32)
            fields["eval_sample_weights"] = np.ones(num_rows, np.float32)
            first += num_rows
            if missing := BATCH_SIZE - num_rows:
                fields = {name: _filled_up(name, array, missing) for name, array in fields.items()}
            yield fields


def _filled_up(name: str, array: np.ndarray, missing: int) -> np.ndarray:
    value = {"provenance": -1, "paddings": 1}.get(name.split(".")[-1], 0)
    fill = np.full((missing, *array.shape[1:]), value, array.dtype)
    return np.concatenate([array, fill])


def fields_of_row(row: np.ndarray) -> dict[str, np.ndarray]:
    """Return the batch fields of a token row; row readers and their rivals share this transform."""
    ones = np.ones(LENGTH, np.float32)
    return {"ids": row[:-1], "labels": row[1:], "weights": ones, "paddings": 1 - ones}
