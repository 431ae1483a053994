"""Check of a tokenizer: which characters of a text its ids do not give back."""

from __future__ import annotations

import collections
import unicodedata
from collections.abc import Sequence

from layerkit_inputs.base.special_ids import Tokenizer

_MAX_KINDS = 4
_NAMES = {"\n": "line breaks", "\r": "carriage returns", "\t": "tabs", " ": "spaces"}


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
    shown = ", ".join(f"{count:,} {_name(character)}" for character, count in kinds)
    if (rest := lost.total() - sum(count for _, count in kinds)) > 0:
        shown += f" and {rest:,} other characters"
    documents = "document" if len(texts) == 1 else f"{len(texts)} documents"
    return f"{shown or 'the order or number of characters'} of the first {documents}"


def _name(character: str) -> str:
    if character in _NAMES:
        return _NAMES[character]
    if character.isprintable():
        return f"'{character}'"
    return unicodedata.name(character, f"U+{ord(character):04X}")
