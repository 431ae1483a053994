"""Where the text comes from."""

from __future__ import annotations

from layerkit.config import Config
from layerkit_inputs import LocalText, LocalTextPrompts, SyntheticInput
from layerkit_inputs.byte_vocabulary import VOCAB_SIZE as NUM_BYTE_IDS
from layerkit_runner.experiment import BaseExperiment


class SyntheticTokens:
    """Random tokens: for speed and memory, not for learning."""

    PERCORE_BATCH_SIZE: float = 8.0
    """Rows per device; a fraction where several devices share a row."""
    MAX_SEQ_LEN: int = 1024
    VOCAB_SIZE: int = 32000

    def datasets(self) -> list[Config]:
        """The config of the training input."""
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
    """Bytes of text files on this machine; by default Python's own sources."""

    VOCAB_SIZE: int = 259
    """At least as many as there are bytes and special ids."""
    PERCORE_BATCH_SIZE: float = 8.0
    """Rows per device."""
    MAX_SEQ_LEN: int = 256
    TEXT_FILES: list[str] | None = None
    """Files or patterns; None for the running Python's standard library."""
    NUM_PROMPTS: int = 4
    PROMPT_LENGTH: int = 64

    def validate(self) -> None:
        """Refuses a model that lacks some of the ids of the data: their loss would be NaN."""
        super().validate()
        if self.VOCAB_SIZE < NUM_BYTE_IDS:
            raise ValueError(
                f"VOCAB_SIZE={self.VOCAB_SIZE} is less than the {NUM_BYTE_IDS} ids of bytes and"
                " their special ids"
            )

    def datasets(self) -> list[Config]:
        """Configs of the training and the held-out input."""
        common = {
            "paths": self.TEXT_FILES,
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
                paths=self.TEXT_FILES,
                prompt_length=self.PROMPT_LENGTH,
                num_prompts=self.NUM_PROMPTS,
                percore_batch_size=float(self.NUM_PROMPTS),
            )
        ]
