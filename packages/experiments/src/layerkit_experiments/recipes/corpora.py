"""Published text, such as C4 and The Pile, and synthetic tokens.

The library that reads text is imported, and files are opened, when the first batch is read.
docs/data_sets.md describes how to prepare the data.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

from layerkit.config import Config
from layerkit.errors import ConfigError
from layerkit_experiments.recipes import seqio_tasks
from layerkit_inputs import (
    LocalText,
    SeqIOInput,
    SyntheticInput,
    TokenRecords,
    tokenizer_config,
)

TFDS_DATA_DIR_UNSET = "data are read from ~/tensorflow_datasets; set --tfds_data_dir=…"
"""Note of `runner launch` if neither the field TFDS_DATA_DIR nor the variable is set."""


class Corpus:
    """Fields of published text: format, folders and vocabulary. Put it before `LmExperiment`."""

    DATA_FORMAT: Literal["seqio", "grain", "local_text", "synthetic"] = "seqio"
    """`seqio`: TFDS folders; `grain`: token records, without TensorFlow; `local_text`: Python's
    source code as bytes; `synthetic`: synthetic tokens."""
    TFDS_DATA_DIR: str | None = None
    """Folder of TFDS data for `seqio`; None for the default of TensorFlow Datasets."""
    GRAIN_DATA_DIR: str | None = None
    """Folder of token records, or of LAMBADA's JSON lines, for `grain`."""
    VOCAB_PATH: str | None = None
    """A SentencePiece `.model`, or `bytes`; None for the environment variable VOCAB_PATH."""
    EOS_ID: int | None = 1
    PACKED_INPUT: bool = True
    """Pack several documents into a training row; attention does not cross documents."""
    EVAL_NUM_BATCHES: int | None = 8
    """Number of batches of an evaluation, which continues where the last one ended; None reads the
    whole held-out split."""

    reduced_fields: ClassVar[Mapping[str, Any]] = {
        "DATA_FORMAT": "local_text",
        "VOCAB_SIZE": 259,
        "PERCORE_BATCH_SIZE": 8.0,
        "MAX_SEQ_LEN": 64,
    }

    tfds_name: ClassVar[str] = "c4/en:3.0.1"
    """Name, configuration and version of the TFDS data set; by default the English C4 (Raffel et
    al., 2020, arXiv:1910.10683)."""
    eval_split: ClassVar[str] = "validation"
    """TFDS name of the held-out split."""

    def unset_variables(self) -> dict[str, str]:
        """Return the unset variables that name the vocabulary and the data of SeqIO."""
        if self.DATA_FORMAT != "seqio":
            return {}
        unset = {}
        if self.VOCAB_PATH is None:
            unset["VOCAB_PATH"] = (
                "without a vocabulary the first batch fails; set --fdl.VOCAB_PATH=…"
            )
        if self.TFDS_DATA_DIR is None:
            unset["TFDS_DATA_DIR"] = TFDS_DATA_DIR_UNSET
        return unset

    def data_summary(self) -> str:
        """Return a short description of the training data."""
        return f"{self.tfds_name} ({self.DATA_FORMAT})"

    def datasets(self) -> list[Config]:
        """Return configs of the training and the held-out input."""
        return published_text(self)


Readers = Mapping[str, Callable[..., Config]]
"""Functions by the values of DATA_FORMAT. Each takes an experiment and arguments of an input, such
as `is_training`, and returns the config of the input."""


def published_text(fields: Any, readers: Readers | None = None) -> list[Config]:
    """Return configs of the training and the held-out input of a `Corpus`.

    Args:
      fields: Experiment with the fields of `Corpus`.
      readers: Readers of the formats; None for `TEXT_READERS`.
    """
    readers = TEXT_READERS if readers is None else readers
    return [
        read(fields, readers, name="train", is_training=True),
        read(
            fields,
            readers,
            name="heldout",
            is_training=False,
            eval_loop_num_batches=fields.EVAL_NUM_BATCHES,
        ),
    ]


def read(fields: Any, readers: Readers, **options: Any) -> Config:
    """Return the config of an input by the reader of DATA_FORMAT.

    Raises:
      ConfigError: The data set cannot be read in this format.
    """
    name = fields.DATA_FORMAT
    if name not in readers:
        raise ConfigError(field="DATA_FORMAT", value=name, choices=tuple(readers))
    return readers[name](fields, percore_batch_size=fields.PERCORE_BATCH_SIZE, **options)


def synthetic_tokens(fields: Any) -> list[Config]:
    """Return configs of synthetic tokens, most of which follow each other in a fixed order.

    They are for speed tests; an evaluation reads one batch.
    """
    common: dict[str, Any] = {
        "percore_batch_size": fields.PERCORE_BATCH_SIZE,
        "seq_length": fields.MAX_SEQ_LEN,
        "vocab_size": fields.VOCAB_SIZE,
    }
    return [
        SyntheticInput.HParams.config(name="train", is_training=True, **common),
        SyntheticInput.HParams.config(name="heldout", eval_loop_num_batches=1, **common),
    ]


def text_task(fields: Any, make: Callable[..., Any]) -> Config:
    """Return the config of a SeqIO task of the data set and the vocabulary of a `Corpus`."""
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
    if not 0 < fields.TARGET_LENGTH < fields.MAX_SEQ_LEN:
        raise ConfigError(
            field="TARGET_LENGTH",
            value=fields.TARGET_LENGTH,
            expected=f"a positive integer below MAX_SEQ_LEN={fields.MAX_SEQ_LEN}",
        )
    return {
        "inputs": fields.MAX_SEQ_LEN - fields.TARGET_LENGTH,
        "targets": fields.TARGET_LENGTH,
    }


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
    if not fields.PACKED_INPUT:
        raise ConfigError(
            field="PACKED_INPUT", value=False, expected="True, since token records are packed"
        )
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


TEXT_READERS: Readers = {
    "seqio": _seqio_text,
    "grain": _token_records,
    "local_text": _local_text,
    "synthetic": _synthetic_rows,
}
"""Readers of text that is predicted from its first to its last token."""
