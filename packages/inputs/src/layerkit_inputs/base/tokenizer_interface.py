"""The interface of tokenizers, the ids that begin, end and pad a text, and the text that ids lose.

`first_ids` and `last_ids` decide the ids before and after the tokens of a text, for readers,
records, prompts and scores. `lost_text` names the characters that a tokenizer does not give back.
"""

from __future__ import annotations

import collections
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

ROLES = ("bos_token", "eos_token", "pad_token")
"""Names of the special tokens in the files of `transformers`."""


@runtime_checkable
class Tokenizer(Protocol):
    """The interface of tokenizers. A custom class needs no base class."""

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary: one more than the largest id."""
        ...

    @property
    def pad_id(self) -> int:
        """Id of padded positions: that of padding, else of the end of a text, else 0."""
        ...

    @property
    def bos_id(self) -> int | None:
        """Id of the beginning of a text, or None."""
        ...

    @property
    def eos_id(self) -> int | None:
        """Id of the end of a text, or None."""
        ...

    @property
    def start_id(self) -> int | None:
        """Id before the tokens of a text, or only of an empty prompt; None if there is none."""
        ...

    def encode(self, text: str | bytes) -> np.ndarray:
        """Return the ids of a text, int32 `[length]`, without special ids.

        Raises:
          UnicodeError: The text is not Unicode. Invalid UTF-8 raises UnicodeDecodeError.
        """
        ...

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """Decode ids `[length]`. Special and unknown ids are dropped."""
        ...

    def fingerprint(self) -> str:
        """Return a short string that differs between tokenizers with different ids for a text."""
        ...


class SpecialIds(NamedTuple):
    """The ids that frame the texts of a data set."""

    start: int | None
    """Id before a text, or None."""
    end: int | None
    """Id after a text, or None."""
    padding: int
    """Id of padded positions."""

    def text(self, names: Mapping[int, str]) -> str:
        """Return a line such as `start <s> (1), end </s> (2), padding <pad> (0)`."""
        ids = zip(self._fields, self, strict=True)
        return ", ".join(f"{role} {id_text(token_id, names)}" for role, token_id in ids)


def id_text(token_id: int | None, names: Mapping[int, str]) -> str:
    """Return an id with its name, such as `<s> (1)`, or "none"."""
    if token_id is None:
        return "none"
    return f"{names[token_id]} ({token_id})" if token_id in names else str(token_id)


def end_disagreement(
    tokenizer: Any, decoder_ids: Sequence[int], *, end_id: int | None = None
) -> str | None:
    """Return a line about end tokens that differ between the tokenizer, files and decoder.

    Args:
      tokenizer: Tokenizer of the data, whose end id training teaches.
      decoder_ids: End tokens of the model's decoder.
      end_id: Id that ends a text in training; None for that of the tokenizer.

    Returns:
      The line, or None if all that define an end token agree.
    """
    known = {**ends_by_file(tokenizer), "decoder": tuple(decoder_ids)}
    known = {name: ids for name, ids in known.items() if ids}
    if len(set(map(frozenset, known.values()))) < 2:
        return None
    stated = "; ".join(f"{name} {', '.join(map(str, ids))}" for name, ids in known.items())
    names = getattr(tokenizer, "special_tokens", {})
    taught = id_text(tokenizer.eos_id if end_id is None else end_id, names)
    return f"training ends a text with {taught}; all of these end decoding: {stated}"


def prefix_id(tokenizer: Tokenizer) -> int | None:
    """Return the id that is put before each text, or None."""
    return tokenizer.start_id if getattr(tokenizer, "adds_start_id", True) else None


def first_ids(ids: Sequence[int] | np.ndarray, tokenizer: Tokenizer) -> list[int]:
    """Return the ids that precede a text: none, or the start id of the tokenizer.

    Nothing precedes a text that begins with the start id already, such as a rendered chat.

    Args:
      ids: Token ids of the text, `[tokens]`.
      tokenizer: Tokenizer of the text.
    """
    start = prefix_id(tokenizer)
    return [] if start is None or (len(ids) and int(ids[0]) == start) else [start]


def last_ids(ids: Sequence[int] | np.ndarray, tokenizer: Tokenizer) -> list[int]:
    """Return the ids that follow a document: none, or the end id, unless it ends with that."""
    if tokenizer.eos_id is None or (len(ids) and int(ids[-1]) == tokenizer.eos_id):
        return []
    return [tokenizer.eos_id]


def end_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids that end a generated text: all that the files of the tokenizer declare."""
    return tuple(dict.fromkeys(i for ids in ends_by_file(tokenizer).values() for i in ids))


def ends_by_file(tokenizer: Tokenizer) -> Mapping[str, tuple[int, ...]]:
    """Return the end tokens of the tokenizer, and those of the model's files beside it."""
    ends = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    return getattr(tokenizer, "declared_ends", {"tokenizer": ends})


def first_difference(one: Tokenizer, other: Tokenizer) -> str | None:
    """Return the first id of a tokenizer that has another text in the other one, or None.

    The text is such as `id 7 of 300 is 'the' and 'of'`. The other tokenizer may have more ids.
    """
    if one.fingerprint() == other.fingerprint():
        return None
    texts = [getattr(tokenizer, "special_tokens", {}) for tokenizer in (one, other)]
    for i in range(one.vocab_size):
        here, there = (
            special.get(i, tokenizer.decode([i]))
            for special, tokenizer in zip(texts, (one, other), strict=True)
        )
        if here != there or i >= other.vocab_size:
            return f"id {i} of {one.vocab_size} is {here!r} and {there!r}"
    return None


def target_start_id(tokenizer: Tokenizer) -> int:
    """Return the id that the first token of an encoder-decoder's target is predicted from."""
    return tokenizer.pad_id if tokenizer.start_id is None else tokenizer.start_id


_MAX_KINDS = 4
_CHARACTER_NAMES = {"\n": "line breaks", "\r": "carriage returns", "\t": "tabs", " ": "spaces"}


def lost_text(tokenizer: Tokenizer, texts: Sequence[bytes]) -> str | None:
    """Return which characters of some texts are lost in their ids, or None if none is.

    Special tokens that a text spells out do not count, since decoding drops them.

    Args:
      tokenizer: Tokenizer to check.
      texts: UTF-8 texts. An incomplete character at the end of one is dropped.

    Returns:
      Text such as `12 line breaks, 340 spaces of the first 2 documents`.
    """
    lost: collections.Counter[str] = collections.Counter()
    differs = False
    special = getattr(tokenizer, "special_tokens", {})
    for data in texts:
        text = data.decode("utf-8", "ignore")
        ids = tokenizer.encode(text)
        decoded = tokenizer.decode(ids)
        for token_id in set(ids.tolist()) & set(special):
            text = text.replace(special[token_id], "")
        lost += collections.Counter(text) - collections.Counter(decoded)
        differs |= decoded not in (text, f" {text}")  # A prefix space is no loss.
    if not differs:
        return None
    kinds = lost.most_common(_MAX_KINDS)
    shown = ", ".join(f"{count:,} {_character_name(character)}" for character, count in kinds)
    if (rest := lost.total() - sum(count for _, count in kinds)) > 0:
        shown += f" and {rest:,} other characters"
    documents = "document" if len(texts) == 1 else f"{len(texts)} documents"
    return f"{shown or 'the order or number of characters'} of the first {documents}"


def _character_name(character: str) -> str:
    if character in _CHARACTER_NAMES:
        return _CHARACTER_NAMES[character]
    if character.isprintable():
        return f"'{character}'"
    return unicodedata.name(character, f"U+{ord(character):04X}")
