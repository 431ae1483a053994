"""Text files of this machine as training data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from layerkit.config import Config, build
from layerkit.config.checks import require
from layerkit.errors import ConfigError
from layerkit_experiments.recipes.language_model import TEXT_FIELDS
from layerkit_inputs import LocalText, LocalTextPrompts, Tokenizer, tokenizer_config
from layerkit_runner.config.experiment import BaseExperiment


class LocalFiles(BaseExperiment, abstract=True):
    """Fields and inputs of text files, by default Python's source code as bytes.

    Put it before `LmExperiment`.
    """

    TOKENIZER: str | None = None
    """`bytes`, a SentencePiece `.model`, or a `tokenizer.json` or its folder. None for that of the
    folder of weights, or for bytes without one."""
    SPECIAL_TOKENS_IN_TEXT: Literal["ids", "text"] = "ids"
    """Encoding of special tokens of a `tokenizer.json` that the text spells out: `ids`, as in
    transformers, or `text` for ids of their characters, which suits text by others."""
    VOCAB_SIZE: int = 259
    """Size of the embedding, at least the tokenizer's size including special tokens."""
    EOS_ID: int | None = None
    """Id of the tokenizer's end token, which ends decoding; None for MAX_DECODE_STEPS tokens."""
    PERCORE_BATCH_SIZE: float = 8.0
    """Rows per device."""
    MAX_SEQ_LEN: int = 256
    TEXT_FILES: list[str] | None = None
    """Files or patterns; None for the running Python's standard library. Files that are named as
    held out, such as val.jsonl, are evaluated and not trained on."""
    CORPORA: dict[str, list[str]] | None = None
    """Files or patterns of the components of a mixture by name, in place of TEXT_FILES. Their
    weights are equal, or those of STAGES. Without HELDOUT_FILES, each is evaluated by itself."""
    HELDOUT_FILES: list[str] | None = None
    """Held-out files or patterns. None for files of TEXT_FILES that are named as held out, or else
    for one document in twenty."""
    TEXT_FIELD: str | None = None
    """Field that holds the text of JSON lines or Parquet files. None reads each file as a document;
    JSON lines are then an error."""
    JSON_AS_TEXT: bool = False
    """Train on raw JSON lines, if TEXT_FIELD is None."""
    NUM_PROMPTS: int = 4
    PROMPT_LENGTH: int = 64

    unused_fields: ClassVar[tuple[str, ...]] = ("PROMPTS_PER_DEVICE", *TEXT_FIELDS)
    reduced_fields: ClassVar[Mapping[str, Any]] = {"MAX_SEQ_LEN": 64, "PROMPT_LENGTH": 16}

    def data_summary(self) -> str:
        """Return a short description of the training data."""
        files = self._documents()["paths"]
        return "Python's source code" if files is None else ", ".join(files)

    def validate(self) -> None:
        """Raise an error if the model lacks ids of the data, whose loss would be NaN."""
        super().validate()
        is_one = self.CORPORA is None or self.TEXT_FILES is None
        require(is_one, None, "TEXT_FILES", self.TEXT_FILES, "None, since CORPORA is set")
        tokenizer: Tokenizer = build(self.tokenizer())
        where, size = f"TOKENIZER={self.TOKENIZER!r}", tokenizer.vocab_size
        expected = f"at least {size}, the size of {where} with special tokens"
        require(size <= self.VOCAB_SIZE, None, "VOCAB_SIZE", self.VOCAB_SIZE, expected)
        expected = f"{tokenizer.eos_id}, the end token of {where}"
        is_same = self.EOS_ID in (None, tokenizer.eos_id)
        require(is_same, None, "EOS_ID", self.EOS_ID, expected)

    def tokenizer(self) -> Config:
        """Return the config of the tokenizer."""
        return folder_tokenizer(self, getattr(self, "HF_FOLDER", "bytes"))

    def datasets(self) -> list[Config]:
        """Return configs of the training and the held-out inputs."""
        train, heldout = split_inputs(self, LocalText, **self._documents())
        if self.CORPORA is None:
            return [train, heldout]
        from layerkit_inputs import Mixture  # late, since few runs mix

        files = self.CORPORA.items()
        mixture = Mixture.HParams.config(
            name="train",
            is_training=True,
            percore_batch_size=self.PERCORE_BATCH_SIZE,
            components={name: train.clone(name=name, paths=paths) for name, paths in files},
        )
        if self.HELDOUT_FILES is not None:
            return [mixture, heldout]
        return [mixture, *(heldout.clone(name=f"heldout_{n}", paths=paths) for n, paths in files)]

    def decode_datasets(self) -> list[Config]:
        """Return the config of prompts from held-out files."""
        return [prompt_input(self, LocalTextPrompts, **self._documents())]

    def _documents(self) -> dict[str, Any]:
        corpora = [path for paths in (self.CORPORA or {}).values() for path in paths]
        return {
            "paths": corpora or self.TEXT_FILES,
            "heldout_paths": self.HELDOUT_FILES,
            "tokenizer": self.tokenizer(),
            "text_field": self.TEXT_FIELD,
            "json_as_text": self.JSON_AS_TEXT,
        }


def split_inputs(fields: Any, kind: Any, **options: Any) -> list[Config]:
    """Return configs of the training and the held-out input of files.

    Args:
      fields: Experiment with MAX_SEQ_LEN and PERCORE_BATCH_SIZE.
      kind: Class of the inputs.
      **options: Other fields of the class.
    """
    options |= {"seq_length": fields.MAX_SEQ_LEN, "percore_batch_size": fields.PERCORE_BATCH_SIZE}
    return [
        kind.HParams.config(name="train", split="train", is_training=True, **options),
        kind.HParams.config(name="heldout", split="heldout", **options),
    ]


def prompt_input(fields: Any, kind: Any, **options: Any) -> Config:
    """Return the config of NUM_PROMPTS held-out prompts of at most PROMPT_LENGTH ids.

    Arguments are those of `split_inputs`.
    """
    config: Config = kind.HParams.config(
        name="prompts",
        prompt_length=fields.PROMPT_LENGTH,
        num_prompts=fields.NUM_PROMPTS,
        percore_batch_size=float(fields.NUM_PROMPTS),
        **options,
    )
    return config


def folder_tokenizer(fields: Any, folder: str | None) -> Config:
    """Return the config of the tokenizer that TOKENIZER names, or else of a folder of weights.

    Args:
      fields: Experiment with the fields of `LocalFiles`.
      folder: Folder of the initial weights; None if there is none.

    Raises:
      ConfigError: Neither a tokenizer nor a folder is set.
    """
    name = folder if fields.TOKENIZER is None else fields.TOKENIZER
    if name is None:
        expected = "a tokenizer, since no folder of initial weights has one"
        raise ConfigError(field="TOKENIZER", value=None, expected=expected)
    return tokenizer_config(name, special_tokens_in_text=fields.SPECIAL_TOKENS_IN_TEXT)
