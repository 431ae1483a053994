"""Text of continuations: what follows the text of the prompt if all tokens are decoded together.

Decoding the new tokens alone loses text. SentencePiece omits the space before the first word, and
the bytes of a character may be spread over several tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from layerkit_inputs.base.tokenizer_interface import Tokenizer

# Text of bytes that are not yet a whole character.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def continuation_text(prompt: str, whole: str, alone: str) -> str:
    """Return the text that follows a prompt.

    Args:
      prompt: Text of the prompt's ids.
      whole: Text of the ids of prompt and continuation.
      alone: Text of the continuation's ids. It is returned if `whole` has another beginning than
        `prompt`, or ends with it, as SeqIO's vocabularies stop at an end token in the prompt.
    """
    return (whole[len(prompt) :] if whole.startswith(prompt) else "") or alone


def shared_beginning(first: str, second: str) -> str:
    """Return the longest text with which two texts begin."""
    pairs = enumerate(zip(first, second, strict=False))
    return first[: next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))]


class TextStream:
    """The text of a continuation, in pieces that later tokens do not change.

    Attributes:
      ids: New token ids so far.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        """Start after the prompt's ids."""
        self.ids: list[int] = []
        self._tokenizer = tokenizer
        self._prompt_ids = list(prompt_ids)
        self._prompt = tokenizer.decode(self._prompt_ids) if self._prompt_ids else ""
        # The next byte may make all bytes before it invalid, also after a special token.
        names = ("byte_ids", "special_tokens")
        self._open_ids = {i for name in names for i in getattr(tokenizer, name, ())}
        self._num_returned = 0

    def add(self, token_id: int) -> str:
        """Add a token and return the text that it completes; empty if it completes none."""
        self.ids.append(int(token_id))
        if token_id in self._open_ids:
            return ""
        text = self.text()
        return "" if text.endswith(_INCOMPLETE) else self._take(text)

    def rest(self) -> str:
        """Return the text of the last tokens, whose last character may be incomplete."""
        return self._take(self.text())

    def text(self) -> str:
        """Return the whole text so far."""
        whole = self._tokenizer.decode([*self._prompt_ids, *self.ids])
        return continuation_text(self._prompt, whole, self._tokenizer.decode(self.ids))

    def _take(self, text: str) -> str:
        piece = text[self._num_returned :]
        self._num_returned = len(text)
        return piece
