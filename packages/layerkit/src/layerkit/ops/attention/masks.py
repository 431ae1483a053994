"""Attention masks as positions and segments instead of arrays of booleans.

A boolean mask `[batch, queries, keys]` grows with the square of the length, and fused attention
kernels need only positions, segments and whether the mask is causal. `AttentionMask` holds these;
`dense()` returns the booleans for other backends.

True means "may attend". Segment ids number the documents packed in a row from 1; 0 is padding.
Padding attends padding and nothing else, so every softmax has at least one key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from layerkit.config.checks import check_sizes, require

# Half of float32's range: the difference of two such logits cannot overflow.
MASKED_LOGIT = -0.5 * float(jnp.finfo(jnp.float32).max)


@struct.dataclass
class AttentionMask:
    """An attention mask: a pytree of positions and segments with static options.

    A query may attend a key if all of these hold: both are in the same segment; with `causal`, the
    position of the key is not greater than that of the query, or its end in `query_ends`, or the
    key is in the prefix; with a window, the key is less than `window` away. Positions are compared
    only within a segment, so they may count from the start of the row, as in the class methods, or
    of each segment.

    Attributes:
      query_positions: int32 `[batch, queries]`.
      key_positions: int32 `[batch, keys]`.
      query_segments: int32 `[batch, queries]`, or None for a single segment without padding. See
        `segments_are_runs`.
      key_segments: int32 `[batch, keys]`; None if `query_segments` is None.
      key_in_prefix: bool `[batch, keys]`, True for keys that all queries attend although the mask
        is causal (prefix language models; Raffel et al., 2020, arXiv:1910.10683); None for no
        prefix.
      query_ends: int32 `[batch, queries]`, the last position that each query may attend although
        the mask is causal, such as the end of its image; None for its own position.
      causal: True to hide keys at later positions.
      window: Distance from which keys are hidden: a query attends itself, the window - 1 keys
        before it and, if not causal, as many after it (sliding window; Beltagy et al., 2020,
        arXiv:2004.05150). None for no window.
      in_row_order: True if positions count the tokens of each row from its start, and query i and
        key i are the same token. Fused kernels support only such positions.
      segments_are_runs: False if padding or another segment may split a segment. The backend
        `tokamax` requires True, and gives NaN in rows where a segment is split nevertheless.
      chunk: Number of positions of the chunks of `split_chunks`; None for none. It has no effect,
        since chunks are segments, but on counts of FLOPs.
      num_ahead: Largest number of tokens after a query that it sees by `look_ahead` in rows in
        order; 0 for none, or for other rows.
    """

    query_positions: jax.Array
    key_positions: jax.Array
    query_segments: jax.Array | None = None
    key_segments: jax.Array | None = None
    key_in_prefix: jax.Array | None = None
    query_ends: jax.Array | None = None
    causal: bool = struct.field(pytree_node=False, default=False)
    window: int | None = struct.field(pytree_node=False, default=None)
    in_row_order: bool = struct.field(pytree_node=False, default=False)
    segments_are_runs: bool = struct.field(pytree_node=False, default=True)
    chunk: int | None = struct.field(pytree_node=False, default=None)
    num_ahead: int = struct.field(pytree_node=False, default=0)

    @property
    def reach(self) -> tuple[int, int] | None:
        """Largest numbers of tokens before and after a query that it may see.

        None if the mask has no window, or if tokens may be in another order than positions.
        """
        if self.window is None or not (self.in_row_order or self.num_ahead):
            return None
        sees_later = not self.causal or self.reads_ahead
        return self.window - 1, self.num_ahead + (self.window - 1 if sees_later else 0)

    @classmethod
    def causal_mask(
        cls,
        batch: int,
        length: int,
        *,
        segment_ids: jax.Array | None = None,
        in_prefix: jax.Array | None = None,
        query_ends: jax.Array | None = None,
        segments_are_runs: bool = True,
    ) -> AttentionMask:
        """Return the mask of causal self-attention, as in a decoder.

        Args:
          batch: Number of rows.
          length: Tokens per row.
          segment_ids: int32 `[batch, length]`, the documents of packed rows; 0 is padding. See
            `segments_from_paddings` for rows of one document.
          in_prefix: bool `[batch, length]`, True for tokens that all tokens of their document
            attend, including earlier ones; see `first_tokens` for rows of one document.
          query_ends: int32 `[batch, length]`, the last position in the row that each token attends
            within its document; earlier ones than its own have no effect.
          segments_are_runs: False if padding or another document may split a document.

        Raises:
          ConfigError: Segment ids, prefix or ends have the wrong shape.
        """
        mask = cls.bidirectional_mask(
            batch, length, segment_ids=segment_ids, segments_are_runs=segments_are_runs
        )
        _check_shape((batch, length), in_prefix=in_prefix, query_ends=query_ends)
        return dataclasses.replace(
            mask, causal=True, key_in_prefix=in_prefix, query_ends=query_ends
        )

    @classmethod
    def bidirectional_mask(
        cls,
        batch: int,
        length: int,
        *,
        segment_ids: jax.Array | None = None,
        segments_are_runs: bool = True,
    ) -> AttentionMask:
        """Return the mask of self-attention within segments, as in an encoder.

        Args:
          batch: Number of rows.
          length: Tokens per row.
          segment_ids: int32 `[batch, length]`; see `causal_mask`.
          segments_are_runs: See `causal_mask`.

        Raises:
          ConfigError: Segment ids have the wrong shape.
        """
        _check_shape((batch, length), segment_ids=segment_ids)
        positions = row_positions(batch, length)
        return cls(
            positions,
            positions,
            segment_ids,
            segment_ids,
            in_row_order=True,
            segments_are_runs=segment_ids is None or segments_are_runs,
        )

    @classmethod
    def cross_mask(
        cls,
        batch: int,
        num_queries: int,
        num_keys: int,
        *,
        query_segments: jax.Array | None = None,
        key_segments: jax.Array | None = None,
    ) -> AttentionMask:
        """Return the mask of attention to another sequence, such as that of an encoder.

        Args:
          batch: Number of rows.
          num_queries: Queries per row.
          num_keys: Keys per row.
          query_segments: int32 `[batch, num_queries]`, document of `key_segments` that each query
            attends; None for document 1, as in `segments_from_paddings`.
          key_segments: int32 `[batch, num_keys]`, documents of the keys; 0 is padding. None for a
            single document without padding.

        Raises:
          ConfigError: Segments have the wrong shape, or only the queries have segments.
        """
        if key_segments is not None and query_segments is None:
            query_segments = jnp.ones((batch, num_queries), jnp.int32)
        _check_shape((batch, num_queries), query_segments=query_segments)
        _check_shape((batch, num_keys), key_segments=key_segments)
        queries, keys = row_positions(batch, num_queries), row_positions(batch, num_keys)
        return cls(queries, keys, query_segments, key_segments)

    @classmethod
    def decoding_mask(
        cls,
        batch: int,
        num_queries: int,
        max_length: int,
        *,
        time_step: int | jax.Array,
        query_ends: jax.Array | None = None,
    ) -> AttentionMask:
        """Return the mask of causal attention from the newest tokens to a cache.

        Query i is at position time_step + i and may attend the slots up to that position. Later
        slots are still empty and hidden.

        Args:
          batch: Number of rows.
          num_queries: Newest tokens per row.
          max_length: Number of slots of the cache.
          time_step: Number of tokens in the cache before these; an integer, an int32 scalar, or
            `[batch]`.
          query_ends: int32 `[batch, num_queries]`, the last slot that each query attends, which
            must be filled; None for that of the query.
        """
        start = jnp.broadcast_to(jnp.asarray(time_step, jnp.int32), (batch,))
        return cls(
            query_positions=start[:, None] + jnp.arange(num_queries, dtype=jnp.int32),
            key_positions=row_positions(batch, max_length),
            query_ends=query_ends,
            causal=True,
        )

    @classmethod
    def streaming_mask(
        cls, batch: int, num_queries: int, num_keys: int, *, time_step: int | jax.Array
    ) -> AttentionMask:
        """Return the mask of causal attention from the newest tokens to the last `num_keys`.

        Args:
          batch: Number of rows.
          num_queries: Newest tokens per row, which are the last keys.
          num_keys: Number of keys; those before position 0 are hidden.
          time_step: Number of tokens before the newest; an integer or an int32 scalar.
        """
        first = time_step + num_queries - num_keys
        queries = time_step + row_positions(batch, num_queries)
        keys = first + row_positions(batch, num_keys)
        is_token = (keys >= 0).astype(jnp.int32)
        return cls(queries, keys, jnp.ones_like(queries), is_token, causal=True)

    @classmethod
    def sample_mask(
        cls,
        batch: int,
        num_prompt_slots: int,
        num_slots: int,
        *,
        time_step: jax.Array,
        query_ends: jax.Array | None = None,
    ) -> AttentionMask:
        """Return the mask of causal attention from a new token to a prompt and the last tokens.

        Keys are the slots of a prompt, then those of the row, which holds the token of position p
        in slot p modulo `num_slots`. Those of the row replace the slots of their positions.

        Args:
          batch: Number of rows.
          num_prompt_slots: Number of slots of a prompt, which begin at position 0.
          num_slots: Number of slots of a row, which hold its last tokens, the new one included.
          time_step: Position of the new token, int32 scalar.
          query_ends: int32 `[batch, 1]`, the last position that each token attends; None for its
            own.
        """
        slots = row_positions(1, num_prompt_slots)
        last = time_step - (time_step - row_positions(1, num_slots)) % num_slots
        is_read = [(slots <= time_step - num_slots) | (slots > time_step), last >= 0]
        keys, is_key = (
            jnp.broadcast_to(jnp.concatenate(parts, axis=1), (batch, num_prompt_slots + num_slots))
            for parts in ([slots, last], is_read)
        )
        queries = time_step + row_positions(batch, 1)
        segments = jnp.ones_like(queries), is_key.astype(jnp.int32)
        return cls(queries, keys, *segments, query_ends=query_ends, causal=True)

    def within(self, window: int | None) -> AttentionMask:
        """Return this mask, narrowed to a window; None returns the mask unchanged.

        Raises:
          ConfigError: The window is below 1, so that a query would not attend itself.
        """
        check_sizes(None, window=window)
        if window is None:
            return self
        narrower = window if self.window is None else min(window, self.window)
        return dataclasses.replace(self, window=narrower)

    def split_chunks(self, size: int | None, positions: jax.Array | None = None) -> AttentionMask:
        """Return this mask, narrowed to pairs in one chunk; None returns the mask unchanged.

        Chunks of a segment are segments here, which every backend supports. The window, which
        hides nothing more, lets fused kernels skip blocks.

        Args:
          size: Number of positions per chunk, counted from position 0.
          positions: int32 `[batch, tokens]`, positions from the start of each segment, if queries
            and keys are the same tokens; None for the positions of the mask.

        Raises:
          ConfigError: The size is below 1.
        """
        check_sizes(None, chunk=size)
        if size is None:
            return self
        # Consecutive positions of a row reach fewer chunks.
        most = max(self.query_positions.shape[1], self.key_positions.shape[1]) // size + 2

        def split(segments: jax.Array | None, own: jax.Array) -> jax.Array:
            chunks = (own if positions is None else positions) // size
            if segments is None:
                return chunks + 1
            return jnp.where(segments == 0, 0, segments * most + chunks % most)

        return dataclasses.replace(
            self.within(size),
            query_segments=split(self.query_segments, self.query_positions),
            key_segments=split(self.key_segments, self.key_positions),
            chunk=size,
        )

    def look_ahead(self, size: int | None, positions: jax.Array | None = None) -> AttentionMask:
        """Return this causal mask, in which a query sees all keys up to the end of its chunk.

        A window counts from there, so that all queries of a chunk see the same keys, as in
        streaming by chunks. None and 1 return the mask unchanged.

        Args:
          size: Number of positions per chunk, counted from position 0.
          positions: int32 `[batch, queries]`, positions from the start of each segment; None for
            those of the mask.

        Raises:
          ConfigError: The size is below 1, or the mask is not causal.
        """
        check_sizes(None, look_ahead=size)
        if size is None or size == 1:
            return self
        require(self.causal, "AttentionMask", "look_ahead", size, "None without a causal mask")
        positions = self.query_positions if positions is None else positions
        ends = self.query_positions + size - 1 - positions % size
        changes: dict[str, Any] = {"query_positions": ends}
        if self.in_row_order:
            changes["num_ahead"] = size - 1
        else:  # The slots of a cache after the queries are not written yet.
            is_written = self.key_positions <= self.query_positions[:, -1:]
            segments = 1 if self.key_segments is None else self.key_segments
            changes["key_segments"] = jnp.where(is_written, segments, -1)
            if self.query_segments is None:
                changes["query_segments"] = jnp.ones_like(self.query_positions)
        return dataclasses.replace(self, in_row_order=False, **changes)

    def part(self, queries: slice, keys: slice) -> AttentionMask:
        """Return the mask of some of the queries and keys of each row.

        Positions keep counting from the start of the row. Query i and key i of the result may be
        different tokens, so it is not `in_row_order`.
        """
        return dataclasses.replace(
            self,
            **{name: x[:, queries] for name, x in self.query_arrays().items()},
            **{name: x[:, keys] for name, x in self.key_arrays().items()},
            in_row_order=False,
            num_ahead=0,
        )

    def query_arrays(self) -> dict[str, Any]:
        """Return the arrays `[batch, queries]` by field, without fields that are None."""
        return self._arrays("query_positions", "query_segments", "query_ends")

    def key_arrays(self) -> dict[str, Any]:
        """Return the arrays `[batch, keys]` by field, without fields that are None."""
        return self._arrays("key_positions", "key_segments", "key_in_prefix")

    def _arrays(self, *names: str) -> dict[str, Any]:
        return {name: x for name in names if (x := getattr(self, name)) is not None}

    @property
    def reads_ahead(self) -> bool:
        """True if queries attend later keys although the mask is causal."""
        return self.key_in_prefix is not None or self.query_ends is not None

    def distinct_positions(self) -> tuple[jax.Array, jax.Array]:
        """Return the positions of queries and keys, `[1, …]` if all rows have the same ones.

        Arrays that are computed from them, such as a bias, then have the size of one row.
        """
        if self.in_row_order:
            return self.query_positions[:1], self.key_positions[:1]
        return self.query_positions, self.key_positions

    def dense(self) -> jax.Array:
        """Return the mask as booleans `[batch, 1, queries, keys]`; axis 1 stands for the heads.

        Raises:
          ConfigError: One of `query_segments` and `key_segments` is None.
        """
        has_both = (self.query_segments is None) == (self.key_segments is None)
        require(has_both, "AttentionMask", "segments of one side", None, "query and key segments")
        queries, keys = self.query_positions[:, :, None], self.key_positions[:, None, :]
        if self.causal:
            allowed = keys <= queries
            if self.query_ends is not None:
                allowed |= keys <= self.query_ends[:, :, None]
            if self.key_in_prefix is not None:
                allowed |= self.key_in_prefix[:, None, :]
        else:
            allowed = jnp.ones(jnp.broadcast_shapes(queries.shape, keys.shape), bool)
        if self.window is not None:
            allowed &= jnp.abs(queries - keys) < self.window
        if self.query_segments is not None and self.key_segments is not None:
            allowed &= self.query_segments[:, :, None] == self.key_segments[:, None, :]
        return allowed[:, None]


def count_visible_pairs(length: int, reach: tuple[int, int], chunk: int | None = None) -> int:
    """Return the number of pairs of tokens in a row that a window and chunks show.

    Args:
      length: Tokens of the row.
      reach: Numbers of tokens before and after a query that it sees; see `AttentionMask.reach`.
      chunk: Number of tokens of a chunk, counted from the start of the row; None for none.
    """
    if chunk is not None:
        num_chunks, rest = divmod(length, chunk)
        return num_chunks * count_visible_pairs(chunk, reach) + count_visible_pairs(rest, reach)
    sides = [min(side, length - 1) for side in reach]
    return length * (sum(sides) + 1) - sum(side * (side + 1) // 2 for side in sides)


def first_tokens(lengths: jax.Array, num_tokens: int) -> jax.Array:
    """Return bool `[batch, tokens]`, True for the first `lengths` (`[batch]`) of each row."""
    return jnp.arange(num_tokens) < lengths[:, None]


def segments_from_paddings(paddings: jax.Array) -> jax.Array:
    """Return the segment ids of rows that contain one document each.

    Args:
      paddings: `[batch, length]`, 1 for padding and 0 for tokens.

    Returns:
      int32 `[batch, length]`, 0 for padding and 1 for tokens.
    """
    return (paddings == 0).astype(jnp.int32)


def read_segments(batch: Mapping[str, Any]) -> tuple[jax.Array | None, bool]:
    """Return the segment ids int32 `[batch, length]` of a batch, and whether they are runs.

    Args:
      batch: `segment_ids` `[batch, length]`, which are runs of tokens, or `paddings` `[batch,
        length]` of rows of one document, which may be between tokens. Without both, the ids are
        None.
    """
    if "segment_ids" in batch:
        return batch["segment_ids"], True
    if "paddings" in batch:
        return segments_from_paddings(batch["paddings"]), False
    return None, True


def row_positions(batch: int, length: int) -> jax.Array:
    """Return positions counted from the start of each row, int32 `[batch, length]`."""
    return jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))


def _check_shape(expected: tuple[int, int], **arrays: jax.Array | None) -> None:
    for name, array in arrays.items():
        is_valid = array is None or array.shape == expected
        shape = None if array is None else list(array.shape)
        require(is_valid, None, f"shape of {name}", shape, f"[batch, length] = {list(expected)}")
