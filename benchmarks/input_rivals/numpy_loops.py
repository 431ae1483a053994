"""Contests with hand-written NumPy loops, for readers without a data library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from input_rivals.contest import (
    BATCH_SIZE,
    EVAL_ROWS,
    LENGTH,
    Batch,
    Contest,
    evaluations,
    texts,
)
from layerkit_inputs import BaseInput, LocalText, SyntheticInput
from layerkit_inputs.base.find_files import find_text_files
from layerkit_inputs.mixing.mixture import Mixture
from layerkit_inputs.mixing.multi_input import MultiInput
from layerkit_inputs.text.text_files import split_pieces

BOS, EOS, FIRST_BYTE = 1, 2, 3
VOCABULARY = 32_000
NOISE = 0.1
HELDOUT = 1e-9
"""Fraction that holds out one file."""


class PackedText:
    """Concatenated documents in memory, as rows of inputs and of labels."""

    def __init__(self, documents: Sequence[bytes]):
        """Tokenize the documents as bytes, add BOS and EOS, and pad the last row."""
        framed = [
            np.concatenate([[BOS], np.frombuffer(text, np.uint8) + np.int16(FIRST_BYTE), [EOS]])
            for text in documents
        ]
        inputs = np.concatenate([ids[:-1] for ids in framed]).astype(np.int16)
        labels = np.concatenate([ids[1:] for ids in framed]).astype(np.int16)
        self.num_rows = -(-len(inputs) // LENGTH)
        missing = self.num_rows * LENGTH - len(inputs)
        self._inputs = np.pad(inputs, (0, missing)).reshape(-1, LENGTH)
        self._labels = np.pad(labels, (0, missing)).reshape(-1, LENGTH)

    def read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return the rows by number, with the batch fields of a language model."""
        ids, labels = self._inputs[rows].astype(np.int32), self._labels[rows].astype(np.int32)
        return {"ids": ids, "labels": labels, **masks_and_segments(ids)}

    def epoch(self) -> Iterator[dict[str, np.ndarray]]:
        """Yield all rows in order; the last batch may be short."""
        for start in range(0, self.num_rows, BATCH_SIZE):
            yield self.read(np.arange(start, min(start + BATCH_SIZE, self.num_rows)))

    def batches(self) -> Iterator[dict[str, np.ndarray]]:
        """Yield batches of endless shuffled epochs; a batch may span two epochs."""
        numbers = shuffled_epochs(self.num_rows)
        while True:
            yield self.read(np.array([next(numbers) for _ in range(BATCH_SIZE)]))


def masks_and_segments(ids: np.ndarray) -> dict[str, np.ndarray]:
    """Return masks, segment ids and positions of ids `[rows, length]`; `BOS` opens a document."""
    valid = ids > 0
    begins = ids == BOS
    segments = np.cumsum(begins, axis=1) + 1 - begins[:, :1]
    columns = np.arange(ids.shape[1])
    since = np.maximum.accumulate(np.where(begins, columns, 0), axis=1)
    return {
        "weights": valid.astype(np.float32),
        "paddings": (~valid).astype(np.float32),
        "segment_ids": np.where(valid, segments, 0).astype(np.int32),
        "segment_pos": np.where(valid, columns - since, 0).astype(np.int32),
    }


def shuffled_epochs(num_rows: int) -> Iterator[int]:
    """Yield row numbers endlessly; the epoch number seeds the order of each epoch."""
    epoch = 0
    while True:
        generator = np.random.Generator(np.random.Philox(key=np.array([0, epoch], np.uint64)))
        yield from generator.permutation(num_rows).tolist()
        epoch += 1


def _write_files(folder: Path) -> list[str]:
    paths = [folder / f"{number:05}.txt" for number in range(len(texts()))]
    for path, text in zip(paths, texts(), strict=True):
        path.write_text(text)
    return [str(path) for path in paths]


def _local_text(paths: Sequence[str]) -> Any:
    return LocalText.HParams.config(paths=paths, seq_length=LENGTH, heldout_fraction=HELDOUT)


def _packed(paths: Sequence[str]) -> PackedText:
    pieces, _ = split_pieces(find_text_files(paths), heldout_fraction=HELDOUT)
    return PackedText([piece.read() for piece in pieces])


def local_text(folder: Path) -> Contest:
    """Compare rows of documents in memory."""
    paths = _write_files(folder)
    return Contest(
        ours=_local_text(paths).set(batch_size=BATCH_SIZE, is_training=True).Instantiate,
        bare=lambda: _packed(paths).batches(),
        is_same_order=True,
    )


def local_text_evaluated(folder: Path) -> Contest:
    """Compare evaluation epochs of a few rows."""
    paths = _write_files(folder)[: EVAL_ROWS * LENGTH // 2000]

    def bare() -> Iterator[Batch]:
        return evaluations(_packed(paths).epoch)

    return Contest(
        ours=_local_text(paths).set(batch_size=BATCH_SIZE).Instantiate,
        bare=bare,
        is_same_order=True,
        is_evaluation=True,
    )


def _walks() -> Iterator[Batch]:
    generator = np.random.default_rng(0)
    cycle = generator.permutation(VOCABULARY).astype(np.int32)
    shape = BATCH_SIZE, LENGTH + 1
    while True:
        jumps = generator.random(shape, np.float32) < NOISE
        jumps[:, 0] = True
        steps = np.where(jumps, generator.integers(VOCABULARY, size=shape, dtype=np.int32), 1)
        tokens = cycle[np.cumsum(steps, axis=1, dtype=np.int64) % VOCABULARY]
        yield {
            "ids": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "weights": np.ones((BATCH_SIZE, LENGTH), np.float32),
            "paddings": np.zeros((BATCH_SIZE, LENGTH), np.float32),
            "segment_ids": np.ones((BATCH_SIZE, LENGTH), np.int32),
            "segment_pos": np.tile(np.arange(LENGTH, dtype=np.int32), (BATCH_SIZE, 1)),
        }


def synthetic(folder: Path) -> Contest:
    """Compare random walks; the rival draws whole batches, so its rows have no numbers."""
    config = SyntheticInput.HParams.config(
        vocab_size=VOCABULARY, seq_length=LENGTH, noise=NOISE, batch_size=BATCH_SIZE
    )
    return Contest(config.set(is_training=True).Instantiate, _walks)


def _mixed(streams: Sequence[PackedText], shares: Sequence[float]) -> Iterator[Batch]:
    generator = np.random.default_rng(0)
    numbers = [shuffled_epochs(stream.num_rows) for stream in streams]
    while True:
        turns = generator.choice(len(streams), size=BATCH_SIZE, p=shares)
        order = np.argsort(np.argsort(turns, kind="stable"))
        parts = [
            stream.read(
                np.array([next(numbers[index]) for _ in range(np.sum(turns == index))], int)
            )
            for index, stream in enumerate(streams)
        ]
        yield {name: np.concatenate([part[name] for part in parts])[order] for name in parts[0]}


def _halves(folder: Path) -> dict[str, list[str]]:
    paths = _write_files(folder)
    return {"even": paths[::2], "odd": paths[1::2]}


def _mixing(kind: type[BaseInput], halves: Mapping[str, Sequence[str]]) -> Any:
    return kind.HParams.config(
        components={name: _local_text(half) for name, half in halves.items()},
        weights={"even": 0.7, "odd": 0.3},
        batch_size=BATCH_SIZE,
        is_training=True,
    )


def mixture(folder: Path) -> Contest:
    """Compare rows of two corpora with weights 0.7 and 0.3; the rival samples the corpus."""
    halves = _halves(folder)
    return Contest(
        ours=_mixing(Mixture, halves).Instantiate,
        bare=lambda: _mixed([_packed(half) for half in halves.values()], [0.7, 0.3]),
    )


def _side_by_side(one: Iterator[Batch], other: Iterator[Batch]) -> Iterator[Batch]:
    for left, right in zip(one, other, strict=True):
        parts = {"even": left, "odd": right}
        yield {
            name: {field: array[:, None] for field, array in part.items()}
            for name, part in parts.items()
        }


def multi_input(folder: Path) -> Contest:
    """Compare combined batches of two corpora."""
    halves = _halves(folder)
    return Contest(
        ours=MultiInput.HParams.config(
            input_to_params={name: _local_text(half) for name, half in halves.items()},
            batch_size=BATCH_SIZE,
            is_training=True,
        ).Instantiate,
        bare=lambda: _side_by_side(*(_packed(half).batches() for half in halves.values())),
    )
