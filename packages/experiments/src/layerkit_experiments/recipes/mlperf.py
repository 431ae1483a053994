"""GPT-3 175B as MLPerf trains it: schedule and data.

The default schedule depends on the number of rows of a batch. Data are the last quarter of C4 and
5662 rows of its held-out text; docs/data_sets.md describes how to get them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from layerkit.config import Config
from layerkit.config.checks import require
from layerkit_experiments.recipes.published_data import seqio_tasks
from layerkit_experiments.recipes.published_data.corpora import TEXT_READERS, Reader, text_task
from layerkit_experiments.recipes.schedule_choices import number_of_steps
from layerkit_experiments.recipes.training import adamw
from layerkit_inputs import SeqIOInput
from layerkit_runner.optim.schedules import linear_warmup_cosine_decay


def mlperf_adamw(fields: Any) -> Config:
    """Return AdamW with a linear warmup, then a cosine, over fixed numbers of rows.

    Larger batches take fewer steps. LEARNING_RATE, WARMUP_STEPS and DECAY_END replace the defaults.
    """
    peak, warmup, end = fields.LEARNING_RATE, fields.WARMUP_STEPS, fields.DECAY_END
    if peak is None:
        peak = 2e-5 if _rows(fields) <= 3584 else 3e-5
    warmup = _steps(fields, 265) if warmup is None else number_of_steps(fields, "WARMUP_STEPS")
    end = _steps(fields, 108_600) if end is None else number_of_steps(fields, "DECAY_END")
    rate: Config = Config(
        linear_warmup_cosine_decay,
        peak,
        warmup_steps=warmup,
        decay_start=warmup + 1,
        decay_end=end,
        min_ratio=fields.MIN_LEARNING_RATE_RATIO,
    )
    return adamw(fields, rate, decays_all=True)


def _joined_documents(fields: Any, *, is_training: bool, **options: Any) -> Config:
    if is_training:
        task = text_task(fields, seqio_tasks.joined_documents_task)
    else:
        task = Config(
            seqio_tasks.token_ids_task,
            tfds_name=fields.eval_tfds_name,
            vocab_size=fields.VOCAB_SIZE,
        )
    return SeqIOInput.HParams.config(
        mixture_or_task=task,
        split_name="train2" if is_training else fields.eval_split,
        task_feature_lengths={"targets": fields.MAX_SEQ_LEN},
        first_token="given",
        use_packing=is_training and fields.PACKED_INPUT,
        input_random_seed=9876 if is_training else None,
        tfds_data_dir=fields.TFDS_DATA_DIR,
        is_training=is_training,
        **options,
    )


def mlperf_readers(_: Any) -> Mapping[str, Reader]:
    """Return the readers of MLPerf's text.

    Documents are joined without separators and cut into rows. The first token of a row is only an
    input; the model predicts the others.
    """
    return {**TEXT_READERS, "seqio": _joined_documents}


def _steps(fields: Any, batches: int) -> int:
    """Return the number of steps that read as many rows as `batches` batches of 1536 rows."""
    return math.ceil(batches * 1536 / _rows(fields) - 1e-6)


def _rows(fields: Any) -> float:
    """Return the number of rows of a batch."""
    shape = fields.ICI_MESH_SHAPE
    expected = "a mesh, unless LEARNING_RATE, WARMUP_STEPS and DECAY_END are set"
    require(shape is not None, None, "ICI_MESH_SHAPE", None, expected)
    devices = math.prod(shape) * math.prod(fields.DCN_MESH_SHAPE or ())
    return float(fields.PERCORE_BATCH_SIZE) * devices
