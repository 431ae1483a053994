"""The decoding loop: prompts in, continuations out, one cached step at a time.

`extend_prompts` is the way in for every decoder. `SampleDecoder` draws, or is greedy; its loop ends
as soon as every row has ended. `layerkit.decoding.beam_search` has the other one.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from layerkit.decoding.cache_rows import repeat_rows
from layerkit.decoding.decoder import Decoder, ExtendFn, Prompts, best_first
from layerkit.decoding.logit_processors import (
    LogitProcessor,
    MinP,
    RepetitionPenalty,
    RowsSoFar,
    Temperature,
    TopK,
    TopP,
    check_ids,
    process_logits,
)
from layerkit.decoding.samplers import row_keys, sample_token
from layerkit.decoding.split_rows import pad_columns
from layerkit.nested_map import NestedMap


def extend_prompts(
    decoder: Decoder,
    extend: ExtendFn,
    cache: Any,
    *,
    prompts: jax.Array,
    prompt_lengths: jax.Array,
    key: jax.Array | None,
    cache_axes: Any = None,
    row_ids: jax.Array | None = None,
    max_steps: jax.Array | None = None,
    row_parts: int = 1,
) -> NestedMap:
    """Continues prompts by a cached model.

    Args:
      decoder: How tokens are chosen.
      extend: `(cache, ids [rows, t], time_step) -> (cache, logits [rows, t, vocab])`.
      cache: An empty cache of `batch` rows for prompt width + `max_decode_steps` tokens, or for as
        many more as make a multiple of `row_parts`.
      prompts: int32 `[batch, width]`, left-aligned; what stands after a row's length is not read.
      prompt_lengths: int32 `[batch]`; one beyond `width` counts as `width`. A row of length 0 only
        fills up the batch: nothing is drawn for it, and no other row waits for it.
      key: Random key, a scalar; None if the decoder draws nothing. The token of a column is drawn
        with the key's fold-in of row id, sample and column, whatever else is in the batch.
      cache_axes: Where the rows of the cache are (`row_axes`); needed by decoders that follow
        several continuations of a prompt.
      row_ids: int32 `[batch]`, for the random numbers; None for the place in the batch.
      max_steps: int32 `[batch]`, for rows that shall get fewer tokens than `max_decode_steps`.
      row_parts: Over how many devices rows are split; the prompts are fed to the model in a
        multiple of so many columns. See `layerkit.decoding.split_rows`.

    Returns:
      A NestedMap:
        ids: int32 `[batch, width + max_decode_steps]`: prompt, what was chosen, zeros.
        lengths: int32 `[batch]`, of prompt and continuation.
        log_probs: float32 like `ids`, of the chosen tokens under the model itself, whatever was
          done to its logits; 0 elsewhere.
        scores: float32 `[batch]`, by which the decoder ranks continuations; the sum of `log_probs`
          unless it says otherwise.
        candidates: Where the decoder is asked for n > 1 continuations of a prompt: the same four
          with an axis n after `batch`, best first. The entries above are the first of them.
        prompt_lengths: int32 `[batch]`, what of `lengths` is the prompt.

    Raises:
      ValueError: a key that is missing, or axes of the cache that are.
    """
    if key is None and decoder.needs_key:
        raise ValueError(f"{decoder!r} draws random numbers and needs a key")
    batch, width = prompts.shape
    lengths = jnp.minimum(prompt_lengths, width)
    # The model runs on the padding too, and an id that it does not have would leave NaN in the
    # cache, which no mask hides: 0 · NaN is NaN.
    prompts = jnp.where(jnp.arange(width) < lengths[:, None], prompts, 0).astype(jnp.int32)
    # The logits of this pass are not used, so the compiler leaves their computation out.
    cache, _ = extend(cache, pad_columns(prompts, row_parts), jnp.int32(0))
    steps = jnp.int32(decoder.max_decode_steps)
    if max_steps is not None:
        steps = jnp.clip(max_steps, 0, steps)
    keys = None
    if decoder.needs_key and key is not None:
        keys = row_keys(key, jnp.arange(batch) if row_ids is None else row_ids)
    outputs = decoder.continue_rows(
        extend,
        cache,
        Prompts(
            ids=jnp.pad(prompts, ((0, 0), (0, decoder.max_decode_steps))),
            lengths=lengths,
            limits=jnp.where(lengths == 0, 0, lengths + steps),
        ),
        cache_axes=cache_axes,
        keys=keys,
    )
    outputs.prompt_lengths = lengths
    return outputs


# The fields of SampleDecoder that stand for a processor, and its field, in the order of running.
_PROCESSOR_OF_FIELD: tuple[tuple[str, type[LogitProcessor], str], ...] = (
    ("repetition_penalty", RepetitionPenalty, "penalty"),
    ("temperature", Temperature, "temperature"),
    ("top_k", TopK, "k"),
    ("top_p", TopP, "p"),
    ("min_p", MinP, "p"),
)


class SampleDecoder(Decoder):
    """Draws each token from what the model says, or takes the most likely one.

    The fields from `repetition_penalty` to `min_p` add a processor each, in this order, after those
    in `processors`: history first, then temperature, then what cuts the tail off, as in Hugging
    Face's `generate`. For another order leave them out and list the processors.

    Attributes:
      temperature: 0 is greedy; 1 draws from the model's own distribution.
      repetition_penalty: Above 1 makes tokens of the row, prompt included, less likely.
      top_k: Draws from so many most likely tokens.
      top_p: Draws from the fewest most likely tokens that have this probability together.
      min_p: Draws from tokens at least so likely as this part of the likeliest.
      stop_sequences: A row also ends when its drawn tokens end in one of these, which is kept.
      num_samples: Continuations of each prompt.

    Raises:
      ValueError: a value out of its range, a stop sequence that is empty or longer than what is
        drawn, or several greedy samples.
    """

    temperature: float = 1.0
    repetition_penalty: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    num_samples: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature} must not be negative (0 is greedy)")
        if self.num_samples < 1:
            raise ValueError(f"num_samples={self.num_samples} must be at least 1")
        if self.num_samples > 1 and not self.needs_key:
            raise ValueError(
                f"num_samples={self.num_samples} with temperature=0 would all be the same; set a"
                " temperature, or use BeamSearch"
            )
        for sequence in self.stop_sequences:
            if not isinstance(sequence, tuple) or not sequence:
                raise ValueError(
                    f"stop_sequences={self.stop_sequences} must hold sequences of at least one"
                    " token, such as ((5, 6), (7,))"
                )
            if len(sequence) > self.max_decode_steps:
                raise ValueError(
                    f"stop_sequences: {sequence} is longer than"
                    f" max_decode_steps={self.max_decode_steps}"
                )
        self.all_processors()  # refuses what is out of range

    @property
    def needs_key(self) -> bool:
        return self.temperature > 0

    def all_processors(self) -> tuple[LogitProcessor, ...]:
        steps = list(super().all_processors())
        for field, processor, name in _PROCESSOR_OF_FIELD:
            value = getattr(self, field)
            if value is None or (field == "temperature" and value in (0, 1)):
                continue
            try:
                steps.append(processor(**{name: value}))
            except ValueError as error:
                raise ValueError(f"{field}={value}: {error}") from None
        return tuple(steps)

    def continue_rows(
        self,
        extend: ExtendFn,
        cache: Any,
        prompts: Prompts,
        *,
        cache_axes: Any,
        keys: jax.Array | None,
    ) -> NestedMap:
        batch, num_samples = len(prompts.lengths), self.num_samples
        if num_samples > 1:
            if cache_axes is None:
                raise ValueError(f"num_samples={num_samples} needs cache_axes; see row_axes")
            assert keys is not None  # several samples are not greedy
            cache = repeat_rows(cache, cache_axes, num_samples)
            prompts = Prompts(*(jnp.repeat(x, num_samples, axis=0) for x in prompts))
            keys = jax.vmap(row_keys, in_axes=(0, None))(keys, jnp.arange(num_samples))
            keys = keys.reshape(batch * num_samples, *keys.shape[2:])
        elif keys is not None:
            keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, 0)
        final = _sample(self, extend, cache, prompts, keys)
        columns = jnp.arange(prompts.ids.shape[1])
        found = NestedMap(
            ids=jnp.where(columns < final.lengths[:, None], final.ids, 0),
            lengths=final.lengths,
            log_probs=final.log_probs,
            scores=jnp.sum(final.log_probs, axis=-1),
        )
        return best_first(jax.tree.map(lambda x: x.reshape(batch, -1, *x.shape[1:]), found))


class _State(struct.PyTreeNode):
    column: jax.Array  # whose token comes next
    ids: jax.Array  # [rows, max_length]
    log_probs: jax.Array  # [rows, max_length]
    lengths: jax.Array  # [rows]
    ended: jax.Array  # [rows]
    cache: Any


def _sample(
    decoder: SampleDecoder, extend: ExtendFn, cache: Any, prompts: Prompts, keys: jax.Array | None
) -> _State:
    processors = decoder.all_processors()

    def advance(state: _State) -> _State:
        column = state.column
        before = jax.lax.dynamic_slice_in_dim(state.ids, column - 1, 1, axis=1)
        cache, logits = extend(state.cache, before, column - 1)
        logits = logits[:, -1].astype(jnp.float32)
        check_ids(decoder.eos_ids, logits.shape[-1], owner="eos_id")
        for sequence in decoder.stop_sequences:
            check_ids(sequence, logits.shape[-1], owner=f"stop_sequences: {sequence}")
        so_far = RowsSoFar(state.ids, prompts.lengths, column)
        column_keys = None
        if keys is not None:
            column_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, column)
        drawn = sample_token(process_logits(processors, logits, so_far), column_keys)
        log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), drawn[:, None], axis=-1)[:, 0]
        in_prompt = column < prompts.lengths
        counts = ~in_prompt & ~state.ended
        token = jnp.where(counts, drawn, jnp.where(in_prompt, state.ids[:, column], 0))
        ids = state.ids.at[:, column].set(token)
        lengths = state.lengths + counts
        ends = _ends(decoder, ids, column, lengths - prompts.lengths) | (lengths >= prompts.limits)
        return _State(
            column=column + 1,
            ids=ids,
            log_probs=state.log_probs.at[:, column].set(jnp.where(counts, log_prob, 0.0)),
            lengths=lengths,
            ended=state.ended | (counts & ends),
            cache=cache,
        )

    first = _State(
        column=prompts.start,
        ids=prompts.ids,
        log_probs=jnp.zeros(prompts.ids.shape, jnp.float32),
        lengths=prompts.lengths,
        ended=prompts.lengths >= prompts.limits,
        cache=cache,
    )
    return jax.lax.while_loop(lambda state: ~jnp.all(state.ended), advance, first)


def _ends(
    decoder: SampleDecoder, ids: jax.Array, column: jax.Array, num_drawn: jax.Array
) -> jax.Array:
    """Whether rows `[rows]` end with the token drawn for `column`."""
    ends = jnp.zeros(len(ids), bool)
    for sequence in (*((token,) for token in decoder.eos_ids), *decoder.stop_sequences):
        size = len(sequence)
        first = column - size + 1  # before the row where too little was drawn
        tail = jax.lax.dynamic_slice_in_dim(ids, first, size, axis=1)
        matches = jnp.all(tail == jnp.array(sequence), axis=1)
        ends = ends | (matches & (num_drawn >= size))
    return ends & (num_drawn > decoder.min_decode_steps)
