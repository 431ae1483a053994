"""Conversations in files of this machine as training data."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from layerkit.config import Config, build, field_names
from layerkit.config.checks import require
from layerkit.errors import UserError
from layerkit_experiments.recipes.local_files import (
    folder_tokenizer,
    prompt_input,
    split_inputs,
)
from layerkit_inputs.chat.chat_input import ChatInput, ChatPrompts
from layerkit_inputs.chat.template import load_chat_template
from layerkit_inputs.chat.token_masks import LossOn, turn_ends
from layerkit_runner.config.experiment import BaseExperiment


class ChatFiles(BaseExperiment, abstract=True):
    """Fields and inputs of conversations, with a loss on what the assistant writes.

    Put it before an experiment with a language model, such as `HuggingFaceLm`, or `LocalText` with
    `TOKENIZER = "bytes"`.
    """

    CHAT_FILES: list[str]
    """Files, folders or patterns of conversations: JSON, Parquet, or data sets saved to disk."""
    HELDOUT_FILES: list[str] | None = None
    """Held-out files or patterns. None for files of CHAT_FILES that are named as held out, or else
    for one conversation in twenty."""
    CHAT_TEMPLATE: str | None = None
    """A name such as `chatml`, a `.jinja` file, or a folder; None for that of the tokenizer's
    folder."""
    TEMPLATE_DATE: str = "2025-01-01"
    """Date that a template writes as that of the day."""
    LOSS_ON: LossOn = "all"
    """Turns of the assistant with a loss: `all`, the `last`, or those whose `train` is true."""
    TOO_LONG: Literal["cut", "drop"] = "cut"
    """Cut conversations that are longer than a row after a turn, or drop them."""
    PACKING: Literal["first_fit", "none"] = "first_fit"
    """Several whole conversations in a row, or one."""
    TOKENIZER: str | None = None
    """Tokenizer as in `LocalFiles`; None for that of the folder of weights."""
    SPECIAL_TOKENS_IN_TEXT: Literal["ids", "text"] = "text"
    """Encoding of special tokens that a message spells out."""
    MAX_IMAGES: int = 0
    """Maximum number of images of a row, in the form of the folder of weights; 0 for text alone."""
    IMAGE_SIZE: tuple[int, int] | None = None
    """(height, width) of all images for Qwen, whose processor states none; None for Gemma 3."""
    MAX_SEQ_LEN: int = 1024
    PERCORE_BATCH_SIZE: float = 8.0
    """Rows per device."""
    NUM_PROMPTS: int = 4
    """Number of held-out conversations whose last answer the model writes in decoding."""
    PROMPT_LENGTH: int = 512
    """Largest number of ids before such an answer; longer conversations are left out."""

    def data_summary(self) -> str:
        """Return a short description of the training data."""
        return ", ".join(getattr(self, "CHAT_FILES", ["conversations"]))

    def tokenizer(self) -> Config:
        """Return the config of the tokenizer, which encodes the special tokens of the template."""
        tokenizer = folder_tokenizer(self, getattr(self, "HF_FOLDER", None))
        if "special_tokens_in_text" in field_names(tokenizer):
            tokenizer.special_tokens_in_text = "ids"
        return tokenizer

    def chat_template(self) -> str:
        """Return the chat template: CHAT_TEMPLATE, or else the folder of the tokenizer."""
        path = Path(str(self.TOKENIZER or getattr(self, "HF_FOLDER", "")))
        return self.CHAT_TEMPLATE or str(path if path.is_dir() else path.parent)

    def task(self) -> Config:
        """Return the config of the task, whose decoder also ends where a turn ends.

        Raises:
          ConfigError: There is no such template, its turns do not end with a special token, or the
            model lacks ids of the tokenizer.
        """
        task, tokenizer = super().task(), build(self.tokenizer())
        model, size = task.model, tokenizer.vocab_size
        expected = f"at least {size}, the size of the tokenizer with special tokens"
        require(
            model.lm_tpl.vocab_size >= size, None, "VOCAB_SIZE", model.lm_tpl.vocab_size, expected
        )
        try:
            ends = turn_ends(load_chat_template(self.CHAT_TEMPLATE, tokenizer), tokenizer)
        except UserError as error:
            error.field, error.value = "CHAT_TEMPLATE", self.chat_template()
            raise
        expected = "a template whose turns end with a special token of the tokenizer"
        require(ends, None, "CHAT_TEMPLATE", self.chat_template(), expected)
        ends = tuple(dict.fromkeys((*build(model.decoder).eos_ids, *ends)))
        model.decoder.eos_id = ends if len(ends) > 1 else ends[0]
        return task

    def datasets(self) -> list[Config]:
        """Return configs of the training and the held-out input."""
        rows = {"packing": self.PACKING, "loss_on": self.LOSS_ON, "too_long": self.TOO_LONG}
        return split_inputs(self, ChatInput, **self._conversations(), **rows)

    def decode_datasets(self) -> list[Config]:
        """Return the config of held-out conversations without their last answer."""
        return [prompt_input(self, ChatPrompts, **self._conversations())]

    def _conversations(self) -> dict[str, Any]:
        return {
            "paths": self.CHAT_FILES,
            "heldout_paths": self.HELDOUT_FILES,
            "tokenizer": self.tokenizer(),
            "chat_template": self.CHAT_TEMPLATE,
            "template_date": self.TEMPLATE_DATE,
            "special_tokens_in_text": self.SPECIAL_TOKENS_IN_TEXT,
            **self._images(),
        }

    def _images(self) -> dict[str, Config]:
        if not self.MAX_IMAGES:
            return {}
        from layerkit_inputs.chat.folder_images import folder_images  # few conversations have them

        folder = getattr(self, "HF_FOLDER", ".")
        most, size = self.MAX_IMAGES, self.IMAGE_SIZE
        return {"images": folder_images(folder, max_images=most, image_size=size)}
