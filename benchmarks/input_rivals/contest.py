"""A reader and its rival, and the text that both read."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from layerkit_inputs import BaseInput
from layerkit_inputs.text_files import standard_library_files

BATCH_SIZE = 32
LENGTH = 512
EVAL_ROWS = 1000
"""About as many in an epoch of an evaluation; no whole batches."""
SHUFFLED = 1024
"""Examples in the window or buffer of readers that shuffle so."""


Batch = Mapping[str, Any]


class Contest(NamedTuple):
    """Two ways to the same batches."""

    ours: Callable[[], BaseInput]
    """Makes the reader; endless."""
    bare: Callable[[], Iterator[Batch]]
    """Makes the rival; endless."""
    is_same_order: bool = False
    """Both give the same batches, so that values are compared and not only shapes."""
    least_batches: int = 1
    """Batches of a turn at least, where a side works ahead or in bursts."""
    is_evaluation: bool = False
    """Both read one epoch after the other from the start to the end, which is padded."""
    renamed: Mapping[str, str] | None = None
    """Field of the rival -> ours, of those that both have; None: all fields, by their names."""


@functools.cache
def texts(characters: int = 2000) -> list[str]:
    """The standard library's sources in pieces of so many characters, as documents."""
    pieces = []
    for file in standard_library_files():
        text = file.path.read_text("utf-8", "replace")
        starts = range(0, len(text), characters)
        pieces += [text[start : start + characters] for start in starts]
    return pieces


def write_json_lines(folder: Path, *, num_files: int, most: int | None = None) -> list[str]:
    """Writes the first `texts` as `{"text": …}` lines; returns the files."""
    paths = [folder / f"text-{number}.jsonl" for number in range(num_files)]
    for number, path in enumerate(paths):
        lines = [json.dumps({"text": text}) for text in texts()[:most][number::num_files]]
        path.write_text("\n".join(lines) + "\n")
    return [str(path) for path in paths]


def token_rows() -> np.ndarray:
    """Rows of bytes of the texts, int32 `[rows, LENGTH + 1]`."""
    ids = np.frombuffer("".join(texts()).encode(), np.uint8).astype(np.int32) + 3
    return ids[: len(ids) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)


def fields_of_batch(batch: Batch, path: str = "") -> dict[str, np.ndarray]:
    """Arrays of a batch by their dotted names."""
    fields: dict[str, np.ndarray] = {}
    for name, value in batch.items():
        if isinstance(value, Mapping):
            fields |= fields_of_batch(value, f"{path}{name}.")
        else:
            fields[f"{path}{name}"] = np.asarray(value)
    return fields


def evaluations(epoch: Callable[[], Iterable[Batch]]) -> Iterator[Batch]:
    """Epochs of a rival, its rows numbered and its last batches filled up."""
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
    """The transform that readers of rows and their rivals share."""
    ones = np.ones(LENGTH, np.float32)
    return {"ids": row[:-1], "labels": row[1:], "weights": ones, "paddings": 1 - ones}
