"""Published text, such as C4 and The Pile, and synthetic tokens.

The library that reads text is imported, and files are opened, when the first batch is read.
docs/data_sets.md describes how to prepare the data.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from layerkit.config import Config
from layerkit.config.checks import require
from layerkit.errors import ConfigError
from layerkit_experiments.recipes.published_data import seqio_tasks
from layerkit_inputs import LocalText, SeqIOInput, SyntheticInput, TokenRecords, tokenizer_config

Reader = Callable[..., Config]
"""A function from an `LmExperiment` and arguments of an input, such as `is_training`, to the config
of the input."""


def text_task(fields: Any, make: Callable[..., Any]) -> Config:
    """Return the config of a SeqIO task of the data set and the vocabulary of an experiment."""
    return Config(
        make,
        tfds_name=fields.tfds_name,
        vocab_path=vocab_path_of(fields),
        vocab_size=fields.VOCAB_SIZE,
    )


def answer_lengths(fields: Any) -> dict[str, int]:
    """Return the lengths of a text and of its answer in a row of MAX_SEQ_LEN positions.

    Raises:
      ConfigError: TARGET_LENGTH leaves no position for the text, or is below 1.
    """
    length, expected = fields.TARGET_LENGTH, f"above 0, below MAX_SEQ_LEN={fields.MAX_SEQ_LEN}"
    require(0 < length < fields.MAX_SEQ_LEN, None, "TARGET_LENGTH", length, expected)
    return {"inputs": fields.MAX_SEQ_LEN - length, "targets": length}


def grain_folder(fields: Any) -> str:
    """Return GRAIN_DATA_DIR."""
    if fields.GRAIN_DATA_DIR is None:
        raise ConfigError(
            field="GRAIN_DATA_DIR",
            value=None,
            expected="a folder of token records or of JSON lines, since DATA_FORMAT='grain'",
            hint="`python -m layerkit_inputs.tools.build_token_records` writes token records.",
        )
    folder: str = fields.GRAIN_DATA_DIR
    return folder


def vocab_path_of(fields: Any) -> str | None:
    """Return VOCAB_PATH, or else the environment variable; None if neither is set."""
    return fields.VOCAB_PATH or os.environ.get("VOCAB_PATH")


def _seqio_text(fields: Any, *, is_training: bool, **options: Any) -> Config:
    return SeqIOInput.HParams.config(
        mixture_or_task=text_task(fields, seqio_tasks.language_model_task),
        split_name="train" if is_training else fields.eval_split,
        task_feature_lengths={"targets": fields.MAX_SEQ_LEN},
        use_packing=is_training and fields.PACKED_INPUT,
        tfds_data_dir=fields.TFDS_DATA_DIR,
        is_training=is_training,
        **options,
    )


def _token_records(fields: Any, *, is_training: bool, **options: Any) -> Config:
    expected = "True, since token records are packed"
    require(fields.PACKED_INPUT, None, "PACKED_INPUT", fields.PACKED_INPUT, expected)
    vocab_path = vocab_path_of(fields)
    return TokenRecords.HParams.config(
        path=grain_folder(fields),
        split="train" if is_training else "heldout",
        seq_length=fields.MAX_SEQ_LEN,
        tokenizer=None if vocab_path is None else tokenizer_config(vocab_path),
        vocab_size=fields.VOCAB_SIZE,
        is_training=is_training,
        **options,
    )


def _local_text(fields: Any, *, is_training: bool, **options: Any) -> Config:
    return LocalText.HParams.config(
        split="train" if is_training else "heldout",
        seq_length=fields.MAX_SEQ_LEN,
        is_training=is_training,
        **options,
    )


def _synthetic_rows(fields: Any, *, is_training: bool, **options: Any) -> Config:
    return SyntheticInput.HParams.config(
        vocab_size=fields.VOCAB_SIZE,
        seq_length=fields.MAX_SEQ_LEN,
        num_examples=None if is_training or fields.EVAL_NUM_BATCHES else 1024,
        is_training=is_training,
        **options,
    )


TEXT_READERS: Mapping[str, Reader] = {
    "seqio": _seqio_text,
    "grain": _token_records,
    "local_text": _local_text,
    "synthetic": _synthetic_rows,
}
"""Readers of text that is predicted from its first to its last token."""
