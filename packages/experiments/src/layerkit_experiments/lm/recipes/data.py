"""Where the text comes from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from layerkit.config import Config, build
from layerkit_inputs import (
    LocalText,
    LocalTextPrompts,
    Tokenizer,
    tokenizer_config,
)
from layerkit_runner.config.experiment import BaseExperiment


class SyntheticTokens:
    """Made-up tokens, most of which follow one another in a fixed order: for speed and memory."""

    PERCORE_BATCH_SIZE: float = 8.0
    """Rows per device; a fraction where several devices share a row."""
    MAX_SEQ_LEN: int = 1024
    VOCAB_SIZE: int = 32000

    reduced_fields: ClassVar[Mapping[str, Any]] = {"MAX_SEQ_LEN": 64, "VOCAB_SIZE": 64}

    def data_summary(self) -> str:
        """What is trained on, in a few words."""
        return "made-up tokens"

    def datasets(self) -> list[Config]:
        """The config of the training input."""
        # Recipes on text need not import it.
        from layerkit_inputs import SyntheticInput

        return [
            SyntheticInput.HParams.config(
                name="train",
                is_training=True,
                percore_batch_size=self.PERCORE_BATCH_SIZE,
                seq_length=self.MAX_SEQ_LEN,
                vocab_size=self.VOCAB_SIZE,
            )
        ]


class LocalFiles(BaseExperiment, abstract=True):
    """Text files on this machine, by default Python's own sources as bytes."""

    TOKENIZER: str = "bytes"
    """Or a SentencePiece `.model`, or a `tokenizer.json` or the folder it lies in."""
    SPECIAL_TOKENS_IN_TEXT: Literal["ids", "text"] = "ids"
    """What special tokens of a `tokenizer.json` become where a text spells them out: their ids, as
    in transformers, or ids of their characters (`text`), which is for text that others may
    write."""
    VOCAB_SIZE: int = 259
    """At least as many as the tokenizer has ids, special ones included."""
    EOS_ID: int | None = None
    """The tokenizer's id of an end, at which decoding stops; None: only after MAX_DECODE_STEPS."""
    PERCORE_BATCH_SIZE: float = 8.0
    """Rows per device."""
    MAX_SEQ_LEN: int = 256
    TEXT_FILES: list[str] | None = None
    """Files or patterns; None for the running Python's standard library."""
    TEXT_FIELD: str | None = None
    """The files are JSON lines (or Parquet) with a document's text in this field; None: each file
    is a document, and files of JSON lines raise."""
    JSON_AS_TEXT: bool = False
    """With TEXT_FIELD=None, read JSON lines as they are, braces included."""
    NUM_PROMPTS: int = 4
    PROMPT_LENGTH: int = 64

    reduced_fields: ClassVar[Mapping[str, Any]] = {
        "MAX_SEQ_LEN": 64,
        "PROMPT_LENGTH": 16,
    }

    def data_summary(self) -> str:
        """What is trained on, in a few words."""
        return "Python's own sources" if self.TEXT_FILES is None else "text files"

    def validate(self) -> None:
        """Refuses a model that lacks some of the ids of the data: their loss would be NaN."""
        super().validate()
        tokenizer: Tokenizer = build(self.tokenizer())
        if tokenizer.vocab_size > self.VOCAB_SIZE:
            raise ValueError(
                f"VOCAB_SIZE={self.VOCAB_SIZE} is less than the {tokenizer.vocab_size} ids of"
                f" TOKENIZER={self.TOKENIZER!r}, special ones included"
            )
        if self.EOS_ID not in (None, tokenizer.eos_id):
            raise ValueError(
                f"EOS_ID={self.EOS_ID}, but TOKENIZER={self.TOKENIZER!r} ends a document with"
                f" {tokenizer.eos_id}"
            )

    def tokenizer(self) -> Config:
        """The config of the tokenizer."""
        return tokenizer_config(self.TOKENIZER, special_tokens_in_text=self.SPECIAL_TOKENS_IN_TEXT)

    def datasets(self) -> list[Config]:
        """Configs of the training and the held-out input."""
        common = {
            **self._documents(),
            "seq_length": self.MAX_SEQ_LEN,
            "percore_batch_size": self.PERCORE_BATCH_SIZE,
        }
        return [
            LocalText.HParams.config(name="train", split="train", is_training=True, **common),
            LocalText.HParams.config(name="heldout", split="heldout", **common),
        ]

    def decode_datasets(self) -> list[Config]:
        """The config of prompts from held-out files."""
        return [
            LocalTextPrompts.HParams.config(
                name="prompts",
                **self._documents(),
                prompt_length=self.PROMPT_LENGTH,
                num_prompts=self.NUM_PROMPTS,
                percore_batch_size=float(self.NUM_PROMPTS),
            )
        ]

    def _documents(self) -> dict[str, Any]:
        return {
            "paths": self.TEXT_FILES,
            "tokenizer": self.tokenizer(),
            "text_field": self.TEXT_FIELD,
            "json_as_text": self.JSON_AS_TEXT,
        }
