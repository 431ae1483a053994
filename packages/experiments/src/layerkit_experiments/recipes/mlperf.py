"""GPT-3 175B as MLPerf trains it: model, target, schedules and data.

The target is a loss of 2.69 nats per token of the held-out text. docs/data_sets.md describes how to
get the data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from layerkit.config import Config
from layerkit.errors import ConfigError
from layerkit_experiments.lm.pax import Gpt3Decoder, Gpt3Schedule
from layerkit_experiments.recipes import seqio_tasks
from layerkit_experiments.recipes.corpora import Corpus
from layerkit_experiments.recipes.local_files import RowSamples
from layerkit_experiments.recipes.optimizers import (
    ScheduleOverRun,
    ScheduleSteps,
    adamw_learner,
)
from layerkit_inputs import SeqIOInput
from layerkit_runner.optim.early_stopping import StopAtTarget
from layerkit_runner.optim.schedules import linear_warmup_cosine_decay


class Gpt3175B(Gpt3Decoder, abstract=True):
    """GPT-3 175B, whose training ends when the held-out loss reaches a target."""

    NUM_LAYERS = 96
    MODEL_DIMS = 12288
    HIDDEN_DIMS = 49152
    NUM_HEADS = 96
    DIMS_PER_HEAD = 128
    MAX_POSITIONS = 16_384
    SOFTMAX_CHUNK_SIZE = 512
    INIT_STD = 0.006
    CHECKPOINT_POLICY = "full"
    TARGET_LOSS: float | None = 2.69
    """Loss of the held-out text, in nats per token, at which training ends; None for no target."""

    # Reduced runs train on bytes. Their loss falls below a target for tokens within a few steps.
    reduced_fields: ClassVar[Mapping[str, Any]] = {"TARGET_LOSS": None}

    def task(self) -> Config:
        """Return the task with the rule that ends training."""
        task = super().task()
        if self.TARGET_LOSS is not None:
            task.early_stopping = Config(
                StopAtTarget, metric="heldout/xent", target=self.TARGET_LOSS
            )
        return task


class Gpt3PaperSchedule(Gpt3Schedule):
    """Schedule of GPT-3 175B in the paper, for 1536 rows of 2048 tokens."""

    LEARNING_RATE = 6e-5
    WARMUP_STEPS = 265
    DECAY_START = 266
    DECAY_END = 108_600
    MAX_STEPS = 108_600


class MlperfSchedule(ScheduleOverRun):
    """MLPerf's schedule of GPT-3 175B, which depends on the number of rows of a batch.

    The default warmup and decay cover fixed numbers of rows, so larger batches take fewer steps.
    """

    LEARNING_RATE: float | None = None
    """Peak learning rate. None: 2e-5 for batches of at most 3584 rows, 3e-5 for larger ones."""
    ADAM_BETA1: float = 0.9
    ADAM_BETA2: float = 0.95
    ADAM_EPSILON: float = 1e-8
    WEIGHT_DECAY: float = 0.1
    CLIP_GRADIENT_NORM: float | None = 1.0
    WARMUP_STEPS: int | None = None
    """Number of warmup steps. None: as many as read 265 * 1536 rows."""
    DECAY_END: int | None = None
    """Step at which the decay ends. None: the step that completes 108,600 * 1536 rows."""
    MIN_LEARNING_RATE_RATIO: float = 0.1
    MAX_STEPS = 108_600

    reduced_fields: ClassVar[Mapping[str, Any]] = {
        "LEARNING_RATE": 3e-3,
        "WARMUP_STEPS": 5,
        "DECAY_END": 200,
    }

    def schedule_steps(self) -> ScheduleSteps:
        """Return the steps of the schedule."""
        warmup = self._steps(265) if self.WARMUP_STEPS is None else self.WARMUP_STEPS
        end = self._steps(108_600) if self.DECAY_END is None else self.DECAY_END
        return ScheduleSteps(warmup, warmup + 1, end)

    def learner(self) -> Config:
        """Return the config of the learner."""
        peak = self.LEARNING_RATE
        if peak is None:
            peak = 2e-5 if self._rows() <= 3584 else 3e-5
        return adamw_learner(
            self,
            decayed=None,
            learning_rate=self.schedule_steps().config(
                linear_warmup_cosine_decay, peak, min_ratio=self.MIN_LEARNING_RATE_RATIO
            ),
        )

    def _steps(self, batches: int) -> int:
        """Return the number of steps that read as many rows as `batches` batches of 1536 rows."""
        return math.ceil(batches * 1536 / self._rows() - 1e-6)

    def _rows(self) -> float:
        """Return the number of rows of a batch."""
        fields: Any = self
        if fields.ICI_MESH_SHAPE is None:
            raise ConfigError(
                field="ICI_MESH_SHAPE",
                value=None,
                expected="a mesh, unless LEARNING_RATE, WARMUP_STEPS and DECAY_END are set",
            )
        devices = math.prod(fields.ICI_MESH_SHAPE) * math.prod(fields.DCN_MESH_SHAPE or ())
        return float(fields.PERCORE_BATCH_SIZE) * devices


class MlperfC4(RowSamples, Corpus, abstract=True):
    """The last quarter of C4 and 5662 rows of its held-out text, as MLPerf's GPT-3 reads them.

    Documents are joined without separators and cut into rows. The first token of a row is only an
    input; the model predicts the others. An evaluation reads all rows.
    """

    VOCAB_SIZE = 50257
    MAX_SEQ_LEN = 2048
    EVAL_NUM_BATCHES = None

    tfds_name = "c4/en:3.0.4"
    eval_tfds_name: ClassVar[str] = "c4/en:3.0.5"
    """TFDS name of the held-out tokens."""
    eval_split = "validation_tokenized_5662seqs"

    def _seqio_input(self, *, is_training: bool, **fields: Any) -> Config:
        if is_training:
            task = self._text_task(seqio_tasks.joined_documents_task)
        else:
            task = Config(
                seqio_tasks.token_ids_task,
                tfds_name=self.eval_tfds_name,
                vocab_size=self.VOCAB_SIZE,
            )
        return SeqIOInput.HParams.config(
            mixture_or_task=task,
            split_name="train2" if is_training else self.eval_split,
            task_feature_lengths={"targets": self.MAX_SEQ_LEN},
            first_token="given",
            use_packing=is_training and self.PACKED_INPUT,
            input_random_seed=9876 if is_training else None,
            tfds_data_dir=self.TFDS_DATA_DIR,
            is_training=is_training,
            **fields,
        )
