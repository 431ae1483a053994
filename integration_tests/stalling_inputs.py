"""An experiment for subprocesses, with inputs that block at a row."""

from __future__ import annotations

import threading

import numpy as np

from layerkit.config import Config
from layerkit.config.nested_map import NestedMap
from layerkit_experiments.lm.lm_cloud import LmCloudSpmdTest
from layerkit_inputs.synthetic.random_tokens import SyntheticInput


class StallingInput(SyntheticInput):
    """A synthetic input that blocks at a row, like storage that does not respond."""

    stalls_at: int | None = None
    """The first row that blocks; None reads all rows."""

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        if self.stalls_at is not None and rows.max() >= self.stalls_at:
            threading.Event().wait()
        return super()._read_rows(rows)


class Stalling(LmCloudSpmdTest):
    """An experiment with two rows per step, whose inputs may block."""

    NUM_LAYERS = 1
    MODEL_DIMS = 16
    HIDDEN_DIMS = 32
    NUM_HEADS = 2
    DIMS_PER_HEAD = 8
    VOCAB_SIZE = 64
    MAX_SEQ_LEN = 16
    FPROP_DTYPE = "float32"
    MAX_STEPS = 1000
    CHECKPOINT_EVERY_N_STEPS = 500
    TRAIN_STALLS_AT: int | None = None

    def datasets(self) -> list[Config]:
        fields = {
            "vocab_size": self.VOCAB_SIZE,
            "seq_length": self.MAX_SEQ_LEN,
            "batch_size": None,
            "percore_batch_size": self.PERCORE_BATCH_SIZE,
        }
        make = StallingInput.HParams.config
        train = make(name="train", is_training=True, stalls_at=self.TRAIN_STALLS_AT, **fields)
        heldout = make(name="heldout", num_examples=8, stalls_at=None, **fields)
        return [train, heldout]
