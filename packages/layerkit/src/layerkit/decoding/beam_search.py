"""Beam search: the most likely continuations that following a few at a time finds.

Each prompt has `beam_size` open beams. A step scores every token after every beam; the best of
those that go on are the next beams, and those that end are held against the best ended ones so far.
A row ends a beam with an end token, and all of its beams with the last step that it may take, so
that what is returned always has ended. Scores are sums of log-probabilities over

    ((length + 5) / 5) ** length_norm_alpha

where `length` counts the chosen tokens, with the one that ends (Wu et al., 2016, with the constant
of Praxis). The loop ends when no open beam can come to beat what is kept, which never changes the
result.

The beams of all prompts lie flat in one batch of the model, `[batch · beam_size]`. When a beam
continues another one, its rows of the cache are those of the other: they are gathered within each
prompt, so that prompts split over a mesh stay where they are.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from layerkit.decoding.cache_rows import reorder_rows, repeat_rows
from layerkit.decoding.decoder import Decoder, ExtendFn, Prompts, best_first
from layerkit.decoding.logit_processors import RowsSoFar, id_mask, process_logits
from layerkit.nested_map import NestedMap


class BeamSearch(Decoder):
    """Searches for likely continuations, without random numbers.

    `processors` change what is searched by; the `log_probs` returned are those of the model.

    Attributes:
      beam_size: Beams that are followed at a time.
      num_results: Continuations of each prompt that are returned, best first. Where fewer exist,
        the others have the score -inf and nothing beyond the prompt; so do all of a row that only
        fills up the batch.
      length_norm_alpha: How much longer continuations are favoured; 0 compares plain sums.

    Raises:
      ValueError: no beams, more results than beams, or a negative alpha.
    """

    beam_size: int = 4
    num_results: int = 1
    length_norm_alpha: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beam_size < 1:
            raise ValueError(f"beam_size={self.beam_size} must be at least 1")
        if not 1 <= self.num_results <= self.beam_size:
            raise ValueError(
                f"num_results={self.num_results} must be between 1 and beam_size={self.beam_size}"
            )
        if self.length_norm_alpha < 0:
            raise ValueError(f"length_norm_alpha={self.length_norm_alpha} must not be negative")

    def length_norm(self, length: jax.Array) -> jax.Array:
        """What the scores of `length` `[…]` chosen tokens are divided by, float32 `[…]`."""
        return ((length.astype(jnp.float32) + 5.0) / 5.0) ** self.length_norm_alpha

    def continue_rows(
        self,
        extend: ExtendFn,
        cache: Any,
        prompts: Prompts,
        *,
        cache_axes: Any,
        keys: jax.Array | None,
    ) -> NestedMap:
        del keys
        if cache_axes is None:
            raise ValueError("BeamSearch needs cache_axes; see row_axes")
        kept = _search(
            self, extend, repeat_rows(cache, cache_axes, self.beam_size), prompts, cache_axes
        )
        columns = jnp.arange(prompts.ids.shape[1])
        return best_first(
            NestedMap(
                ids=jnp.where(columns < kept.lengths[..., None], kept.ids, 0),
                lengths=kept.lengths,
                log_probs=kept.log_probs,
                scores=kept.scores,
            )
        )


class _Beams(struct.PyTreeNode):
    """Rows `[batch, n, …]` of the open beams (n = beam_size) or the ended ones (num_results)."""

    ids: jax.Array  # [batch, n, max_length]
    log_probs: jax.Array  # [batch, n, max_length]
    lengths: jax.Array  # [batch, n]
    scores: jax.Array  # [batch, n]; sums of the open, normalised ones of the ended

    @classmethod
    def of_prompts(cls, prompts: Prompts, n: int, scores: jax.Array) -> _Beams:
        ids = jnp.repeat(prompts.ids[:, None], n, axis=1)
        return cls(
            ids=ids,
            log_probs=jnp.zeros(ids.shape, jnp.float32),
            lengths=jnp.repeat(prompts.lengths[:, None], n, axis=1),
            scores=jnp.broadcast_to(scores, ids.shape[:2]),
        )

    def take(self, places: jax.Array) -> _Beams:
        """The rows at `places` `[batch, m]`."""
        pick = jax.vmap(lambda x, places: jnp.take(x, places, axis=0))
        return jax.tree.map(lambda x: pick(x, places), self)

    def append(self, column: jax.Array, token: jax.Array, log_prob: jax.Array) -> _Beams:
        """With tokens `[batch, n]` in `column`."""
        return self.replace(
            ids=self.ids.at[:, :, column].set(token),
            log_probs=self.log_probs.at[:, :, column].set(log_prob),
            lengths=jnp.full_like(self.lengths, column + 1),
        )


class _State(struct.PyTreeNode):
    column: jax.Array  # whose tokens come next
    open: _Beams
    ended: _Beams
    done: jax.Array  # [batch]
    cache: Any


def _search(
    decoder: BeamSearch, extend: ExtendFn, cache: Any, prompts: Prompts, cache_axes: Any
) -> _Beams:
    """The best ended beams `[batch, num_results, …]`, of a cache of `[batch · beam_size]` rows."""
    best_norm = decoder.length_norm(prompts.limits - prompts.lengths)

    def advance(state: _State) -> _State:
        column, is_open = state.column, ~state.done
        in_prompt = column < prompts.lengths
        chooses = (is_open & ~in_prompt)[:, None]
        cache, log_probs, gains = _score_tokens(decoder, extend, state, prompts)
        totals = state.open.scores[..., None] + gains  # [batch, beam, vocab]
        ends = id_mask(decoder.eos_ids, totals.shape[-1], owner="eos_id")
        ends = ends | (column + 1 >= prompts.limits)[:, None, None]

        def best(totals: jax.Array, n: int) -> tuple[_Beams, jax.Array]:
            """The `n` best steps onwards, and the beams that they are taken from."""
            scores, places = jax.lax.top_k(totals.reshape(len(totals), -1), n)
            parents, tokens = jnp.divmod(places, totals.shape[-1])
            chosen = jnp.take_along_axis(log_probs.reshape(len(totals), -1), places, axis=1)
            beams = state.open.take(parents).append(column, tokens, chosen)
            return beams.replace(scores=scores), parents

        going_on, parents = best(jnp.where(ends, -jnp.inf, totals), decoder.beam_size)
        # A row in its prompt stays as it is: its beams already hold the prompt's token.
        parents = jnp.where(chooses, parents, jnp.arange(decoder.beam_size))
        going_on = _where(chooses, going_on, state.open)
        ending, _ = best(jnp.where(ends, totals, -jnp.inf), decoder.num_results)
        norm = decoder.length_norm(column + 1 - prompts.lengths)[:, None]
        ending = ending.replace(scores=jnp.where(chooses, ending.scores / norm, -jnp.inf))
        ended = _best_of(state.ended, ending)
        hope = jnp.max(going_on.scores, axis=1) / best_norm
        return _State(
            column=column + 1,
            open=going_on,
            ended=ended,
            done=state.done | (~in_prompt & (ended.scores[:, -1] >= hope)),
            cache=reorder_rows(cache, cache_axes, parents),
        )

    # Only one beam counts at first, or all of them would be the same.
    is_first = jnp.where(jnp.arange(decoder.beam_size) == 0, 0.0, -jnp.inf)
    first = _State(
        column=prompts.start,
        open=_Beams.of_prompts(prompts, decoder.beam_size, is_first),
        ended=_Beams.of_prompts(prompts, decoder.num_results, jnp.float32(-jnp.inf)),
        done=prompts.lengths >= prompts.limits,
        cache=cache,
    )
    return jax.lax.while_loop(lambda state: ~jnp.all(state.done), advance, first).ended


def _score_tokens(
    decoder: BeamSearch, extend: ExtendFn, state: _State, prompts: Prompts
) -> tuple[Any, jax.Array, jax.Array]:
    """Feeds the newest tokens of the open beams.

    Returns the cache, and of every next token `[batch, beam, vocab]` the log-probability that the
    model gives it and the one to search by.
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
        processed = process_logits(processors, logits, so_far)
        # A beam may have come to where every token is ruled out.
        is_dead = jnp.all(processed == -jnp.inf, axis=-1, keepdims=True)
        gains = jnp.where(is_dead, -jnp.inf, jax.nn.log_softmax(processed))
    return cache, log_probs.reshape(*shape[:2], -1), gains.reshape(*shape[:2], -1)


def _best_of(kept: _Beams, new: _Beams) -> _Beams:
    """The best of both, sorted, as many as were kept."""
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), kept, new)
    scores, places = jax.lax.top_k(both.scores, kept.scores.shape[1])
    return both.take(places).replace(scores=scores)


def _where(condition: jax.Array, a: _Beams, b: _Beams) -> _Beams:
    """`a` in rows of which the condition `[batch, 1]` holds, elsewhere `b`."""

    def choose(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(condition.reshape(len(a), *[1] * (a.ndim - 1)), a, b)

    return jax.tree.map(choose, a, b)
