"""Continuation of prompts with a cached model, and the decoder for sampling and greedy decoding.

`extend_prompts` runs any decoder; `start_prompts` and `advance_rows` run a `SampleDecoder` by some
tokens at a time, for example to stream them. A `SampleDecoder` samples tokens or chooses the most
likely ones. Its loop stops when all rows have ended, and each row has its own random numbers.
`BeamSearch` is in `layerkit.decoding.beam_search`.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from layerkit.config.checks import check_non_negative, check_sizes, require
from layerkit.config.nested_map import NestedMap
from layerkit.decoding.cache_rows import pad_columns, repeat_rows
from layerkit.decoding.decoder import (
    Decoder,
    ExtendFn,
    PromptRows,
    Prompts,
    best_first,
    require_cache_axes,
)
from layerkit.decoding.logit_processors import (
    LogitProcessor,
    MinP,
    OptionOfRows,
    RepetitionPenalty,
    RowOptions,
    RowsSoFar,
    Temperature,
    TopK,
    TopP,
    check_ids,
    process_logits,
)
from layerkit.errors import ConfigError


def extend_prompts(
    decoder: Decoder,
    extend: ExtendFn,
    cache: Any,
    prompts: Prompts,
    *,
    cache_axes: Any = None,
    row_parts: int = 1,
) -> NestedMap:
    """Continue prompts with a cached model.

    Args:
      decoder: Decoder that chooses tokens.
      extend: Function `(cache, ids [rows, t], time_step) -> (cache, logits [rows, t, vocab])`.
      cache: Empty cache of `batch` rows of `decoder.row_length(width)` tokens, rounded up to a
        multiple of `row_parts`.
      prompts: Prompts `[batch, width]` with the random key and the limits of rows.
      cache_axes: Row axis of each array of the cache (see `row_axes`). Only decoders that compute
        several continuations of a prompt need it.
      row_parts: Number of devices over which the tokens of a row are split. The width of prompts is
        padded to a multiple of it; see `layerkit.decoding.cache_rows`.

    Returns:
      A NestedMap with these entries.

      - `ids`: Prompt, chosen tokens and zeros, int32 `[batch, row_length]`, with
        row_length = width + `max_decode_steps`, or `max_length` if that is smaller.
      - `lengths`: Number of tokens of prompt and continuation, int32 `[batch]`.
      - `log_probs`: Log-probabilities of the chosen tokens under the model, before logit
        processors, float32 with the shape of `ids`; 0 for all other tokens.
      - `scores`: Scores by which the decoder ranks continuations, float32 `[batch]`. The sum of
        `log_probs` by default.
      - `candidates`: The four entries above for all n continuations, with an axis n after `batch`,
        best first. It exists only if n > 1. The entries above hold the best continuation.
      - `prompt_lengths`: Number of tokens of the prompt, int32 `[batch]`.

    Raises:
      ConfigError: The decoder needs a key or `cache_axes`, and it is None; or it does not support
        an option of rows.
    """
    cache, rows = _fill_cache(decoder, extend, cache, prompts, row_parts)
    outputs = decoder.continue_rows(extend, cache, rows, cache_axes=cache_axes)
    outputs.prompt_lengths = rows.lengths
    return outputs


def start_prompts(
    decoder: SampleDecoder, extend: ExtendFn, cache: Any, prompts: Prompts, *, row_parts: int = 1
) -> SampledRows:
    """Return the rows of prompts before their first chosen token; `advance_rows` continues them.

    The arguments are those of `extend_prompts`. `num_samples` has no effect.
    """
    cache, rows = _fill_cache(decoder, extend, cache, prompts, row_parts)
    return _start_rows(cache, rows)


def _fill_cache(
    decoder: Decoder, extend: ExtendFn, cache: Any, prompts: Prompts, row_parts: int
) -> tuple[Any, PromptRows]:
    """Return the cache with the prompts, and their rows with space for continuations."""
    _check_options(decoder, prompts)
    batch, width = prompts.ids.shape
    lengths = jnp.minimum(prompts.lengths, width)
    # The model also runs on padding. An id outside of its vocabulary would write NaN to the cache.
    # A mask does not remove a NaN, since 0 · NaN is NaN.
    ids = jnp.where(jnp.arange(width) < lengths[:, None], prompts.ids, 0).astype(jnp.int32)
    # The logits of this pass are unused, so the compiler removes their computation.
    cache, _ = extend(cache, pad_columns(ids, row_parts), jnp.int32(0))
    steps = jnp.int32(decoder.max_decode_steps)
    if prompts.max_steps is not None:
        steps = jnp.clip(prompts.max_steps, 0, steps)
    limits = jnp.where(lengths == 0, 0, lengths + steps)
    if decoder.max_length is not None:
        limits = jnp.maximum(lengths, jnp.minimum(limits, decoder.max_length))
    keys = None
    if decoder.needs_key and prompts.key is not None:
        row_ids = jnp.arange(batch) if prompts.row_ids is None else prompts.row_ids
        keys = row_keys(prompts.key, row_ids)
    ids = jnp.pad(ids, ((0, 0), (0, decoder.row_length(width) - width)))
    return cache, PromptRows(ids, lengths, limits, prompts.options, keys)


def _check_options(decoder: Decoder, prompts: Prompts) -> None:
    owner, options = type(decoder).__qualname__, prompts.options
    expected = "a random key, since the decoder draws random numbers"
    require(prompts.key is not None or not decoder.needs_key, owner, "key", None, expected)
    for name in options.names():
        shape = list(getattr(options, name).shape)
        expected = "no values of rows; only SampleDecoder has options of rows"
        require(name in decoder.row_options, owner, f"{name} of rows", shape, expected)
    is_valid = options.temperature is None or decoder.needs_key
    require(is_valid, owner, "temperature", 0, "a number above 0, since rows have temperatures")


# (Field of SampleDecoder, processor that it adds, field of that processor), in the order in which
# the processors run.
_PROCESSOR_OF_FIELD: tuple[tuple[str, type[LogitProcessor], str], ...] = (
    ("repetition_penalty", RepetitionPenalty, "penalty"),
    ("temperature", Temperature, "temperature"),
    ("top_k", TopK, "k"),
    ("top_p", TopP, "p"),
    ("min_p", MinP, "p"),
)


class SampleDecoder(Decoder):
    """A decoder that samples tokens from the model's distribution or chooses the most likely ones.

    Each of the fields `repetition_penalty`, `temperature`, `top_k`, `top_p` and `min_p` adds a
    logit processor. They run in this order, as in Hugging Face's `generate`, after those in
    `processors`. For another order, leave these fields out and list all processors in `processors`.

    Rows may have temperatures, top_k and top_p of their own, which replace the fields; see
    `RowOptions`.

    Attributes:
      temperature: Divisor of the logits. 0 chooses the most likely token, and 1 samples from the
        model's distribution.
      repetition_penalty: Penalty of tokens that already occur in the row, prompt included. Values
        above 1 make them less likely. None for no penalty.
      top_k: Number of most likely tokens to sample from; None for all.
      top_p: Total probability of the fewest most likely tokens to sample from (nucleus sampling);
        None for all tokens.
      min_p: Minimal probability of a token, as a fraction of that of the most likely token; None
        for no minimum.
      stop_sequences: Token sequences. A row ends after its drawn tokens contain one of them; the
        output includes the sequence.
      num_samples: Number of continuations per prompt.

    Raises:
      ConfigError: A value is out of range, a stop sequence is empty or longer than
        `max_decode_steps`, or `num_samples` is above 1 with a temperature of 0.
    """

    row_options: ClassVar[tuple[str, ...]] = RowOptions._fields

    temperature: float = 1.0
    repetition_penalty: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    num_samples: int = 1

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        owner = type(self).__qualname__
        check_non_negative(owner, temperature=self.temperature)
        check_sizes(owner, num_samples=self.num_samples)
        for sequence in self.stop_sequences:
            expected = f"sequences of 1 to max_decode_steps={self.max_decode_steps} token ids"
            is_valid = 1 <= len(sequence) <= self.max_decode_steps
            require(is_valid, owner, "stop_sequences", sequence, expected)
        self.all_processors()  # checks their fields

    @property
    def needs_key(self) -> bool:
        """True unless the temperature is 0."""
        return self.temperature > 0

    def all_processors(self, of_rows: Collection[str] = ()) -> tuple[LogitProcessor, ...]:
        """Return `processors`, then the processors of the other fields.

        Args:
          of_rows: Names of the fields that options of rows replace.
        """
        steps = list(super().all_processors())
        for field, processor, name in _PROCESSOR_OF_FIELD:
            if field in of_rows:
                steps.append(OptionOfRows(option=field))
                continue
            value = getattr(self, field)
            if value is None or (field == "temperature" and value in (0, 1)):
                continue
            try:
                steps.append(processor(**{name: value}))
            except ConfigError as error:
                error.owner, error.field = type(self).__qualname__, field
                raise
        return tuple(steps)

    def continue_rows(
        self, extend: ExtendFn, cache: Any, prompts: PromptRows, *, cache_axes: Any
    ) -> NestedMap:
        """Continue the prompts `[batch, max_length]`, which are in the cache; see `Decoder`."""
        num_samples = self.num_samples
        if num_samples > 1:
            require_cache_axes(self, cache_axes)
            cache = repeat_rows(cache, cache_axes, num_samples)
        rows = advance_rows(self, extend, _start_rows(cache, prompts, num_samples))
        columns = jnp.arange(rows.ids.shape[1])
        samples = NestedMap(
            ids=jnp.where(columns < rows.lengths[:, None], rows.ids, 0),
            lengths=rows.lengths,
            log_probs=rows.log_probs,
            scores=jnp.sum(rows.log_probs, axis=-1),
        )
        by_prompt = prompts.ids.shape[0], num_samples
        return best_first(jax.tree.map(lambda x: x.reshape(*by_prompt, *x.shape[1:]), samples))

    def advance(self, extend: ExtendFn, rows: SampledRows) -> SampledRows:
        """Run the model once; return the rows with tokens in their next column."""
        before = jax.lax.dynamic_slice_in_dim(rows.ids, rows.column - 1, 1, axis=1)
        cache, logits = extend(rows.cache, before, rows.column - 1)
        return choose_column(self, rows.replace(cache=cache), logits[:, -1])


class SampledRows(struct.PyTreeNode):
    """The rows of a `SampleDecoder` after some of their tokens.

    Attributes:
      column: Column of the next tokens, an int32 scalar.
      ids: Prompts and chosen tokens, int32 `[rows, max_length]`.
      log_probs: Log-probabilities of the chosen tokens, float32 `[rows, max_length]`.
      lengths: Number of tokens of prompt and continuation, int32 `[rows]`.
      ended: True for rows that get no further token, bool `[rows]`.
      cache: Cache of the model.
      prompt_lengths: Number of tokens of each prompt, int32 `[rows]`.
      limits: Length at which a row must end, int32 `[rows]`.
      options: Sampling options that differ between rows.
      keys: Random keys `[rows]`; None if the decoder does not draw.
    """

    column: jax.Array
    ids: jax.Array
    log_probs: jax.Array
    lengths: jax.Array
    ended: jax.Array
    cache: Any
    prompt_lengths: jax.Array
    limits: jax.Array
    options: RowOptions
    keys: jax.Array | None


def _start_rows(cache: Any, prompts: PromptRows, num_samples: int = 1) -> SampledRows:
    """Return the rows `[batch · num_samples, …]` before their first chosen token.

    Args:
      cache: Cache with as many rows, filled up to the width of the prompts.
      prompts: Prompts in the cache.
      num_samples: Number of rows of a prompt, each with a random key of its own.
    """
    rows = prompts._replace(keys=None)
    if num_samples > 1:
        rows = jax.tree.map(lambda x: jnp.repeat(x, num_samples, axis=0), rows)
    keys = prompts.keys
    if keys is not None:
        keys = jax.vmap(row_keys, in_axes=(0, None))(keys, jnp.arange(num_samples))
        keys = keys.reshape(rows.ids.shape[0], *keys.shape[2:])
    return SampledRows(
        column=rows.start,
        ids=rows.ids,
        log_probs=jnp.zeros(rows.ids.shape, jnp.float32),
        lengths=rows.lengths,
        ended=rows.lengths >= rows.limits,
        cache=cache,
        prompt_lengths=rows.lengths,
        limits=rows.limits,
        options=rows.options,
        keys=keys,
    )


def advance_rows(
    decoder: SampleDecoder, extend: ExtendFn, rows: SampledRows, *, until: jax.Array | None = None
) -> SampledRows:
    """Choose tokens until all rows have ended.

    Args:
      decoder: Decoder that chooses tokens.
      extend: Function that runs the model on the next tokens.
      rows: Rows so far.
      until: Column before which to pause, an int32 scalar; None for no pause.
    """

    def has_next(rows: SampledRows) -> jax.Array:
        open_rows = ~jnp.all(rows.ended)
        return open_rows if until is None else open_rows & (rows.column < until)

    return jax.lax.while_loop(has_next, functools.partial(decoder.advance, extend), rows)


def choose_column(decoder: SampleDecoder, rows: SampledRows, logits: jax.Array) -> SampledRows:
    """Return the rows with tokens in their next column, given its logits `[rows, vocab]`."""
    column, logits = rows.column, logits.astype(jnp.float32)
    processors = decoder.all_processors(rows.options.names())
    owner = type(decoder).__qualname__
    check_ids(decoder.eos_ids, logits.shape[-1], owner=owner, field="eos_id")
    for sequence in decoder.stop_sequences:
        check_ids(sequence, logits.shape[-1], owner=owner, field="stop_sequences")
    so_far = RowsSoFar(rows.ids, rows.prompt_lengths, column, rows.options)
    column_keys = None
    if rows.keys is not None:
        column_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(rows.keys, column)
    drawn = sample_token(process_logits(processors, logits, so_far), column_keys)
    log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), drawn[:, None], axis=-1)[:, 0]
    in_prompt = column < rows.prompt_lengths
    counts = ~in_prompt & ~rows.ended
    token = jnp.where(counts, drawn, jnp.where(in_prompt, rows.ids[:, column], 0))
    ids = rows.ids.at[:, column].set(token)
    lengths = rows.lengths + counts
    ends = _ends(decoder, ids, column, lengths - rows.prompt_lengths) | (lengths >= rows.limits)
    return rows.replace(
        column=column + 1,
        ids=ids,
        log_probs=rows.log_probs.at[:, column].set(jnp.where(counts, log_prob, 0.0)),
        lengths=lengths,
        ended=rows.ended | (counts & ends),
    )


def _ends(
    decoder: SampleDecoder, ids: jax.Array, column: jax.Array, num_drawn: jax.Array
) -> jax.Array:
    """Return for each row whether it ends with its token in `column`, bool `[rows]`."""
    ends = jnp.zeros(ids.shape[0], bool)
    for sequence in (*((token,) for token in decoder.eos_ids), *decoder.stop_sequences):
        size = len(sequence)
        first = column - size + 1  # negative if the row is too short
        tail = jax.lax.dynamic_slice_in_dim(ids, first, size, axis=1)
        matches = jnp.all(tail == jnp.array(sequence), axis=1)
        ends = ends | (matches & (num_drawn >= size))
    return ends & (num_drawn > decoder.min_decode_steps)


def row_keys(key: jax.Array, row_ids: jax.Array) -> jax.Array:
    """Return a random key for each row: `fold_in(key, row_id)`.

    The samples of a row then depend only on its id, not on the other rows of the batch.

    Args:
      key: Random key, a scalar.
      row_ids: Ids of the rows, int32 `[rows]`.

    Returns:
      Random keys `[rows]`.
    """
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, row_ids)


def sample_token(logits: jax.Array, keys: jax.Array | None) -> jax.Array:
    """Draw one token per row from softmax(logits).

    The index of the largest logit after adding Gumbel noise is such a draw (Gumbel, 1954).

    Args:
      logits: Logits float32 `[rows, vocab]`; -inf is never drawn unless all are -inf.
      keys: Random keys `[rows]`; None selects the most likely token instead.

    Returns:
      Token ids int32 `[rows]`.
    """
    if keys is not None:
        draw_noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], logits.dtype))
        logits = logits + draw_noise(keys)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
