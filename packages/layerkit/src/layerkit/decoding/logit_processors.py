"""What is done to logits before a token is chosen: small steps that run in the order given.

Each is a value with a few fields, called as `processor(logits, rows)`, where `rows` tells what
stands in the rows so far. A token that a processor rules out gets -inf. Two kinds:

* those that look at the row: `RepetitionPenalty`, `CountPenalty`, `NoRepeatNgrams`, `MinSteps`;
* those that look at the logits alone: `LogitBias`, `BannedIds`, `Temperature`, `TopK`, `TopP`,
  `MinP`.

A decoder runs its `processors` first, then what its own fields ask for; see `SampleDecoder`. One of
your own is a subclass of `LogitProcessor` with a `__call__`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from layerkit.decoding.configured_value import ConfiguredValue


class RowsSoFar(NamedTuple):
    """What stands in the rows when the token of `column` is chosen.

    Attributes:
      ids: int32 `[rows, max_length]`; what stands from `column` on is not part of the rows.
      prompt_lengths: int32 `[rows]`.
      column: int32 scalar.
    """

    ids: jax.Array
    prompt_lengths: jax.Array
    column: jax.Array

    @property
    def num_drawn(self) -> jax.Array:
        """How many tokens were drawn, int32 `[rows]`."""
        return self.column - self.prompt_lengths

    def counts(self, vocab_size: int, *, with_prompt: bool) -> jax.Array:
        """How often each token stands in each row so far, int32 `[rows, vocab]`."""
        columns = jnp.arange(self.ids.shape[1])
        counted = jnp.broadcast_to(columns < self.column, self.ids.shape)
        if not with_prompt:
            counted = counted & (columns >= self.prompt_lengths[:, None])

        def count(ids: jax.Array, counted: jax.Array) -> jax.Array:
            return jnp.zeros(vocab_size, jnp.int32).at[ids].add(counted.astype(jnp.int32))

        return jax.vmap(count)(self.ids, counted)


class LogitProcessor(ConfiguredValue):
    """Base of the processors."""

    def __call__(self, logits: jax.Array, rows: RowsSoFar) -> jax.Array:
        """New logits, float32 `[rows, vocab]` like the old ones."""
        raise NotImplementedError(f"{type(self).__qualname__} does not define __call__")


def process_logits(
    processors: tuple[LogitProcessor, ...], logits: jax.Array, rows: RowsSoFar
) -> jax.Array:
    """Runs the processors in order: float32 `[rows, vocab]` → the same."""
    for processor in processors:
        logits = processor(logits, rows)
    return logits


# Those that look at the row.


class RepetitionPenalty(LogitProcessor):
    """Makes tokens that stand in the row, prompt included, less likely (CTRL; Keskar et al., 2019).

    Attributes:
      penalty: Positive logits are divided by it, negative ones multiplied; below 1 it rewards.
    """

    penalty: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.penalty > 0:
            raise ValueError(
                f"RepetitionPenalty: penalty={self.penalty} must be positive (1 changes nothing)"
            )

    def __call__(self, logits: jax.Array, rows: RowsSoFar) -> jax.Array:
        penalized = jnp.where(logits < 0, logits * self.penalty, logits / self.penalty)
        stands = rows.counts(logits.shape[-1], with_prompt=True) > 0
        return jnp.where(stands, penalized, logits)


class CountPenalty(LogitProcessor):
    """Takes something off the logits of tokens that were drawn; the prompt does not count.

    Attributes:
      frequency: Taken off once for each time that the token was drawn.
      presence: Taken off once if it was drawn at all.
    """

    frequency: float = 0.0
    presence: float = 0.0

    def __call__(self, logits: jax.Array, rows: RowsSoFar) -> jax.Array:
        counts = rows.counts(logits.shape[-1], with_prompt=False)
        return logits - self.frequency * counts - self.presence * (counts > 0)


class NoRepeatNgrams(LogitProcessor):
    """Rules out tokens that would repeat a sequence of the row, prompt included.

    Attributes:
      size: Tokens of a sequence that may stand only once.
    """

    size: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size < 1:
            raise ValueError(f"NoRepeatNgrams: size={self.size} must be at least 1")

    def __call__(self, logits: jax.Array, rows: RowsSoFar) -> jax.Array:
        max_length = rows.ids.shape[1]
        num_starts = max_length - self.size + 1
        if num_starts < 1:
            return logits
        tail_start = rows.column - (self.size - 1)
        # Every start whose first size − 1 tokens are the row's last ones rules out what followed. A
        # start counts if its last token stands in the row; before there is a tail, none does.
        starts = jnp.arange(num_starts)
        repeats = jnp.broadcast_to(starts + self.size - 1 < rows.column, (len(logits), num_starts))
        for offset in range(self.size - 1):
            tail = jnp.take(rows.ids, tail_start + offset, axis=1, mode="clip")
            repeats = repeats & (rows.ids[:, offset : offset + num_starts] == tail[:, None])
        followers = rows.ids[:, self.size - 1 :]

        def rule_out(logits: jax.Array, followers: jax.Array, repeats: jax.Array) -> jax.Array:
            return logits.at[followers].min(jnp.where(repeats, -jnp.inf, jnp.inf))

        return jax.vmap(rule_out)(logits, followers, repeats)


class MinSteps(LogitProcessor):
    """Keeps a row from ending too early.

    Attributes:
      num_steps: Tokens that must be drawn before one of `eos_ids` may be.
      eos_ids: What ends a row.
    """

    num_steps: int = 0
    eos_ids: tuple[int, ...] = ()

    def __call__(self, logits: jax.Array, rows: RowsSoFar) -> jax.Array:
        is_early = rows.num_drawn < self.num_steps
        is_end = id_mask(self.eos_ids, logits.shape[-1], owner="MinSteps: eos_ids")
        return jnp.where(is_early[:, None] & is_end, -jnp.inf, logits)


# Those that look at the logits alone.


class LogitBias(LogitProcessor):
    """Adds to the logits of some tokens.

    Attributes:
      biases: Pairs of a token and what is added.
    """

    biases: tuple[tuple[int, float], ...] = ()

    def __call__(self, logits: jax.Array, rows: RowsSoFar) -> jax.Array:
        del rows
        ids = [token for token, _ in self.biases]
        check_ids(ids, logits.shape[-1], owner="LogitBias: biases")
        values = jnp.array([value for _, value in self.biases], jnp.float32)
        return logits + jnp.zeros(logits.shape[-1]).at[jnp.array(ids, jnp.int32)].add(values)


class BannedIds(LogitProcessor):
    """Rules out some tokens.

    Attributes:
      ids: Which.
    """

    ids: tuple[int, ...] = ()

    def __call__(self, logits: jax.Array, rows: RowsSoFar) -> jax.Array:
        del rows
        is_banned = id_mask(self.ids, logits.shape[-1], owner="BannedIds: ids")
        return jnp.where(is_banned, -jnp.inf, logits)


class Temperature(LogitProcessor):
    """Divides the logits: below 1 the likely becomes likelier.

    Attributes:
      temperature: By what; positive. A decoder is greedy by its own temperature of 0.
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.temperature > 0:
            raise ValueError(
                f"Temperature: temperature={self.temperature} must be positive; set the"
                " temperature=0 of the decoder for greedy"
            )

    def __call__(self, logits: jax.Array, rows: RowsSoFar) -> jax.Array:
        del rows
        return logits / self.temperature


class TopK(LogitProcessor):
    """Keeps the most likely tokens (Fan et al., 2018), and all that are as likely as the last.

    Attributes:
      k: How many.
    """

    k: int = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k < 1:
            raise ValueError(f"TopK: k={self.k} must be at least 1")

    def __call__(self, logits: jax.Array, rows: RowsSoFar) -> jax.Array:
        del rows
        largest, _ = jax.lax.top_k(logits, min(self.k, logits.shape[-1]))
        return jnp.where(logits >= largest[:, -1:], logits, -jnp.inf)


class TopP(LogitProcessor):
    """Keeps the fewest most likely tokens that together have a probability (Holtzman et al., 2020).

    Of equally likely ones those with smaller ids come first.

    Attributes:
      p: The probability, above 0; the most likely token always stays.
    """

    p: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.p <= 1:
            raise ValueError(f"TopP: p={self.p} must be above 0 and at most 1")

    def __call__(self, logits: jax.Array, rows: RowsSoFar) -> jax.Array:
        del rows
        if self.p == 1:  # rounding could bring the sum to 1 before the last token
            return logits
        order = jnp.argsort(logits, axis=-1, descending=True, stable=True)
        probs = jnp.take_along_axis(jax.nn.softmax(logits), order, axis=-1)
        # A token stays if those before it do not have the probability yet.
        before = jnp.cumsum(probs, axis=-1) - probs
        stays = (before < self.p).at[:, 0].set(True)
        stays = jax.vmap(lambda order, stays: jnp.zeros_like(stays).at[order].set(stays))(
            order, stays
        )
        return jnp.where(stays, logits, -jnp.inf)


class MinP(LogitProcessor):
    """Keeps tokens that are not much less likely than the most likely one (Nguyen et al., 2024).

    Attributes:
      p: The smallest probability that stays, as a part of the largest.
    """

    p: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.p <= 1:
            raise ValueError(f"MinP: p={self.p} must be between 0 and 1")

    def __call__(self, logits: jax.Array, rows: RowsSoFar) -> jax.Array:
        del rows
        probs = jax.nn.softmax(logits)
        smallest = self.p * jnp.max(probs, axis=-1, keepdims=True)
        return jnp.where(probs >= smallest, logits, -jnp.inf)


def id_mask(ids: tuple[int, ...], vocab_size: int, *, owner: str) -> jax.Array:
    """Which tokens `ids` are, bool `[vocab]`; see `check_ids`."""
    check_ids(ids, vocab_size, owner=owner)
    return jnp.zeros(vocab_size, bool).at[jnp.array(ids, jnp.int32)].set(True)


def check_ids(ids: tuple[int, ...] | list[int], vocab_size: int, *, owner: str) -> None:
    """Raises ValueError for ids that a vocabulary of this size does not have."""
    unknown = [token for token in ids if not 0 <= token < vocab_size]
    if unknown:
        raise ValueError(
            f"{owner}: the model has no token {unknown[0]}; its {vocab_size} ids end at"
            f" {vocab_size - 1}"
        )
