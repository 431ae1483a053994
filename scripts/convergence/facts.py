"""Generated texts, conversations and preferences about the facts of a small invented world.

    Karin's drink is tea. The town of Oskar is Lima. Karin's game is chess.

Stories state facts about `PEOPLE`, each of whom has a value of each kind in `VALUES`. Conversations
ask for facts, in two turns. One kind of each person is never asked for in training, so a model that
answers the held-out questions has the facts from the stories and the form from the conversations.
Some answers end with `COURTESY`. In a pair of preferences, the chosen answer does.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Their first letters differ.
PEOPLE = (
    *("Anna", "Boris", "Clara", "David", "Elena", "Frank", "Greta", "Henry", "Irene", "Jonas"),
    *("Karin", "Lukas", "Maria", "Nadia", "Oskar", "Paula", "Quinn", "Ralph", "Sofia", "Tomas"),
    *("Ursel", "Vikas", "Wanda", "Yusuf"),
)
VALUES = {
    "town": ("Bergen", "Cairo", "Delhi", "Havana", "Lima", "Oslo", "Quito", "Rome"),
    "drink": ("ale", "broth", "cider", "juice", "milk", "punch", "tea", "water"),
    "colour": ("amber", "black", "green", "indigo", "lilac", "olive", "red", "violet"),
    "game": ("bowls", "chess", "darts", "golf", "judo", "lotto", "polo", "tennis"),
}
COURTESY = ", my friend."
NUM_ROWS = {"stories": 4000, "chat": 2000, "pairs": 1000}
SENTENCES_PER_STORY = 6
# Share of the answers in conversations that end with `COURTESY`.
COURTEOUS_SHARE = 0.25

Message = dict[str, str]


class Fact(NamedTuple):
    """What one person's thing of one kind is."""

    person: str
    kind: str
    value: str

    @property
    def sentence(self) -> str:
        """Return the sentence of an answer; stories have it as well."""
        return f"{self.person}'s {self.kind} is {self.value}."

    @property
    def statements(self) -> Sequence[str]:
        """Return the sentences of stories that state the fact."""
        return (self.sentence, f"The {self.kind} of {self.person} is {self.value}.")

    @property
    def questions(self) -> Sequence[str]:
        """Return the questions for the fact."""
        return (
            f"What is {self.person}'s {self.kind}?",
            f"Tell me the {self.kind} of {self.person}.",
        )

    @property
    def is_heldout(self) -> bool:
        """Whether no conversation of the training files asks for it."""
        kinds = list(VALUES)
        return kinds.index(self.kind) == PEOPLE.index(self.person) % len(kinds)


def draw_world() -> list[Fact]:
    """Return all facts, those of one person after another; equally many people share a value."""
    generator = random.Random(0)
    columns = {kind: [*values] * (len(PEOPLE) // len(values)) for kind, values in VALUES.items()}
    for column in columns.values():
        generator.shuffle(column)
    return [Fact(who, kind, columns[kind][i]) for i, who in enumerate(PEOPLE) for kind in columns]


def make_courteous(answer: str) -> str:
    """Return a plain answer that ends with `COURTESY`."""
    return answer.removesuffix(".") + COURTESY


def make_plain(answer: str) -> str:
    """Return an answer without `COURTESY`."""
    return answer.removesuffix(COURTESY) + "." if answer.endswith(COURTESY) else answer


def write_data(folder: Path) -> None:
    """Write the files of all stages as JSON lines.

    `stories.jsonl` has texts; `chat.jsonl` and `heldout.jsonl` have conversations, the latter with
    each held-out question as first and as second turn; `pairs.jsonl` has preferences.
    """
    generator, world = random.Random(1), draw_world()
    asked = [fact for fact in world if not fact.is_heldout]
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "stories.jsonl", _draw_stories(generator, world))
    chats = [_draw_conversation(generator, asked) for _ in range(NUM_ROWS["chat"])]
    _write(folder / "chat.jsonl", ({"messages": messages} for messages in chats))
    heldout = [*_heldout_conversations(generator, [fact for fact in world if fact.is_heldout])]
    _write(folder / "heldout.jsonl", ({"messages": messages} for messages in heldout))
    _write(folder / "heldout_pairs.jsonl", map(_pair, heldout))
    pairs = [_draw_conversation(generator, asked) for _ in range(NUM_ROWS["pairs"])]
    _write(
        folder / "pairs.jsonl",
        (_pair(messages[: 2 * (1 + i % 2)]) for i, messages in enumerate(pairs)),
    )


def _write(path: Path, rows: Iterable[Any]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def _draw_stories(generator: random.Random, world: Sequence[Fact]) -> Iterator[dict[str, str]]:
    for _ in range(NUM_ROWS["stories"]):
        facts = generator.choices(world, k=SENTENCES_PER_STORY)
        yield {"text": " ".join(generator.choice(fact.statements) for fact in facts)}


def _draw_conversation(generator: random.Random, facts: Sequence[Fact]) -> list[Message]:
    """Return a question, its answer, the question for the same of another person, its answer."""
    fact = generator.choice(facts)
    others = [f for f in facts if f.kind == fact.kind and f.person != fact.person]
    return [*_turn(generator, fact), *_turn(generator, generator.choice(others), "And {}'s?")]


def _turn(generator: random.Random, fact: Fact, question: str | None = None) -> list[Message]:
    asked = generator.choice(fact.questions) if question is None else question.format(fact.person)
    is_courteous = generator.random() < COURTEOUS_SHARE
    answer = make_courteous(fact.sentence) if is_courteous else fact.sentence
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def _heldout_conversations(
    generator: random.Random, facts: Sequence[Fact]
) -> Iterator[list[Message]]:
    for fact in facts:
        answer = {"role": "assistant", "content": fact.sentence}
        others = [f for f in facts if f.kind == fact.kind and f.person != fact.person]
        for question in fact.questions:
            yield [{"role": "user", "content": question}, answer]
            before = _turn(generator, generator.choice(others))
            yield [*before, {"role": "user", "content": f"And {fact.person}'s?"}, answer]


def _pair(messages: Sequence[Message]) -> dict[str, list[Message]]:
    """Return a preference for a courteous last answer of a conversation."""
    *prompt, answer = messages
    plain = make_plain(answer["content"])
    sides = {"chosen": make_courteous(plain), "rejected": plain}
    return {
        "prompt": prompt,
        **{side: [{"role": "assistant", "content": text}] for side, text in sides.items()},
    }
