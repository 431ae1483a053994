"""LAMBADA, the prediction of the last words of passages (Paperno et al., 2016)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from layerkit.config import Config, Partial
from layerkit_experiments.recipes.published_data import seqio_tasks
from layerkit_experiments.recipes.published_data.corpora import (
    Reader,
    answer_lengths,
    grain_folder,
    text_task,
    vocab_path_of,
)
from layerkit_experiments.recipes.published_data.last_words import last_word_rows
from layerkit_inputs import GrainMapInput, SeqIOInput


def lambada(fields: Any) -> list[Config]:
    """Return the config of an input of LAMBADA by `lambada_readers`.

    It has no training data: evaluate a model with `--mode=eval_once` or `--mode=eval`.
    """
    num_batches = fields.EVAL_NUM_BATCHES
    return [fields.read(name="lambada", is_training=False, eval_loop_num_batches=num_batches)]


def _last_words(fields: Any, **options: Any) -> Config:
    return SeqIOInput.HParams.config(
        mixture_or_task=text_task(fields, seqio_tasks.last_word_task),
        split_name="test",
        task_feature_lengths=answer_lengths(fields),
        weights_on_targets_only=True,
        tfds_data_dir=fields.TFDS_DATA_DIR,
        **options,
    )


def _last_words_of_json(fields: Any, **options: Any) -> Config:
    rows = Partial(
        last_word_rows,
        path=grain_folder(fields),
        vocab_path=vocab_path_of(fields),
        seq_length=fields.MAX_SEQ_LEN,
        target_length=answer_lengths(fields)["targets"],
        vocab_size=fields.VOCAB_SIZE,
    )
    return GrainMapInput.HParams.config(dataset=rows, **options)


def lambada_readers(_: Any) -> Mapping[str, Reader]:
    """Return the readers of LAMBADA, for an experiment with TARGET_LENGTH."""
    return {"seqio": _last_words, "grain": _last_words_of_json}
