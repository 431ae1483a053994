"""Synthetic passages with a known probability, whose last word only the passage determines.

    Greta hides the red violin. Frank paints the old anchor. At noon Anna asks about the old anchor.

A passage introduces two or three things, each with its own adjective, and later sentences mention
some of them again. Only the beginning of the passage determines which thing is old, so a model that
knows only word statistics guesses one of sixteen things. LAMBADA tests the same ability of language
models (Paperno et al., 2016). The lowest possible loss is the entropy of the generator.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple


class Grammar(NamedTuple):
    """The words and counts of passages; each choice is uniform.

    A passage introduces `introduced` different things with different adjectives, and mentions one
    of them again in each of `returned` sentences. The person is drawn for each sentence.
    """

    names: Sequence[str] = ("Anna", "Boris", "Clara", "David", "Elena", "Frank", "Greta", "Henry")
    kinds: Sequence[str] = ("red", "green", "blue", "old", "new", "small", "heavy", "broken")
    things: Sequence[str] = (
        *("anchor", "basket", "blanket", "bottle", "candle", "clock", "hammer", "kettle"),
        *("ladder", "lantern", "letter", "mirror", "pencil", "ribbon", "saddle", "violin"),
    )
    beginnings: Sequence[str] = ("finds", "hides", "keeps", "paints")
    times: Sequence[str] = ("At noon", "In winter", "Then", "Later", "One day")
    returns: Sequence[str] = ("asks about", "looks for", "remembers", "repairs")
    introduced: Sequence[int] = (2, 3)
    returned: Sequence[int] = (4, 5, 6, 7)


class Passage(NamedTuple):
    """A text and its probabilities.

    Attributes:
      text: Sentences of the passage.
      nats: Value of -ln of the probability that the grammar draws the text.
      forgetful_nats: Value of -ln of the probability for a reader that knows the grammar but not
        the earlier sentences: each thing and each adjective is one of all.
      unsorted_nats: Value of -ln of the probability for a reader that remembers the introduced
        things and adjectives, but not which belong together.
      candidates: Number of things that the passage names.
    """

    text: str
    nats: float
    forgetful_nats: float
    unsorted_nats: float
    candidates: int

    @property
    def last_word(self) -> str:
        """Return the last word, which is a thing."""
        return self.text.split()[-1].rstrip(".")

    @property
    def question(self) -> str:
        """Return the text without the final full stop, as in LAMBADA."""
        return self.text.rstrip(".")


def draw_passages(count: int, *, seed: int, grammar: Grammar | None = None) -> list[Passage]:
    """Draw passages; the same seed gives the same passages."""
    generator = random.Random(seed)
    return [_draw(generator, grammar or Grammar()) for _ in range(count)]


def _draw(generator: random.Random, grammar: Grammar) -> Passage:
    count, returned = generator.choice(grammar.introduced), generator.choice(grammar.returned)
    kinds, things = (generator.sample(words, count) for words in (grammar.kinds, grammar.things))
    pairs = [f"the {kind} {thing}" for kind, thing in zip(kinds, things, strict=True)]
    sentences = [_sentence(generator, [grammar.names, grammar.beginnings], pair) for pair in pairs]
    again = [grammar.times, grammar.names, grammar.returns]
    sentences += [_sentence(generator, again, generator.choice(pairs)) for _ in range(returned)]
    sizes = [len(grammar.introduced), len(grammar.returned), *[len(grammar.names)] * len(sentences)]
    sizes += [len(grammar.beginnings)] * count
    sizes += [len(grammar.times), len(grammar.returns)] * returned
    free = sum(map(math.log, sizes))
    pool = math.log(len(grammar.kinds)) + math.log(len(grammar.things))
    of_pairs = [math.perm(len(words), count) for words in (grammar.kinds, grammar.things)]
    nats = free + sum(map(math.log, of_pairs)) + returned * math.log(count)
    return Passage(
        text=" ".join(sentences),
        nats=nats,
        forgetful_nats=free + len(sentences) * pool,
        unsorted_nats=nats + returned * math.log(count),
        candidates=count,
    )


def _sentence(generator: random.Random, choices: Sequence[Sequence[str]], pair: str) -> str:
    return f"{' '.join(generator.choice(words) for words in choices)} {pair}."
