"""An experiment that can resume under the other partitioner, which one of its fields selects."""

from __future__ import annotations

from layerkit.config import Config
from layerkit_experiments.lm.quickstart import LocalText
from layerkit_runner.partitioning import PmapPartitioner


class TextAnywhere(LocalText):
    """A tiny model on small texts, over a mesh or under pmap."""

    UNDER_PMAP: bool = False
    """Whether the state is replicated on all devices, which ignores ICI_MESH_SHAPE."""

    VOCAB_SIZE = 264
    NUM_LAYERS = 1
    MODEL_DIMS = 16
    HIDDEN_DIMS = 32
    NUM_HEADS = 2
    NUM_KV_HEADS = None
    DIMS_PER_HEAD = 8
    MAX_SEQ_LEN = 16
    PERCORE_BATCH_SIZE = 1.0
    FPROP_DTYPE = "float32"
    WARMUP_STEPS = 2
    SUMMARY_INTERVAL_STEPS = 1

    def decode_datasets(self) -> list[Config]:
        """Return no configs, since the tests compare the weights."""
        return []

    def partitioner(self) -> Config:
        """Return the config of the partitioner."""
        return PmapPartitioner.HParams.config() if self.UNDER_PMAP else super().partitioner()
