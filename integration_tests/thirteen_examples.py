"""An experiment for subprocesses, with thirteen examples in several splits.

Every row has weight 1, so an evaluation that reads each row once has a total weight of 13 for any
number of processes and shards.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from layerkit.config import Config
from layerkit.config.nested_map import NestedMap
from layerkit_experiments.lm.lm_cloud import LmCloudSpmdTest
from layerkit_inputs.base.base_input import BaseInput
from layerkit_inputs.base.errors import BadRecordError
from layerkit_inputs.base.evaluation import pad_rows
from layerkit_inputs.base.indexed_input import IndexedInput

NUM_ROWS = 13
LENGTH = 8


def rows_of(numbers: np.ndarray) -> NestedMap:
    """Return rows with the ids n + 1, n + 2, …; only the last prediction has weight 1."""
    tokens = numbers[:, None] + 1 + np.arange(LENGTH + 1)
    weights = np.zeros((len(numbers), LENGTH), np.float32)
    weights[:, -1] = 1
    return NestedMap(
        ids=tokens[:, :-1].astype(np.int32),
        labels=tokens[:, 1:].astype(np.int32),
        weights=weights,
        prompt_lengths=np.full(len(numbers), LENGTH, np.int32),
    )


class _Metrics(BaseInput):
    """An input whose metrics identify their examples."""

    has_score_metrics = True
    has_prediction_metrics = True

    def score_metrics(self, scores: Any) -> dict[str, float]:
        return {"examples": len(scores), "numbers": sum(scores), "total": sum(scores.values())}

    def prediction_metrics(self, predictions: Any) -> dict[str, float]:
        return {"examples": len(predictions), "numbers": sum(predictions)}

    def ids_to_strings(self, ids: Any, lengths: Any, key: str | None = None) -> list[str]:
        return [" ".join(map(str, row[:n])) for row, n in zip(ids, lengths, strict=True)]


class Indexed(_Metrics, IndexedInput):
    """An input with random access to the rows."""

    def _num_rows(self) -> int:
        return NUM_ROWS

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        return rows_of(rows)


class Shards(_Metrics):
    """An input with a separate shard per host, of different lengths."""

    shard_sizes: Sequence[int] = (NUM_ROWS,)

    def __post_init__(self) -> None:
        super().__post_init__()
        begin = sum(self.shard_sizes[: self.infeed_host_index])
        self._shard = np.arange(begin, begin + self.shard_sizes[self.infeed_host_index])
        self._at = 0

    def _next(self) -> NestedMap:
        assert self.batch_size is not None
        numbers = self._shard[self._at : self._at + self.batch_size]
        if not len(numbers):
            raise StopIteration
        self._at += self.batch_size
        batch = rows_of(numbers)
        batch.provenance = numbers.astype(np.int32)
        batch.eval_sample_weights = np.ones(len(numbers), np.float32)
        return pad_rows(batch, self.batch_size - len(numbers))

    def _reset(self) -> None:
        self._at = 0


class FailsOnOneHost(Indexed):
    """An input that raises BadRecordError on the last host after a few batches."""

    def get_next(self) -> NestedMap:
        batch = super().get_next()
        is_last = self.infeed_host_index == self.num_infeed_hosts - 1
        if is_last and self._rows_done > 6 * self.global_batch_size:
            raise BadRecordError(
                "it ends in the middle of a number", owner="shard-00001.bin, record 17"
            )
        return batch


class HangsOnOneHost(Indexed):
    """An input that blocks on the last host after a few batches."""

    def get_next(self) -> NestedMap:
        is_last = self.infeed_host_index == self.num_infeed_hosts - 1
        if is_last and self._rows_done > 6 * self.global_batch_size:
            threading.Event().wait()
        return super().get_next()


class Thirteen(LmCloudSpmdTest):
    """A tiny model that trains on the rows, evaluates three splits and decodes one of them."""

    SHARDS: list[int] = [NUM_ROWS]
    EMPTY_SHARDS: list[int] = [NUM_ROWS]
    FAILS: bool = False
    HANGS: bool = False

    def datasets(self) -> list[Config]:
        training = FailsOnOneHost if self.FAILS else HangsOnOneHost if self.HANGS else Indexed
        return [
            self._input(training, name="train", is_training=True),
            self._input(Indexed, name="indexed"),
            self._input(Shards, name="uneven", shard_sizes=self.SHARDS),
            self._input(Shards, name="empty", shard_sizes=self.EMPTY_SHARDS),
        ]

    def decode_datasets(self) -> list[Config]:
        return [self._input(Shards, name="uneven", shard_sizes=self.SHARDS)]

    def _input(self, reader: type[BaseInput], **fields: Any) -> Config:
        return reader.HParams.config(percore_batch_size=self.PERCORE_BATCH_SIZE, **fields)
