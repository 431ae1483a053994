"""Made-up passages whose every probability is known, and whose last word only the passage tells.

    Greta hides the red violin. Frank paints the old anchor. At noon Anna asks about the old anchor.

Two or three things are introduced, each with a word of its own before it; then something happens to
some of them again. Which thing it is that is old follows from nothing but the beginning of the
passage, so a model that knows only which words follow one another guesses one of the sixteen. That
is what LAMBADA asks of a language model (Paperno et al., 2016). Since the generator is known, so is
the least loss that any model can reach: its entropy.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple


class Grammar(NamedTuple):
    """What passages are drawn from; each choice is uniform.

    A passage introduces `introduced` things, all different and with different words before them,
    and then returns `returned` times to one of them. Who does it is anyone, each time.
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
    """A text and what is known of it.

    Attributes:
      text: Sentences.
      nats: -ln of the probability with which the grammar draws it.
      forgetful_nats: The same by who knows the grammar, but has forgotten what the passage said
        before: each thing, and the word before it, is one of all.
      unsorted_nats: The same by who remembers which things were introduced and which words, but not
        what belongs together: each thing that is returned to is one of the things introduced.
      candidates: How many things the passage names.
    """

    text: str
    nats: float
    forgetful_nats: float
    unsorted_nats: float
    candidates: int

    @property
    def last_word(self) -> str:
        """The thing that the passage ends with."""
        return self.text.split()[-1].rstrip(".")

    @property
    def question(self) -> str:
        """The text as LAMBADA has it: up to its last word, without the full stop."""
        return self.text.rstrip(".")


def draw_passages(count: int, *, seed: int, grammar: Grammar | None = None) -> list[Passage]:
    """Passages, the same ones for the same seed."""
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
