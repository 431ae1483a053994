"""An experiment with bad batches, whose process can be killed at the moments of a rollback."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import numpy as np
from gated_experiment import Gated, Points

from layerkit.config import Config
from layerkit.config.nested_map import NestedMap
from layerkit_runner.observers import Observer
from layerkit_runner.partitioning import PmapPartitioner

BAD_STEP, SAVE_EVERY = 14, 8


class Batches(Points):
    """Batches 1, 2, …; those in `bad` have numbers of size `scale`, or NaN, on the last host."""

    bad: Sequence[int] = ()
    scale: float | None = None
    left_out: Sequence[int] = (0, 0)

    def _num_rows(self) -> int:
        return 8000

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        size, (first, count) = self.global_batch_size, self.left_out
        rows = rows + size * np.where(rows >= first * size, count, 0)
        x = np.stack([np.sin(rows), np.ones(len(rows))], axis=1).astype(np.float32)
        if self.infeed_host_index == self.num_infeed_hosts - 1:
            x[np.isin(rows // size + 1, self.bad)] *= np.nan if self.scale is None else self.scale
        return NestedMap(x=x, y=np.cos(3 * rows).astype(np.float32))


class KilledAt(Observer):
    """Sends a signal to this process at a moment."""

    in_background = False

    def __init__(self, moment: str) -> None:
        self._moment = moment
        self._is_back = False

    def _meet(self, moment: str, number: int = signal.SIGKILL) -> None:
        if moment == self._moment:
            os.kill(os.getpid(), number)

    def train_metrics(self, step: int, scalars: Any) -> None:
        if not scalars["learning/is_valid_step"]:
            self._meet("bad step")

    def progress(self, step: int) -> None:
        if step == BAD_STEP - 4:
            self._meet("SIGTERM", signal.SIGTERM)
        if self._is_back and step == BAD_STEP:
            self._meet("later")

    def message(self, text: str) -> None:
        if text.startswith("Moved"):
            self._meet("moved")

    def rollback(self, step: int, facts: Any) -> None:
        self._is_back = True
        self._meet("rollback")


class Bad(Gated):
    """22 steps, a checkpoint at every eighth; see `Batches` for `BAD`, `SCALE` and `LEFT_OUT`."""

    MAX_STEPS = 22
    BAD: Sequence[int] = (BAD_STEP,)
    SCALE: float | None = None
    LEFT_OUT: Sequence[int] = (0, 0)
    ON_NONFINITE: str | None = "skip"
    ON_SPIKE: str | None = None
    MAX_ROLLBACKS: int | None = 2
    UNDER_PMAP: bool = False
    BATCH_SIZE: int = 8
    KILLED_AT: str = ""
    STAGES: list[Any] | None = None
    stage_fields = {"stages": "STAGES", "num_steps": "MAX_STEPS", "row_length": "LENGTH"}

    def task(self) -> Config:
        task = super().task()
        task.train.set(save_interval_steps=SAVE_EVERY, max_rollbacks=self.MAX_ROLLBACKS)
        task.train.learner.set(on_nonfinite=self.ON_NONFINITE, on_spike=self.ON_SPIKE)
        if self.ON_SPIKE is not None:
            task.train.learner.spike_window = 8
        return task

    def datasets(self) -> list[Config]:
        fields = {"bad": self.BAD, "scale": self.SCALE, "left_out": self.LEFT_OUT}
        fields |= {"batch_size": self.BATCH_SIZE, "shuffle": False}
        return [Batches.HParams.config(name="train", is_training=True, **fields)]

    def decode_datasets(self) -> list[Config]:
        return []

    def observers(self) -> list[Config]:
        return [Config(KilledAt, self.KILLED_AT)]

    def partitioner(self) -> Config:
        return PmapPartitioner.HParams.config() if self.UNDER_PMAP else super().partitioner()
