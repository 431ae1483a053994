"""The trigram table against counting with dictionaries."""

from __future__ import annotations

import collections
import math

import numpy as np
import pytest

from layerkit_inputs.text.trigram_baseline import trigram_loss


class TableByHand:
    """Witten-Bell by its recursive definition, one symbol at a time."""

    def __init__(self, documents: list[bytes]):
        self.followers: dict[tuple, collections.Counter] = collections.defaultdict(
            collections.Counter
        )
        for document in documents:
            for context, symbol in self.events(document):
                for size in range(3):
                    self.followers[context[2 - size :]][symbol] += 1

    @staticmethod
    def events(document: bytes):
        symbols = ["begin", "begin", *document, "end"]
        return [(tuple(symbols[i - 2 : i]), symbols[i]) for i in range(2, len(symbols))]

    def probability(self, context: tuple, symbol) -> float:
        lower = self.probability(context[1:], symbol) if context else 1 / 257
        counts = self.followers.get(context)
        if not counts:
            return lower
        total, kinds = sum(counts.values()), len(counts)
        return (counts[symbol] + kinds * lower) / (total + kinds)

    def loss(self, documents: list[bytes]) -> float:
        events = [event for document in documents for event in self.events(document)]
        return -sum(math.log(self.probability(*event)) for event in events) / len(events)


TRAIN = [b"the cat sat on the mat", b"", b"a cat, a hat, a bat\n\x00\xff"]


@pytest.mark.parametrize(
    "heldout", [[b"the hat sat"], TRAIN, [b""], [b"\x80\x81zzz", b"cat"]], ids=range(4)
)
def test_the_loss_is_that_of_the_definition(heldout):
    assert trigram_loss(TRAIN, heldout) == pytest.approx(
        TableByHand(TRAIN).loss(heldout), rel=1e-12
    )


def test_noise_costs_about_a_uniform_symbol_and_a_habit_costs_little():
    random = np.random.default_rng(0)
    noise = random.integers(4, size=50_000, dtype=np.uint8).tobytes()
    assert trigram_loss([noise[:-5000]], [noise[-5000:]]) == pytest.approx(math.log(4), abs=0.01)
    assert trigram_loss([b"ab" * 500], [b"ab" * 500]) < 0.02


def test_a_document_in_pieces_is_the_same_document(monkeypatch):
    expected = trigram_loss(TRAIN, TRAIN)
    for size in (1, 3, len(TRAIN[0]), len(TRAIN[0]) + 1):
        monkeypatch.setattr("layerkit_inputs.text.trigram_baseline._PIECE", size)
        assert trigram_loss(iter(TRAIN), iter(TRAIN)) == pytest.approx(expected, rel=1e-12)
