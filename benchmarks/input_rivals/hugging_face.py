"""`datasets` alone: text tokenised, grouped into rows, shuffled and batched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from input_rivals.contest import (
    BATCH_SIZE,
    LENGTH,
    SHUFFLED,
    Batch,
    Contest,
    token_rows,
    write_json_lines,
)
from input_rivals.numpy_loops import BOS, EOS, FIRST_BYTE, masks_and_segments
from layerkit_inputs.hugging_face.columns import HuggingFaceColumns
from layerkit_inputs.hugging_face.input import HuggingFaceInput
from layerkit_inputs.hugging_face.stream import HuggingFaceStream

datasets.disable_progress_bars()


def _tokens(text: str) -> np.ndarray:
    tokens = np.frombuffer(text.encode(), np.uint8) + np.int32(FIRST_BYTE)
    return np.concatenate([[BOS], tokens, [EOS]]).astype(np.int32)


def _grouped(examples: dict[str, list[str]]) -> dict[str, Any]:
    """Inputs and labels of examples laid end to end, in whole rows; the rest is dropped."""
    framed = [_tokens(text) for text in examples["text"]]
    inputs = np.concatenate([ids[:-1] for ids in framed])
    labels = np.concatenate([ids[1:] for ids in framed])
    used = len(inputs) // LENGTH * LENGTH
    return {
        "ids": list(inputs[:used].reshape(-1, LENGTH)),
        "labels": list(labels[:used].reshape(-1, LENGTH)),
    }


def _mapped(files: list[str], cache: str) -> Iterator[Batch]:
    data = datasets.load_dataset("json", data_files=files, split="train", cache_dir=cache)
    data = data.map(_grouped, batched=True, remove_columns=["text"]).with_format("numpy")
    epoch = 0
    while True:
        for batch in data.shuffle(seed=epoch).iter(BATCH_SIZE, drop_last_batch=True):
            ids = batch["ids"].astype(np.int32)
            labels = batch["labels"].astype(np.int32)
            yield {"ids": ids, "labels": labels, **masks_and_segments(ids)}
        epoch += 1


def mapped_text(folder: Path) -> Contest:
    """Rows of tokenised text in a memory-mapped cache."""
    files, cache = write_json_lines(folder, num_files=4), str(folder / "cache")
    config = HuggingFaceInput.HParams.config(
        path="json", data_files=files, cache_dir=cache, seq_length=LENGTH, batch_size=BATCH_SIZE
    )
    return Contest(config.set(is_training=True).Instantiate, lambda: _mapped(files, cache))


def _streamed(files: list[str]) -> Iterator[Batch]:
    data = datasets.load_dataset("json", data_files=files, split="train", streaming=True)
    data = data.shuffle(seed=0, buffer_size=SHUFFLED)
    inputs, labels = np.zeros(0, np.int32), np.zeros(0, np.int32)
    needed, epoch = BATCH_SIZE * LENGTH, 0
    while True:
        data.set_epoch(epoch)
        for example in data:
            tokens = _tokens(example["text"])
            inputs = np.concatenate([inputs, tokens[:-1]])
            labels = np.concatenate([labels, tokens[1:]])
            if len(inputs) >= needed:
                ids = inputs[:needed].reshape(BATCH_SIZE, LENGTH)
                batch = {"ids": ids, "labels": labels[:needed].reshape(BATCH_SIZE, LENGTH)}
                yield {**batch, **masks_and_segments(ids)}
                inputs, labels = inputs[needed:], labels[needed:]
        epoch += 1


def streamed_text(folder: Path) -> Contest:
    """Text tokenised and packed as it comes, through a shuffle buffer."""
    files = write_json_lines(folder, num_files=4)
    config = HuggingFaceStream.HParams.config(
        path="json",
        data_files=files,
        seq_length=LENGTH,
        shuffle_window=SHUFFLED,
        batch_size=BATCH_SIZE,
    )
    return Contest(
        config.set(is_training=True).Instantiate, lambda: _streamed(files), least_batches=256
    )


def _shuffled_columns(saved: str) -> Iterator[Batch]:
    data = datasets.load_from_disk(saved).with_format("numpy")
    epoch = 0
    while True:
        yield from data.shuffle(seed=epoch).iter(BATCH_SIZE, drop_last_batch=True)
        epoch += 1


def columns(folder: Path) -> Contest:
    """Columns of numbers as arrays."""
    saved, rows = str(folder / "saved"), token_rows()
    table = {"ids": rows[:, :-1].tolist(), "labels": rows[:, 1:].tolist()}
    ids = datasets.List(datasets.Value("int32"), length=LENGTH)
    features = datasets.Features({"ids": ids, "labels": ids})
    datasets.Dataset.from_dict(table, features=features).save_to_disk(saved)
    config = HuggingFaceColumns.HParams.config(
        path=saved, columns=["ids", "labels"], batch_size=BATCH_SIZE, is_training=True
    )
    return Contest(config.Instantiate, lambda: _shuffled_columns(saved))
