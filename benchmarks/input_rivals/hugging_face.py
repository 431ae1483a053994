"""Contests with plain `datasets`: tokenized text, grouped into rows, shuffled and batched."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from input_rivals.contest import (
    BATCH_SIZE,
    EVAL_ROWS,
    LENGTH,
    SHUFFLED,
    Batch,
    Contest,
    evaluations,
    texts,
    write_json_lines,
)
from input_rivals.numpy_loops import BOS, EOS, FIRST_BYTE, masks_and_segments
from layerkit_inputs.hugging_face.pairs import HuggingFacePairs
from layerkit_inputs.hugging_face.stream import HuggingFaceStream
from layerkit_inputs.hugging_face.text_input import HuggingFaceInput

datasets.disable_progress_bars()


def _tokens(text: str) -> np.ndarray:
    tokens = np.frombuffer(text.encode(), np.uint8) + np.int32(FIRST_BYTE)
    return np.concatenate([[BOS], tokens, [EOS]]).astype(np.int32)


def _grouped(examples: dict[str, list[str]]) -> dict[str, Any]:
    """Concatenate examples and return inputs and labels in full rows; drop the remainder."""
    framed = [_tokens(text) for text in examples["text"]]
    inputs = np.concatenate([ids[:-1] for ids in framed])
    labels = np.concatenate([ids[1:] for ids in framed])
    used = len(inputs) // LENGTH * LENGTH
    return {
        "ids": list(inputs[:used].reshape(-1, LENGTH)),
        "labels": list(labels[:used].reshape(-1, LENGTH)),
    }


def _mapped(files: list[str], cache: str, function: Callable[..., Any] = _grouped) -> Any:
    data = datasets.load_dataset("json", data_files=files, split="train", cache_dir=cache)
    data = data.map(function, batched=True, remove_columns=data.column_names)
    return data.with_format("numpy")


def _batch_of_rows(rows: dict[str, np.ndarray]) -> Batch:
    ids, labels = rows["ids"].astype(np.int32), rows["labels"].astype(np.int32)
    return {"ids": ids, "labels": labels, **masks_and_segments(ids)}


def _shuffled_epochs(data: Any) -> Iterator[dict[str, np.ndarray]]:
    epoch = 0
    while True:
        yield from data.shuffle(seed=epoch).iter(BATCH_SIZE, drop_last_batch=True)
        epoch += 1


def _text_config(files: list[str], cache: str) -> Any:
    return HuggingFaceInput.HParams.config(
        path="json", data_files=files, cache_dir=cache, seq_length=LENGTH, batch_size=BATCH_SIZE
    )


def mapped_text(folder: Path) -> Contest:
    """Compare rows of tokenized text in a memory-mapped cache."""
    files, cache = write_json_lines(folder, num_files=4), str(folder / "cache")
    return Contest(
        ours=_text_config(files, cache).set(is_training=True).Instantiate,
        bare=lambda: map(_batch_of_rows, _shuffled_epochs(_mapped(files, cache))),
    )


def mapped_text_evaluated(folder: Path) -> Contest:
    """Compare evaluation epochs; the rival drops the remainder of each thousand texts."""
    files = write_json_lines(folder, num_files=1, most=EVAL_ROWS * LENGTH // 2000)
    cache = str(folder / "cache")

    def bare() -> Iterator[Batch]:
        data = _mapped(files, cache)
        return evaluations(lambda: map(_batch_of_rows, data.iter(BATCH_SIZE)))

    return Contest(_text_config(files, cache).Instantiate, bare, is_evaluation=True)


INPUTS_LENGTH, TARGETS_LENGTH = 256, 64


def _pair_of(text: str) -> dict[str, str]:
    return {"inputs": text[:100], "targets": text[100:120]}


def _packed_pairs(examples: dict[str, list[str]]) -> dict[str, Any]:
    """Pack consecutive pairs into rows; the last row of each thousand pairs may be short."""
    names = ("inputs", "inputs_segments", "inputs_positions")
    names += ("targets", "targets_segments", "targets_positions")
    limits = {"inputs": INPUTS_LENGTH, "targets": TARGETS_LENGTH}
    rows: dict[str, list[np.ndarray]] = {name: [] for name in names}
    used = dict.fromkeys(limits, 0)
    segment = 0
    for pair in zip(examples["inputs"], examples["targets"], strict=True):
        tokens = dict(zip(limits, (_tokens(text)[1:] for text in pair), strict=True))
        fits = all(used[side] + len(tokens[side]) <= limit for side, limit in limits.items())
        if not rows["inputs"] or not fits:
            for name in names:
                rows[name].append(np.zeros(limits[name.split("_")[0]], np.int32))
            used, segment = dict.fromkeys(limits, 0), 0
        segment += 1
        for side, ids in tokens.items():
            here = slice(used[side], used[side] + len(ids))
            rows[side][-1][here] = ids
            rows[f"{side}_segments"][-1][here] = segment
            rows[f"{side}_positions"][-1][here] = np.arange(len(ids))
            used[side] = here.stop
    return rows


def _batch_of_pairs(rows: dict[str, np.ndarray]) -> Batch:
    rows = {name: array.astype(np.int32) for name, array in rows.items()}
    labels, positions = rows["targets"], rows["targets_positions"]
    source_valid, valid = rows["inputs_segments"] > 0, rows["targets_segments"] > 0
    before = np.where(positions > 0, np.roll(labels, 1, axis=1), BOS)
    return {
        "src": {
            "ids": rows["inputs"],
            "paddings": (~source_valid).astype(np.float32),
            "segment_ids": rows["inputs_segments"],
            "segment_pos": rows["inputs_positions"],
        },
        "tgt": {
            "ids": np.where(valid, before, 0).astype(np.int32),
            "labels": labels,
            "weights": valid.astype(np.float32),
            "paddings": (~valid).astype(np.float32),
            "segment_ids": rows["targets_segments"],
            "segment_pos": positions,
        },
    }


def pairs(folder: Path) -> Contest:
    """Compare packed input-target pairs; the rival packs them once, into its cache."""
    path, cache = folder / "pairs.jsonl", str(folder / "cache")
    path.write_text("".join(json.dumps(_pair_of(text)) + "\n" for text in texts()))
    files = [str(path)]
    config = HuggingFacePairs.HParams.config(
        path="json",
        data_files=files,
        cache_dir=cache,
        inputs_field="inputs",
        text_field="targets",
        inputs_length=INPUTS_LENGTH,
        targets_length=TARGETS_LENGTH,
        batch_size=BATCH_SIZE,
        trim=True,
    )

    def bare() -> Iterator[Batch]:
        return map(_batch_of_pairs, _shuffled_epochs(_mapped(files, cache, _packed_pairs)))

    return Contest(config.set(is_training=True).Instantiate, bare)


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
    """Compare streamed text that is tokenized and packed after a shuffle buffer."""
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
