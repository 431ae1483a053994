"""Beam search for likely continuations of prompts.

Each prompt has `beam_size` open beams. A step scores each token after each beam. The best
continuations that do not end become the open beams. Those that end compete with the best ended
beams so far. An end token ends a beam, and the last allowed step ends all beams of a row, so that
all results have ended. The score of a beam is its sum of log-probabilities divided by

    ((length + 5) / 5) ** length_norm_alpha

where `length` is the number of chosen tokens including the end token (Wu et al., 2016, with the
constant of Praxis). The loop stops when no open beam can reach a better score than the ended ones,
which does not change the result.

The model runs on the beams of all prompts in one batch `[batch · beam_size]`. The cache rows of
each beam are gathered from its parent, within its prompt, so that prompts split over a mesh stay on
their devices.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from layerkit.config.checks import check_non_negative, check_sizes, require
from layerkit.config.nested_map import NestedMap
from layerkit.decoding.cache_rows import reorder_rows, repeat_rows
from layerkit.decoding.decoder import Decoder, ExtendFn, PromptRows, best_first, require_cache_axes
from layerkit.decoding.logit_processors import RowsSoFar, id_mask, process_logits


class BeamSearch(Decoder):
    """A decoder that searches for likely continuations, without random numbers.

    `processors` change the scores of the search. The returned `log_probs` are those of the model.

    Attributes:
      beam_size: Number of open beams per prompt.
      num_results: Number of continuations returned per prompt, best first. Missing
        results, and all results of padding rows, have score -inf and only the prompt's tokens.
      ends_at_limit: True if open beams of the last allowed step are results; False if only end
        tokens end a beam, as in Praxis.
      tokens_per_beam: Number of most likely tokens of a beam, end tokens included, that may
        continue it; None for all. Praxis has `beam_size`.
      renormalize: True if the search ranks by log-probabilities that are normalized after the
        processors and `min_decode_steps`; False if these change the log-probabilities, as in
        Praxis and by default in Hugging Face.
      length_norm_alpha: Exponent of the length normalization. Larger values favor longer
        continuations; 0 compares plain sums.

    Raises:
      ConfigError: `beam_size` or `tokens_per_beam` is not positive, there are more results than
        beams, or `length_norm_alpha` is negative.
    """

    beam_size: int = 4
    num_results: int = 1
    length_norm_alpha: float = 0.8
    ends_at_limit: bool = True
    tokens_per_beam: int | None = None
    renormalize: bool = True

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        sizes = {"beam_size": self.beam_size, "tokens_per_beam": self.tokens_per_beam}
        check_sizes("BeamSearch", **sizes)
        is_valid, expected = 1 <= self.num_results <= self.beam_size, f"1 to {self.beam_size} beams"
        require(is_valid, "BeamSearch", "num_results", self.num_results, expected)
        check_non_negative("BeamSearch", length_norm_alpha=self.length_norm_alpha)

    def length_norm(self, length: jax.Array) -> jax.Array:
        """Return the divisor of the scores of `length` `[…]` chosen tokens, float32 `[…]`."""
        return ((length.astype(jnp.float32) + 5.0) / 5.0) ** self.length_norm_alpha

    def continue_rows(
        self, extend: ExtendFn, cache: Any, prompts: PromptRows, *, cache_axes: Any
    ) -> NestedMap:
        """Continue rows whose prompts `[batch, max_length]` are in the cache; see `Decoder`."""
        require_cache_axes(self, cache_axes)
        cache = repeat_rows(cache, cache_axes, self.beam_size)
        best = _search(self, extend, cache, prompts, cache_axes)
        columns = jnp.arange(prompts.ids.shape[1])
        return best_first(
            NestedMap(
                ids=jnp.where(columns < best.lengths[..., None], best.ids, 0),
                lengths=best.lengths,
                log_probs=best.log_probs,
                scores=best.scores,
            )
        )


class _Beams(struct.PyTreeNode):
    """Beams in rows `[batch, n, …]`, open (n = beam_size) or ended (n = num_results)."""

    ids: jax.Array  # [batch, n, max_length]
    log_probs: jax.Array  # [batch, n, max_length]
    lengths: jax.Array  # [batch, n]
    scores: jax.Array  # [batch, n]; sums if open, normalized if ended

    @classmethod
    def from_prompts(cls, prompts: PromptRows, n: int, scores: jax.Array) -> _Beams:
        ids = jnp.repeat(prompts.ids[:, None], n, axis=1)
        return cls(
            ids=ids,
            log_probs=jnp.zeros(ids.shape, jnp.float32),
            lengths=jnp.repeat(prompts.lengths[:, None], n, axis=1),
            scores=jnp.broadcast_to(scores, ids.shape[:2]),
        )

    def take(self, places: jax.Array) -> _Beams:
        """Return the beams at indices `places` `[batch, m]`."""
        pick = jax.vmap(lambda x, places: jnp.take(x, places, axis=0))
        return jax.tree.map(lambda x: pick(x, places), self)

    def append(self, column: jax.Array, token: jax.Array, log_prob: jax.Array) -> _Beams:
        """Return the beams with tokens `[batch, n]` in `column`."""
        return self.replace(
            ids=self.ids.at[:, :, column].set(token),
            log_probs=self.log_probs.at[:, :, column].set(log_prob),
            lengths=jnp.full_like(self.lengths, column + 1),
        )


class _State(struct.PyTreeNode):
    column: jax.Array  # of the next tokens
    open: _Beams
    ended: _Beams
    done: jax.Array  # [batch]
    cache: Any


def _search(
    decoder: BeamSearch, extend: ExtendFn, cache: Any, prompts: PromptRows, cache_axes: Any
) -> _Beams:
    """Return the best ended beams `[batch, num_results, …]`.

    The cache has `beam_size` rows per prompt.
    """
    best_norm = decoder.length_norm(prompts.limits - prompts.lengths)
    # Without normalization, a processor may make a token more likely than certain.
    scores_fall = decoder.renormalize or not decoder.processors

    def advance(state: _State) -> _State:
        column, is_open = state.column, ~state.done
        in_prompt = column < prompts.lengths
        chooses = (is_open & ~in_prompt)[:, None]
        cache, log_probs, gains = _score_tokens(decoder, extend, state, prompts)
        totals = state.open.scores[..., None] + gains  # [batch, beam, vocab]
        ends = id_mask(decoder.eos_ids, totals.shape[-1], owner="BeamSearch", field="eos_id")
        is_last = column + 1 >= prompts.limits
        if decoder.ends_at_limit:
            ends = ends | is_last[:, None, None]
        may_continue = ~ends & _most_likely(gains, decoder.tokens_per_beam)

        def best(totals: jax.Array, n: int) -> tuple[_Beams, jax.Array]:
            """Return the `n` best continued beams and the indices of their parents."""
            scores, places = jax.lax.top_k(totals.reshape(len(totals), -1), n)
            parents, tokens = jnp.divmod(places, totals.shape[-1])
            chosen = jnp.take_along_axis(log_probs.reshape(len(totals), -1), places, axis=1)
            beams = state.open.take(parents).append(column, tokens, chosen)
            return beams.replace(scores=scores), parents

        continued, parents = best(jnp.where(may_continue, totals, -jnp.inf), decoder.beam_size)
        # Rows still in their prompt do not change: their beams already hold the prompt's token.
        parents = jnp.where(chooses, parents, jnp.arange(decoder.beam_size))
        continued = _where(chooses, continued, state.open)
        ending, _ = best(jnp.where(ends, totals, -jnp.inf), decoder.num_results)
        norm = decoder.length_norm(column + 1 - prompts.lengths)[:, None]
        ending = ending.replace(scores=jnp.where(chooses, ending.scores / norm, -jnp.inf))
        ended = _best_of(state.ended, ending)
        upper_bound = jnp.max(continued.scores, axis=1) / best_norm if scores_fall else jnp.inf
        return _State(
            column=column + 1,
            open=continued,
            ended=ended,
            # With a NaN among the scores, only the limit ends a row.
            done=state.done | is_last | (~in_prompt & (ended.scores[:, -1] >= upper_bound)),
            cache=reorder_rows(cache, cache_axes, parents),
        )

    # Only the first beam has a finite score at first. Otherwise all beams would be the same.
    first_scores = jnp.where(jnp.arange(decoder.beam_size) == 0, 0.0, -jnp.inf)
    first = _State(
        column=prompts.start,
        open=_Beams.from_prompts(prompts, decoder.beam_size, first_scores),
        ended=_Beams.from_prompts(prompts, decoder.num_results, jnp.float32(-jnp.inf)),
        done=prompts.lengths >= prompts.limits,
        cache=cache,
    )
    return jax.lax.while_loop(lambda state: ~jnp.all(state.done), advance, first).ended


def _score_tokens(
    decoder: BeamSearch, extend: ExtendFn, state: _State, prompts: PromptRows
) -> tuple[Any, jax.Array, jax.Array]:
    """Run the model on the newest tokens of the open beams.

    Returns:
      The cache; the log-probabilities of all next tokens `[batch, beam, vocab]` under the model;
      and the log-probabilities after the processors, by which the search ranks.
    """
    column, shape = state.column, state.open.ids.shape
    ids = state.open.ids.reshape(-1, shape[-1])
    before = jax.lax.dynamic_slice_in_dim(ids, column - 1, 1, axis=1)
    cache, logits = extend(state.cache, before, column - 1)
    logits = logits[:, -1].astype(jnp.float32)
    log_probs = gains = jax.nn.log_softmax(logits)
    processors = decoder.all_processors()
    if processors:
        so_far = RowsSoFar(ids, jnp.repeat(prompts.lengths, decoder.beam_size), column)
        if decoder.renormalize:
            processed = process_logits(processors, logits, so_far)
            # Processors may exclude every token of a beam.
            is_dead = jnp.all(processed == -jnp.inf, axis=-1, keepdims=True)
            gains = jnp.where(is_dead, -jnp.inf, jax.nn.log_softmax(processed))
        else:
            gains = process_logits(processors, log_probs, so_far)
    return cache, log_probs.reshape(*shape[:2], -1), gains.reshape(*shape[:2], -1)


def _most_likely(gains: jax.Array, count: int | None) -> jax.Array:
    """Return True for the `count` most likely tokens of each beam, bool `[batch, beam, vocab]`."""
    if count is None or count >= gains.shape[-1]:
        return jnp.ones(gains.shape, bool)
    _, places = jax.lax.top_k(gains, count)
    counts = jnp.zeros(gains.shape, jnp.int32)
    return jnp.put_along_axis(counts, places, 1, axis=-1, inplace=False) > 0


def _best_of(kept: _Beams, new: _Beams) -> _Beams:
    """Return the n best beams of both, best first; n is the number of beams in `kept`."""
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), kept, new)
    _, places = jax.lax.top_k(both.scores, kept.scores.shape[1])
    return both.take(places)


def _where(condition: jax.Array, a: _Beams, b: _Beams) -> _Beams:
    """Return `a` in rows where the condition `[batch, 1]` is true, and `b` in the others."""

    def choose(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(condition.reshape(len(a), *[1] * (a.ndim - 1)), a, b)

    return jax.tree.map(choose, a, b)
