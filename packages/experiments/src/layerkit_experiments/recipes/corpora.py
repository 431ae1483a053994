"""Published text, C4, The Pile and LAMBADA, read through SeqIO and TFDS or through Grain.

`DATA_FORMAT` selects the library. It is imported, and files are opened, when the first batch is
read. docs/data_sets.md describes how to prepare the data.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

from layerkit.config import Config, Partial
from layerkit.errors import ConfigError
from layerkit_experiments.recipes import last_words, seqio_tasks
from layerkit_experiments.recipes.local_files import RowSamples
from layerkit_inputs import (
    GrainMapInput,
    LocalText,
    SeqIOInput,
    SyntheticInput,
    TokenRecords,
    tokenizer_config,
)
from layerkit_runner.config.experiment import BaseExperiment

TFDS_DATA_DIR_UNSET = "data are read from ~/tensorflow_datasets; set --tfds_data_dir=…"
"""Note of `runner launch` if neither the field TFDS_DATA_DIR nor the variable is set."""


class Corpus(BaseExperiment, abstract=True):
    """Fields of all corpora: format, folders, vocabulary and batch sizes."""

    DATA_FORMAT: Literal["seqio", "grain", "local_text", "synthetic"] = "seqio"
    """`seqio`: TFDS folders; `grain`: token records, without TensorFlow; `local_text`: Python's
    source code as bytes; `synthetic`: synthetic tokens."""
    TFDS_DATA_DIR: str | None = None
    """Folder of TFDS data for `seqio`; None for the default of TensorFlow Datasets."""
    GRAIN_DATA_DIR: str | None = None
    """Folder of token records, or of LAMBADA's JSON lines, for `grain`."""
    VOCAB_PATH: str | None = None
    """A SentencePiece `.model`, or `bytes`; None for the environment variable VOCAB_PATH."""
    VOCAB_SIZE: int = 32000
    """Size of the embedding, at least the size of the vocabulary."""
    EOS_ID: int | None = 1
    PERCORE_BATCH_SIZE: float = 8.0
    """Rows per device; a fraction if several devices share a row."""
    MAX_SEQ_LEN: int = 1024
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

    tfds_name: ClassVar[str]
    """Name, configuration and version of the TFDS data set."""
    eval_split: ClassVar[str] = "validation"
    """TFDS name of the held-out split."""

    def validate(self) -> None:
        """Raise an error if fields contradict each other; opens no file."""
        super().validate()
        self._check_data()

    def _check_data(self) -> None:
        if self.DATA_FORMAT == "grain" and self.GRAIN_DATA_DIR is None:
            raise ConfigError(
                field="GRAIN_DATA_DIR",
                value=None,
                expected="a folder of token records, since DATA_FORMAT='grain'",
                hint="`python -m layerkit_inputs.tools.build_token_records` writes it.",
            )
        if self.DATA_FORMAT == "grain" and not self.PACKED_INPUT:
            raise ConfigError(
                field="PACKED_INPUT",
                value=False,
                expected="True, since DATA_FORMAT='grain' reads packed rows",
            )

    @property
    def vocab_path(self) -> str | None:
        """The field VOCAB_PATH, or else the environment variable; None if neither is set."""
        return self.VOCAB_PATH or os.environ.get("VOCAB_PATH")

    def unset_variables(self) -> dict[str, str]:
        """Return the unset variables that name the vocabulary and the data of SeqIO."""
        if self.DATA_FORMAT != "seqio":
            return {}
        found = {}
        if self.VOCAB_PATH is None:
            found["VOCAB_PATH"] = (
                "without a vocabulary the first batch fails; set --fdl.VOCAB_PATH=…"
            )
        if self.TFDS_DATA_DIR is None:
            found["TFDS_DATA_DIR"] = TFDS_DATA_DIR_UNSET
        return found

    def data_summary(self) -> str:
        """Return a short description of the training data."""
        return f"{self.tfds_name} ({self.DATA_FORMAT})"

    def datasets(self) -> list[Config]:
        """Return configs of the training and the held-out input."""
        return [
            self._input(name="train", is_training=True),
            self._input(name="heldout", eval_loop_num_batches=self.EVAL_NUM_BATCHES),
        ]

    def _input(self, *, is_training: bool = False, **fields: Any) -> Config:
        make = {
            "seqio": self._seqio_input,
            "grain": self._grain_input,
            "local_text": self._local_text,
            "synthetic": self._synthetic_tokens,
        }[self.DATA_FORMAT]
        fields["percore_batch_size"] = self.PERCORE_BATCH_SIZE
        return make(is_training=is_training, **fields)

    def _text_task(self, make: Callable[..., Any]) -> Config:
        """Return the config of a SeqIO task of the data set and the vocabulary."""
        return Config(
            make,
            tfds_name=self.tfds_name,
            vocab_path=self.vocab_path,
            vocab_size=self.VOCAB_SIZE,
        )

    def _seqio_input(self, *, is_training: bool, **fields: Any) -> Config:
        return SeqIOInput.HParams.config(
            mixture_or_task=self._text_task(seqio_tasks.language_model_task),
            split_name="train" if is_training else self.eval_split,
            task_feature_lengths={"targets": self.MAX_SEQ_LEN},
            use_packing=is_training and self.PACKED_INPUT,
            tfds_data_dir=self.TFDS_DATA_DIR,
            is_training=is_training,
            **fields,
        )

    def _grain_input(self, *, is_training: bool, **fields: Any) -> Config:
        return TokenRecords.HParams.config(
            path=self.GRAIN_DATA_DIR,
            split="train" if is_training else "heldout",
            seq_length=self.MAX_SEQ_LEN,
            tokenizer=None if self.vocab_path is None else tokenizer_config(self.vocab_path),
            vocab_size=self.VOCAB_SIZE,
            is_training=is_training,
            **fields,
        )

    def _local_text(self, *, is_training: bool, **fields: Any) -> Config:
        return LocalText.HParams.config(
            split="train" if is_training else "heldout",
            seq_length=self.MAX_SEQ_LEN,
            is_training=is_training,
            **fields,
        )

    def _synthetic_tokens(self, *, is_training: bool, **fields: Any) -> Config:
        return SyntheticInput.HParams.config(
            vocab_size=self.VOCAB_SIZE,
            seq_length=self.MAX_SEQ_LEN,
            num_examples=None if is_training or self.EVAL_NUM_BATCHES else 1024,
            is_training=is_training,
            **fields,
        )


class C4(RowSamples, Corpus, abstract=True):
    """The Colossal Clean Crawled Corpus, English (Raffel et al., 2020, arXiv:1910.10683)."""

    tfds_name = "c4/en:3.0.1"


class ThePile(RowSamples, Corpus, abstract=True):
    """The Pile (Gao et al., 2020, arXiv:2101.00027)."""

    tfds_name = "the_pile:1.0.0"


class Lambada(Corpus, abstract=True):
    """LAMBADA (Paperno et al., 2016): prediction of the last word of a passage.

    It has no training data: evaluate a model with `--mode=eval_once` or `--mode=eval`.
    """

    tags: ClassVar[tuple[str, ...]] = ("eval_only",)

    TARGET_LENGTH: int = 64
    """Positions for the last word; the other positions hold the passage before it."""
    EVAL_NUM_BATCHES = None
    PACKED_INPUT = False

    reduced_fields: ClassVar[Mapping[str, Any]] = {"DATA_FORMAT": "seqio", "TARGET_LENGTH": 16}

    tfds_name = "lambada:1.0.0"
    eval_split = "test"

    def _check_data(self) -> None:
        if not 0 < self.TARGET_LENGTH < self.MAX_SEQ_LEN:
            raise ConfigError(
                field="TARGET_LENGTH",
                value=self.TARGET_LENGTH,
                expected=f"a positive integer below MAX_SEQ_LEN={self.MAX_SEQ_LEN}",
            )
        if self.DATA_FORMAT not in ("seqio", "grain"):
            raise ConfigError(
                field="DATA_FORMAT", value=self.DATA_FORMAT, choices=("seqio", "grain")
            )
        if self.DATA_FORMAT == "grain" and self.GRAIN_DATA_DIR is None:
            raise ConfigError(
                field="GRAIN_DATA_DIR",
                value=None,
                expected="JSON lines of passages, or their folder, since DATA_FORMAT='grain'",
            )

    def datasets(self) -> list[Config]:
        """Return the config of the test split."""
        return [self._input(name="lambada", eval_loop_num_batches=self.EVAL_NUM_BATCHES)]

    def _seqio_input(self, *, is_training: bool, **fields: Any) -> Config:
        return SeqIOInput.HParams.config(
            mixture_or_task=self._text_task(seqio_tasks.last_word_task),
            split_name=self.eval_split,
            task_feature_lengths={
                "inputs": self.MAX_SEQ_LEN - self.TARGET_LENGTH,
                "targets": self.TARGET_LENGTH,
            },
            weights_on_targets_only=True,
            tfds_data_dir=self.TFDS_DATA_DIR,
            is_training=is_training,
            **fields,
        )

    def _grain_input(self, *, is_training: bool, **fields: Any) -> Config:
        rows = Partial(
            last_words.last_word_rows,
            path=self.GRAIN_DATA_DIR,
            vocab_path=self.vocab_path,
            seq_length=self.MAX_SEQ_LEN,
            target_length=self.TARGET_LENGTH,
            vocab_size=self.VOCAB_SIZE,
        )
        return GrainMapInput.HParams.config(dataset=rows, is_training=is_training, **fields)
