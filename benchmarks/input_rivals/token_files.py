"""A contest with plain array_record and NumPy on the files of TokenRecords."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader

from input_rivals.contest import BATCH_SIZE, LENGTH, Batch, Contest, write_json_lines
from input_rivals.numpy_loops import shuffled_epochs
from layerkit_inputs.text.token_records import TokenRecords
from layerkit_inputs.text.token_store import BLOCK_LENGTH, ENDS_FILE
from layerkit_inputs.tools.build_token_records import build_token_records


def _rows(split: Path) -> Iterator[Batch]:
    """Yield batches from the store's only shard without checks."""
    ends = np.memmap(split / ENDS_FILE, "<i8", mode="r")
    begins = np.concatenate([[0], ends[:-1]])
    (shard,) = split.glob("*.array_record")
    options = "readahead_buffer_size:0,max_parallelism:0"
    reader = ArrayRecordReader(str(shard), options=options, file_reader_buffer_size=1 << 15)
    numbers = shuffled_epochs(-(-int(ends[-1]) // LENGTH))
    while True:
        row_starts = np.array([[next(numbers)] for _ in range(BATCH_SIZE)]) * LENGTH
        position = row_starts + np.arange(LENGTH)
        valid = position < ends[-1]
        position = np.minimum(position, ends[-1] - 1)
        document = np.searchsorted(ends, position, side="right")
        at = position + document  # the first id of each document is not a label
        at = np.stack([at, at + 1])
        blocks, place = np.unique(at // BLOCK_LENGTH, return_inverse=True)
        held = np.zeros((len(blocks), BLOCK_LENGTH), np.int32)
        for row, record in zip(held, reader.read(blocks.tolist()), strict=True):
            ids = np.frombuffer(record, "<u2")
            row[: len(ids)] = ids
        tokens = np.where(valid, held[place.reshape(at.shape), at % BLOCK_LENGTH], 0)
        since = np.maximum(begins[document], row_starts)
        yield {
            "ids": tokens[0],
            "labels": tokens[1],
            "weights": valid.astype(np.float32),
            "paddings": (~valid).astype(np.float32),
            "segment_ids": np.where(valid, document - document[:, :1] + 1, 0).astype(np.int32),
            "segment_pos": np.where(valid, position - since, 0).astype(np.int32),
        }


def token_records(folder: Path) -> Contest:
    """Compare packed rows of a token store."""
    store = folder / "tokens"
    build_token_records(write_json_lines(folder, num_files=1), store, tokenizer="bytes")
    config = TokenRecords.HParams.config(path=str(store), seq_length=LENGTH, batch_size=BATCH_SIZE)
    return Contest(
        ours=config.set(is_training=True).Instantiate,
        bare=lambda: _rows(store / "train"),
        is_same_order=True,
    )
