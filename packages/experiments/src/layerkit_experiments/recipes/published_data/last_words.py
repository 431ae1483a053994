"""Rows for the last-word prediction of LAMBADA, without TensorFlow.

`last_word_rows` reads JSON lines (`{"text": …}`, the format of the published test set of 5153
passages) and returns the rows of `seqio_tasks.last_word_task` with the same vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from layerkit.config import build
from layerkit.errors import ConfigError
from layerkit_inputs import Tokenizer, tokenizer_config
from layerkit_inputs.base.errors import require_extra
from layerkit_inputs.base.find_files import find_text_files
from layerkit_inputs.base.tokenizer_interface import first_ids
from layerkit_inputs.packing.model_features import lm_features
from layerkit_inputs.text.text_files import read_raw_documents, text_of

LAST_WORD = r"(?s)^(.*\S)\s+(\S+)$"
"""Regular expression that splits a passage from its last word, valid in Python and RE2."""
QUOTES = {"“": '"', "”": '"', "‘": "'", "’": "'"}
"""Straight quotes by the curly quotes that they replace."""


def split_last_word(passage: str) -> tuple[str, str]:
    """Return a passage without its last word, and that word with a leading space.

    >>> split_last_word("He said: “Follow me”")
    ('He said: "Follow', ' me"')

    Raises:
      ConfigError: The passage has fewer than two words.
    """
    text = passage.strip()
    for curly, straight in QUOTES.items():
        text = text.replace(curly, straight)
    match = re.match(LAST_WORD, text)
    if match is None:
        raise ConfigError(field="passage", value=passage, expected="at least two words")
    return match[1], " " + match[2]


def require_vocab_path(vocab_path: str | None) -> str:
    """Return the path, or raise `ConfigError` if no vocabulary is set."""
    if vocab_path is None:
        raise ConfigError(
            field="VOCAB_PATH",
            value=None,
            expected="a SentencePiece .model, or bytes",
            hint="Set the environment variable VOCAB_PATH, or --fdl.VOCAB_PATH=….",
        )
    return vocab_path


def check_vocab_size(vocab_size: int | None, needed: int, vocab_path: str | None) -> None:
    """Raise `ConfigError` if the vocabulary is larger than the model's.

    Token ids outside of the model's vocabulary would make the loss NaN.
    """
    if vocab_size is not None and needed > vocab_size:
        expected = f"at least {needed}, the size of VOCAB_PATH={vocab_path}"
        raise ConfigError(field="VOCAB_SIZE", value=vocab_size, expected=expected)


def last_word_rows(
    *,
    path: str,
    vocab_path: str | None,
    seq_length: int,
    target_length: int,
    vocab_size: int | None = None,
) -> Any:
    """Return rows of passages, with loss weights on the last word only.

    Args:
      path: JSON lines file with the passage in the field `text`, or a folder of such files.
      vocab_path: See `layerkit_inputs.tokenizer_config`.
      seq_length: Number of positions of a row.
      target_length: Maximum number of tokens of the last word. The rest of the passage is truncated
        to `seq_length - target_length` tokens.
      vocab_size: Vocabulary size of the model; None for no check.

    Returns:
      A `grain.MapDataset` of the arrays of `layerkit_inputs.lm_features`, each
      `[seq_length]`.

    Raises:
      ConfigError: The vocabulary is not set or too large, or a passage cannot be read.
      OSError: A file or the vocabulary does not exist.
    """
    grain = require_extra("grain", needed_by="last_word_rows")
    tokenizer: Tokenizer = build(tokenizer_config(require_vocab_path(vocab_path)))
    check_vocab_size(vocab_size, tokenizer.vocab_size, vocab_path)

    def row(passage: str) -> dict[str, np.ndarray]:
        before, word = split_last_word(passage)
        inputs = tokenizer.encode(before)[: seq_length - target_length]
        batch = lm_features(
            [[*first_ids(inputs, tokenizer), *inputs]],
            [tokenizer.encode(word)[:target_length]],
            length=seq_length,
            bos_id=None,
            pad_id=tokenizer.pad_id,
            weights_on_targets_only=True,
        )
        return {name: batch[name][0] for name in batch if name != "inputs_indicator"}

    return grain.MapDataset.source(list(_passages(path))).map(row)


def _passages(path: str) -> Iterator[str]:
    for file in find_text_files([path]):
        for document in read_raw_documents(file, field="text"):
            try:
                yield text_of(document, "text").decode("utf-8")
            except ValueError as error:
                raise ConfigError(str(error), owner=str(document.where)) from None
