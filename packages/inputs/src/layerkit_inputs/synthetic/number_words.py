"""NumberWords, an input of numbers in English words and in German words or digits.

It is a translation task without a corpus, in which each source has exactly one correct target. The
German word order differs from the English one, since units are said before tens:

>>> english_words(4321), german_words(4321)
('four thousand three hundred and twenty-one', 'viertausenddreihunderteinundzwanzig')
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np

from layerkit.config.checks import require
from layerkit_inputs.text.text_pairs import TextPairs

_MAX_END = 1_000_000
_words = str.split
_ENGLISH_UNITS = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
    " sixteen seventeen eighteen nineteen"
)
_ENGLISH_TENS = _words("twenty thirty forty fifty sixty seventy eighty ninety")
_GERMAN_UNITS = _words(
    "null ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn"
    " sechzehn siebzehn achtzehn neunzehn"
)
_GERMAN_TENS = _words("zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig")


def english_words(number: int) -> str:
    """Return a number from 0 to 999,999 in (British) English words."""
    if number >= 1000:
        thousands, rest = divmod(number, 1000)
        words = f"{english_words(thousands)} thousand"
        if not rest:
            return words
        return f"{words} {'and ' if rest < 100 else ''}{english_words(rest)}"
    if number >= 100:
        hundreds, rest = divmod(number, 100)
        words = f"{_ENGLISH_UNITS[hundreds]} hundred"
        return f"{words} and {english_words(rest)}" if rest else words
    if number < 20:
        return _ENGLISH_UNITS[number]
    tens, units = divmod(number, 10)
    words = _ENGLISH_TENS[tens - 2]
    return f"{words}-{_ENGLISH_UNITS[units]}" if units else words


def german_words(number: int) -> str:
    """Return a number from 0 to 999,999 in German words."""
    # One is `eins` at the end, and `ein` elsewhere.
    return f"{_german(number)}s" if number % 100 == 1 else _german(number)


def _german(number: int) -> str:
    for size, word in ((1000, "tausend"), (100, "hundert")):
        if number >= size:
            count, rest = divmod(number, size)
            return f"{_german(count)}{word}{_german(rest) if rest else ''}"
    if number < 20:
        return _GERMAN_UNITS[number]
    tens, units = divmod(number, 10)
    words = _GERMAN_TENS[tens - 2]
    return f"{_GERMAN_UNITS[units]}und{words}" if units else words


_TARGETS: dict[str, Callable[[int], str]] = {"german": german_words, "digits": str}


class NumberWords(TextPairs):
    """An input of numbers in English words and the same numbers in German words or digits.

    The numbers are in a fixed random order. The first ones are held out, and the others are the
    training split. So held-out numbers are new, but all of their parts occur in training.
    """

    target: Literal["german", "digits"] = "german"
    """`german` or `digits`."""
    end: int = 10_000
    """Exclusive upper bound of the numbers, at most 1,000,000."""
    split: Literal["train", "heldout"] = "train"
    """`train` or `heldout`."""
    num_heldout: int = 500
    """Number of numbers that are held out."""

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        require(2 <= self.end <= _MAX_END, self._label, "end", self.end, "2 to 1,000,000")
        expected = f"a positive integer below end={self.end}"
        has_both = 1 <= self.num_heldout < self.end
        require(has_both, self._label, "num_heldout", self.num_heldout, expected)

    def _texts(self) -> Iterator[tuple[str, str]]:
        order = np.random.Generator(np.random.Philox(key=self.end)).permutation(self.end)
        is_training = self.split == "train"
        numbers = order[self.num_heldout :] if is_training else order[: self.num_heldout]
        for number in numbers.tolist():
            yield english_words(number), _TARGETS[self.target](number)

    def _fingerprint(self) -> dict[str, Any]:
        return {**super()._fingerprint(), "split": self.split}
