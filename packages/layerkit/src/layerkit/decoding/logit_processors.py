"""Processors of logits, which run in order before a token is chosen.

A processor is called as `processor(logits, rows)`, where `rows` has the tokens so far. It sets the
logits of excluded tokens to -inf. There are two kinds:

* processors that depend on the rows: `RepetitionPenalty`, `CountPenalty`, `NoRepeatNgrams`,
  `MinSteps`;
* processors of the logits alone: `LogitBias`, `BannedIds`, `Temperature`, `TopK`, `TopP`, `MinP`.

A decoder runs its `processors` first, then those of its other fields; see `SampleDecoder`. A custom
processor is a subclass of `LogitProcessor` with a `__call__`.

A service decodes requests with different options in one batch (`RowOptions`). `SampleDecoder` then
runs `OptionOfRows`, with the row's own value, in the place of the processor of the field.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from layerkit.config import Configurable
from layerkit.config.checks import check_positive, check_sizes, require


class RowsSoFar(NamedTuple):
    """Tokens of the rows before the token of `column` is chosen.

    Attributes:
      ids: Token ids int32 `[rows, max_length]`; ids from `column` on are not part of the rows.
      prompt_lengths: Number of tokens of each prompt, int32 `[rows]`.
      column: Index of the next token, int32 scalar.
      options: `RowOptions` of the rows; None if all rows have the same options.
    """

    ids: jax.Array
    prompt_lengths: jax.Array
    column: jax.Array
    options: Any = None

    @property
    def num_drawn(self) -> jax.Array:
        """Number of tokens drawn so far, int32 `[rows]`."""
        return self.column - self.prompt_lengths

    def counts(self, vocab_size: int, *, with_prompt: bool) -> jax.Array:
        """Return how often each row has each token so far, int32 `[rows, vocab]`."""
        columns = jnp.arange(self.ids.shape[1])
        counted = jnp.broadcast_to(columns < self.column, self.ids.shape)
        if not with_prompt:
            counted = counted & (columns >= self.prompt_lengths[:, None])

        def count(ids: jax.Array, counted: jax.Array) -> jax.Array:
            return jnp.zeros(vocab_size, jnp.int32).at[ids].add(counted.astype(jnp.int32))

        return jax.vmap(count)(self.ids, counted)


class ConfiguredValue(Configurable):
    """Base class of configured objects without state, which are compared by their fields.

    Decoders and logit processors are fields of models, and JAX's caches use models as keys. So two
    objects with equal fields must be equal and have the same hash.
    """

    def __post_init__(self) -> None:
        """Convert lists, which configs and the command line may give, to tuples, for the hash."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, _as_tuples(getattr(self, field.name)))

    def __eq__(self, other: object) -> bool:
        """Return whether both have the same class and equal fields."""
        return isinstance(other, ConfiguredValue) and self._values() == other._values()

    def __hash__(self) -> int:
        """Return a hash of the class and the fields."""
        return hash(self._values())

    def _values(self) -> tuple[Any, ...]:
        # Includes the fields that subclasses add.
        fields = dataclasses.fields(self)
        return (type(self), *(getattr(self, field.name) for field in fields))


def _as_tuples(value: Any) -> Any:
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return tuple(_as_tuples(item) for item in value)
    return value


class LogitProcessor(ConfiguredValue):
    """Base class of logit processors."""

    def __call__(self, logits: jax.Array, rows: RowsSoFar) -> jax.Array:
        """Return processed logits, float32 `[rows, vocab]` like the given ones."""
        raise NotImplementedError(f"{type(self).__qualname__} does not define __call__")


def process_logits(
    processors: tuple[LogitProcessor, ...], logits: jax.Array, rows: RowsSoFar
) -> jax.Array:
    """Run processors on logits float32 `[rows, vocab]` in order."""
    for processor in processors:
        logits = processor(logits, rows)
    return logits


# Processors that depend on the rows.


class RepetitionPenalty(LogitProcessor):
    """A penalty for tokens that the row has, prompt included (CTRL; Keskar et al., 2019).

    Attributes:
      penalty: Divisor of positive logits and factor of negative ones. Values below 1 make the
        tokens more likely.
    """

    penalty: float = 1.0

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        check_positive("RepetitionPenalty", penalty=self.penalty)

    def __call__(self, logits: jax.Array, rows: RowsSoFar) -> jax.Array:
        """Penalize tokens of the row."""
        penalized = jnp.where(logits < 0, logits * self.penalty, logits / self.penalty)
        is_in_row = rows.counts(logits.shape[-1], with_prompt=True) > 0
        return jnp.where(is_in_row, penalized, logits)


class CountPenalty(LogitProcessor):
    """A penalty for tokens that were drawn. Tokens of the prompt do not count.

    Attributes:
      frequency: Amount subtracted from the logit for each time that the token was drawn.
      presence: Amount subtracted once from the logit of a token that was drawn.
    """

    frequency: float = 0.0
    presence: float = 0.0

    def __call__(self, logits: jax.Array, rows: RowsSoFar) -> jax.Array:
        """Subtract the penalties."""
        counts = rows.counts(logits.shape[-1], with_prompt=False)
        return logits - self.frequency * counts - self.presence * (counts > 0)


class NoRepeatNgrams(LogitProcessor):
    """Exclusion of tokens that would repeat an n-gram of the row, prompt included.

    Attributes:
      size: Number of tokens of the n-grams.
    """

    size: int = 3

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        check_sizes("NoRepeatNgrams", size=self.size)

    def __call__(self, logits: jax.Array, rows: RowsSoFar) -> jax.Array:
        """Exclude tokens that complete an n-gram of the row."""
        max_length = rows.ids.shape[1]
        num_starts = max_length - self.size + 1
        if num_starts < 1:
            return logits
        tail_start = rows.column - (self.size - 1)
        # Compare the n-gram at each start with the end of the row. If its first size − 1 tokens
        # equal the row's last ones, exclude its last token, which must be in the row too.
        starts = jnp.arange(num_starts)
        repeats = jnp.broadcast_to(starts + self.size - 1 < rows.column, (len(logits), num_starts))
        for offset in range(self.size - 1):
            tail = jnp.take(rows.ids, tail_start + offset, axis=1, mode="clip")
            repeats = repeats & (rows.ids[:, offset : offset + num_starts] == tail[:, None])
        followers = rows.ids[:, self.size - 1 :]

        def exclude(logits: jax.Array, followers: jax.Array, repeats: jax.Array) -> jax.Array:
            return logits.at[followers].min(jnp.where(repeats, -jnp.inf, jnp.inf))

        return jax.vmap(exclude)(logits, followers, repeats)


class MinSteps(LogitProcessor):
    """Exclusion of end tokens until a row has `num_steps` drawn tokens.

    Attributes:
      num_steps: Smallest number of drawn tokens, without the end token.
      eos_ids: Ids of the end tokens.
    """

    num_steps: int = 0
    eos_ids: tuple[int, ...] = ()

    def __call__(self, logits: jax.Array, rows: RowsSoFar) -> jax.Array:
        """Exclude end tokens from short rows."""
        is_early = rows.num_drawn < self.num_steps
        is_end = id_mask(self.eos_ids, logits.shape[-1], owner="MinSteps", field="eos_ids")
        return jnp.where(is_early[:, None] & is_end, -jnp.inf, logits)


# Processors of the logits alone.


class LogitBias(LogitProcessor):
    """A bias of the logits of some tokens.

    Attributes:
      biases: Pairs of a token id and the bias to add.
    """

    biases: tuple[tuple[int, float], ...] = ()

    def __call__(self, logits: jax.Array, rows: RowsSoFar) -> jax.Array:
        """Add the biases."""
        del rows
        ids = [token for token, _ in self.biases]
        check_ids(ids, logits.shape[-1], owner="LogitBias", field="biases")
        values = jnp.array([value for _, value in self.biases], jnp.float32)
        return logits + jnp.zeros(logits.shape[-1]).at[jnp.array(ids, jnp.int32)].add(values)


class BannedIds(LogitProcessor):
    """Exclusion of some tokens.

    Attributes:
      ids: Ids of the tokens.
    """

    ids: tuple[int, ...] = ()

    def __call__(self, logits: jax.Array, rows: RowsSoFar) -> jax.Array:
        """Exclude the tokens."""
        del rows
        is_banned = id_mask(self.ids, logits.shape[-1], owner="BannedIds", field="ids")
        return jnp.where(is_banned, -jnp.inf, logits)


class Temperature(LogitProcessor):
    """A divisor of the logits.

    Attributes:
      temperature: Positive divisor; values below 1 make likely tokens more likely. Greedy decoding
        is `SampleDecoder(temperature=0)`.
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        check_positive("Temperature", temperature=self.temperature)

    def __call__(self, logits: jax.Array, rows: RowsSoFar) -> jax.Array:
        """Divide the logits."""
        del rows
        return logits / self.temperature


class TopK(LogitProcessor):
    """Exclusion of all but the k most likely tokens (Fan et al., 2018).

    Tokens that are as likely as the k-th one are kept.

    Attributes:
      k: Number of tokens to keep.
    """

    k: int = 50

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        check_sizes("TopK", k=self.k)

    def __call__(self, logits: jax.Array, rows: RowsSoFar) -> jax.Array:
        """Exclude less likely tokens."""
        del rows
        largest, _ = jax.lax.top_k(logits, min(self.k, logits.shape[-1]))
        return keep_above(logits, largest[:, -1:])


class TopP(LogitProcessor):
    """Exclusion of all but the fewest most likely tokens of total probability p.

    Source: nucleus sampling (Holtzman et al., 2020, arXiv:1904.09751).

    Attributes:
      p: Probability in (0, 1]. The most likely token is always kept.
      keep_ties: True to keep all tokens that are as likely as the least likely kept one (Pax).
        False keeps the fewest tokens. Among equally likely tokens, it keeps smaller ids.
    """

    p: float = 1.0
    keep_ties: bool = False

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        is_valid = 0 < self.p <= 1
        require(is_valid, owner="TopP", field="p", value=self.p, expected="a number in (0, 1]")

    def __call__(self, logits: jax.Array, rows: RowsSoFar) -> jax.Array:
        """Exclude the tail of the distribution."""
        del rows
        if self.p == 1:  # The rounded sum may reach 1 early and exclude the last tokens.
            return logits
        kept = keep_top_p(logits, self.p)
        if not self.keep_ties:
            return kept
        return keep_above(
            logits, jnp.min(logits, axis=-1, where=kept != -jnp.inf, initial=jnp.inf, keepdims=True)
        )


class MinP(LogitProcessor):
    """Exclusion of tokens that are much less likely than the most likely one (Nguyen et al., 2024).

    Attributes:
      p: Smallest probability to keep, as a fraction of the largest.
    """

    p: float = 0.0

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        is_valid = 0 <= self.p <= 1
        require(is_valid, owner="MinP", field="p", value=self.p, expected="a number in [0, 1]")

    def __call__(self, logits: jax.Array, rows: RowsSoFar) -> jax.Array:
        """Exclude unlikely tokens."""
        del rows
        probs = jax.nn.softmax(logits)
        smallest = self.p * jnp.max(probs, axis=-1, keepdims=True)
        return jnp.where(probs >= smallest, logits, -jnp.inf)


class EpsilonCutoff(LogitProcessor):
    """Exclusion of tokens less likely than a constant (Hewitt et al., 2022, arXiv:2210.15191).

    Attributes:
      epsilon: Smallest probability to keep. The most likely token is always kept.
    """

    epsilon: float = 0.0

    def __call__(self, logits: jax.Array, rows: RowsSoFar) -> jax.Array:
        """Exclude unlikely tokens."""
        del rows
        probs = jax.nn.softmax(logits)
        smallest = jnp.minimum(self.epsilon, jnp.max(probs, axis=-1, keepdims=True))
        return jnp.where(probs >= smallest, logits, -jnp.inf)


def keep_top_p(logits: jax.Array, p: jax.Array | float) -> jax.Array:
    """Exclude all but the fewest most likely tokens of total probability p.

    Args:
      logits: `[rows, vocab]`.
      p: Probability, a number or `[rows, 1]`.

    Returns:
      `[rows, vocab]`, -inf for excluded tokens. The most likely token is always kept.
    """
    order = jnp.argsort(logits, axis=-1, descending=True, stable=True)
    probs = jnp.take_along_axis(jax.nn.softmax(logits), order, axis=-1)
    # A token is kept if the tokens before it do not reach the probability.
    before = jnp.cumsum(probs, axis=-1) - probs
    stays = (before < p).at[:, 0].set(True)
    stays = jax.vmap(lambda order, stays: jnp.zeros_like(stays).at[order].set(stays))(order, stays)
    return jnp.where(stays, logits, -jnp.inf)


def keep_above(logits: jax.Array, smallest: jax.Array) -> jax.Array:
    """Exclude tokens of `[rows, vocab]` whose logit is below `smallest` `[rows, 1]`."""
    return jnp.where(logits >= smallest, logits, -jnp.inf)


def id_mask(ids: tuple[int, ...], vocab_size: int, *, owner: str, field: str) -> jax.Array:
    """Return bool `[vocab]`, True for the tokens `ids`; raise the errors of `check_ids`."""
    check_ids(ids, vocab_size, owner=owner, field=field)
    return jnp.zeros(vocab_size, bool).at[jnp.array(ids, jnp.int32)].set(True)


def check_ids(ids: tuple[int, ...] | list[int], vocab_size: int, *, owner: str, field: str) -> None:
    """Raise `ConfigError` about `field` of `owner` if an id is outside of the vocabulary."""
    for token in ids:
        expected = f"an id from 0 to {vocab_size - 1}, the vocabulary of the model"
        require(0 <= token < vocab_size, owner=owner, field=field, value=token, expected=expected)


class RowOptions(NamedTuple):
    """Options of the rows, each of which replaces the field of that name of a `SampleDecoder`.

    Attributes:
      temperature: Divisor of the logits, float32 `[batch]`; 0 chooses the most likely token. None
        for the field's value in all rows.
      top_k: Number of most likely tokens to sample from, int32 `[batch]`; 0 for all. None for the
        field's value in all rows.
      top_p: Total probability of the fewest most likely tokens to sample from, float32 `[batch]`;
        1 for all tokens. None for the field's value in all rows.
    """

    temperature: jax.Array | None = None
    top_k: jax.Array | None = None
    top_p: jax.Array | None = None

    def names(self) -> tuple[str, ...]:
        """Return the names of the options that differ between rows."""
        return tuple(name for name, value in self._asdict().items() if value is not None)


class OptionOfRows(LogitProcessor):
    """A processor that applies an option with the value of each row.

    Attributes:
      option: `temperature`, `top_k` or `top_p`.
    """

    option: str = "temperature"

    def __call__(self, logits: jax.Array, rows: RowsSoFar) -> jax.Array:
        """Apply the option of each row to logits `[rows, vocab]`."""
        values = getattr(rows.options, self.option)[:, None]
        return _APPLY[self.option](logits, values)


def _divide(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    is_greedy = temperature <= 0
    best = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=bool)
    divided = logits / jnp.where(is_greedy, 1.0, temperature)
    return jnp.where(is_greedy & ~best, -jnp.inf, divided)


def _keep_top_k(logits: jax.Array, k: jax.Array) -> jax.Array:
    size = logits.shape[-1]
    last = jnp.where(k <= 0, size, jnp.minimum(k, size)) - 1
    descending = jnp.sort(logits, axis=-1, descending=True)
    return keep_above(logits, jnp.take_along_axis(descending, last, axis=-1))


def _keep_top_p(logits: jax.Array, p: jax.Array) -> jax.Array:
    return jnp.where(p >= 1, logits, keep_top_p(logits, p))


_APPLY = {"temperature": _divide, "top_k": _keep_top_k, "top_p": _keep_top_p}
