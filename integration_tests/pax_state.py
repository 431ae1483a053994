"""An experiment that continues a recorded run of Paxml."""

from __future__ import annotations

from layerkit.config import Config
from layerkit_experiments.lm.lm_cloud import LmCloudSpmd
from layerkit_runner.init_from import InitFrom, Source


class Continued(LmCloudSpmd):
    """The model of the recorded checkpoints, with the state of its optimizer."""

    NUM_LAYERS = 2
    MODEL_DIMS = 8
    HIDDEN_DIMS = 16
    NUM_HEADS = 2
    DIMS_PER_HEAD = 4
    VOCAB_SIZE = 32
    MAX_SEQ_LEN = 8
    PERCORE_BATCH_SIZE = 1.0
    FPROP_DTYPE = "float32"
    MAX_STEPS = 9
    WARMUP_STEPS = 8
    DECAY_START = 12
    DECAY_END = 40
    SUMMARY_INTERVAL_STEPS = 1
    PAX_FOLDER: str = ""
    """Folder of the checkpoint, whose state of Adam and step are read."""

    def task(self) -> Config:
        task = super().task()
        task.initial_weights = InitFrom.HParams.config(
            sources=[
                Source.HParams.config(
                    folder=self.PAX_FOLDER, opt_state_rules=[(r".*", r"\g<0>")], load_step=True
                )
            ]
        )
        return task
