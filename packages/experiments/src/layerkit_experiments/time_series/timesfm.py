"""TimesFM, a decoder of time series, at the size of its released Pax checkpoint.

`runner --exp=time_series.timesfm.TimesFM200M --init_from=CHECKPOINTS --fdl.CSV_FILE=ETTh1.csv`
fine-tunes the weights of google/timesfm-1.0-200m.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from layerkit.config import Config
from layerkit.layers import LayerNorm, RmsNorm
from layerkit_experiments.recipes.training import TrainedExperiment, train_config
from layerkit_experiments.time_series.patched_decoder import PatchedDecoder
from layerkit_inputs import CsvSeries, GeneratedSeries
from layerkit_runner.step.task import SingleTask


class TimesFM200M(TrainedExperiment):
    """TimesFM 1.0 with 203 million weights, pretrained on series of its own or a CSV file's."""

    tags: ClassVar[tuple[str, ...]] = ("time_series",)

    CSV_FILE: str | None = None
    """A CSV file with a header, each of whose columns but the first is a series; None for generated
    series."""
    CSV_COLUMNS: list[str] | None = None
    """Columns of the file; None for all with a name but the first."""
    HELDOUT_VALUES: int = 2000
    """Values at the end of each column that training does not read. An evaluation predicts the last
    ones, in as many whole horizons as they hold."""
    FREQUENCY: int = 0
    """0 for daily or finer, 1 for weekly and monthly, 2 for quarterly and yearly."""
    CONTEXT_LENGTH: int = 512
    HORIZON_LENGTH: int = 128
    PATCH_LENGTH: int = 32
    NUM_LAYERS: int = 20
    MODEL_DIMS: int = 1280
    NUM_HEADS: int = 16
    LOSS_PATCHES: Literal["all", "last"] = "all"
    """`all` as in pretraining, or `last` as in Pax's fine-tuning."""
    PERCORE_BATCH_SIZE: float = 32.0

    LEARNING_RATE = 1e-3
    WARMUP_STEPS = 100
    MAX_STEPS = 10_000
    CHECKPOINT_EVERY_N_STEPS = 1000

    reduced_fields: ClassVar[Mapping[str, Any]] = {
        "CSV_FILE": None,
        "CONTEXT_LENGTH": 128,
        "HORIZON_LENGTH": 32,
        "PATCH_LENGTH": 16,
        "NUM_LAYERS": 2,
        "MODEL_DIMS": 64,
        "NUM_HEADS": 4,
    }

    def data_summary(self) -> str:
        """Return a short description of the training data."""
        return "generated series" if self.CSV_FILE is None else self.CSV_FILE

    def datasets(self) -> list[Config]:
        """Return configs of the training and the held-out input."""
        rows: dict[str, Any] = {
            "percore_batch_size": self.PERCORE_BATCH_SIZE,
            "window_length": self.CONTEXT_LENGTH + self.HORIZON_LENGTH,
            "frequency": self.FREQUENCY,
        }
        if self.CSV_FILE is None:
            return [
                GeneratedSeries.HParams.config(name="train", is_training=True, **rows),
                GeneratedSeries.HParams.config(name="heldout", num_examples=1024, **rows),
            ]
        rows |= {
            "path": self.CSV_FILE,
            "columns": self.CSV_COLUMNS,
            "heldout_values": self.HELDOUT_VALUES,
        }
        return [
            CsvSeries.HParams.config(name="train", is_training=True, **rows),
            CsvSeries.HParams.config(name="heldout", stride=self.HORIZON_LENGTH, **rows),
        ]

    def model(self) -> Config:
        """Return the config of the model."""
        model = PatchedDecoder.HParams.config(
            patch_length=self.PATCH_LENGTH,
            horizon_length=self.HORIZON_LENGTH,
            model_dims=self.MODEL_DIMS,
            num_layers=self.NUM_LAYERS,
            num_heads=self.NUM_HEADS,
            loss_patches=self.LOSS_PATCHES,
        )
        layer = model.stack_tpl.layer_tpl
        layer.norm_tpl = RmsNorm.HParams.config()
        layer.feed_forward_norm_tpl = LayerNorm.HParams.config(scale_offset=1.0)
        layer.attention_tpl.set(use_bias=True, per_dim_scale=True)
        layer.feed_forward_tpl.has_bias = True
        return model

    def task(self) -> Config:
        """Return the config of the task."""
        return SingleTask.HParams.config(
            name="time_series", model=self.model(), train=train_config(self, self.learner())
        )
