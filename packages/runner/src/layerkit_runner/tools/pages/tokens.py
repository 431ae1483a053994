"""Tokens for people: the text that each token adds to a sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from layerkit_runner.files.text import printable

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_MOST_BYTES = 4  # of a character in UTF-8
_SIGNS = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥"})


class Token(NamedTuple):
    """A token of a sequence.

    Attributes:
      text: Name of a special token, or the text that a token adds to those before it. It is empty
        within a character of several tokens, whose last token has its text.
      id: Token id.
      position: Column in the row.
      is_special: Whether the id is a special one.
      weight: Weight of its loss; None for a token that is only read.
      nats: Its loss under a model; None if there is none.
    """

    text: str
    id: int
    position: int
    is_special: bool
    weight: float | None = None
    nats: float | None = None

    @property
    def shown(self) -> str:
        """Text of visible characters, in which only spaces beside others stay as they are."""
        text = self.text.replace("\n", "⏎") if self.text.strip() else self.text.translate(_SIGNS)
        return printable(text) or "‥"


def read_tokens(
    ids: np.ndarray, decode: Callable[[np.ndarray], str], names: Mapping[int, str]
) -> list[Token]:
    """Return the tokens of a sequence.

    Args:
      ids: Token ids `[tokens]`.
      decode: Function from ids to text, which drops special ids.
      names: Special tokens by id.
    """
    tokens: list[Token] = []
    # The text from `begin` to `first` is complete, and the character from `first` on is not.
    begin = first = 0
    for position, token in enumerate(ids.tolist()):
        end = position + 1
        text = names.get(token) or decode(ids[begin:end])[len(decode(ids[begin:first])) :]
        if token in names:
            begin = first = end
        elif (
            text.endswith(_INCOMPLETE)
            and end - first < _MOST_BYTES
            and set(ids[end : end + 1].tolist()) - set(names)
        ):
            text = ""
        else:
            begin, first = first, end
        tokens.append(Token(text, token, position, token in names))
    return tokens
