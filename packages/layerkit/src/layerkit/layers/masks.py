"""Which query may attend which key, kept as a description rather than an array of booleans.

A mask of `[batch, queries, keys]` grows with the square of the length, and a fused attention kernel
does not want it: it asks whether the mask is causal, and where segments begin and end.
`AttentionMask` holds that much; `dense()` writes the booleans out for backends that do want them.

There is one convention: True means "may attend". Segment ids count the documents packed in a row
from 1; 0 is padding. Padding attends padding and nothing else, so that no row is empty and no
softmax is taken over nothing.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class AttentionMask:
    """Positions and segments of queries and keys; a pytree, the other fields static.

    A query may attend a key when both are in the same segment (where there are segments), the key's
    position is not greater than the query's or the key is in the prefix, if causal, and less than
    `window` away, if there is a window. Positions are compared only within a segment, so positions
    in the row, which the class methods use, and positions that start anew with each segment
    describe the same mask.

    Attributes:
      query_positions: int32 `[batch, queries]`.
      key_positions: int32 `[batch, keys]`.
      query_segments: int32 `[batch, queries]`, or None for a single segment without padding.
      key_segments: int32 `[batch, keys]`, or None, together with `query_segments`.
      key_in_prefix: bool `[batch, keys]`, which keys all queries see although the mask is causal
        (prefix language models; Raffel et al., 2020, arXiv:1910.10683); None for no prefix.
      causal: Whether keys at later positions are hidden.
      window: A query sees keys less than this many positions away: itself and the window - 1
        before it, and as many after it if not causal (sliding window; Beltagy et al., 2020,
        arXiv:2004.05150). None for all.
      in_row_order: Whether positions are known to count each row's tokens from its start, and
        query i and key i to be one token; fused kernels know no other positions.
    """

    query_positions: jax.Array
    key_positions: jax.Array
    query_segments: jax.Array | None = None
    key_segments: jax.Array | None = None
    key_in_prefix: jax.Array | None = None
    causal: bool = struct.field(pytree_node=False, default=False)
    window: int | None = struct.field(pytree_node=False, default=None)
    in_row_order: bool = struct.field(pytree_node=False, default=False)

    @classmethod
    def causal_mask(
        cls,
        batch: int,
        length: int,
        *,
        segment_ids: jax.Array | None = None,
        in_prefix: jax.Array | None = None,
    ) -> AttentionMask:
        """Self-attention to what came before, as in a decoder.

        Args:
          batch: Number of rows.
          length: Tokens per row.
          segment_ids: int32 `[batch, length]`, the documents of packed rows; 0 is padding. See
            `segments_from_paddings` for rows of one document.
          in_prefix: bool `[batch, length]`, which tokens the whole of their document sees, those
            before them as well; see `first_tokens` for rows of one document.

        Raises:
          ValueError: segment ids or a prefix of another shape.
        """
        mask = cls._self_attention(batch, length, segment_ids, causal=True)
        if in_prefix is not None and in_prefix.shape != (batch, length):
            raise ValueError(
                f"in_prefix of shape {in_prefix.shape}, expected [batch, length] ="
                f" {(batch, length)}"
            )
        return dataclasses.replace(mask, key_in_prefix=in_prefix)

    @classmethod
    def bidirectional_mask(
        cls, batch: int, length: int, *, segment_ids: jax.Array | None = None
    ) -> AttentionMask:
        """Self-attention to everything in the same segment, as in an encoder.

        Args:
          batch: Number of rows.
          length: Tokens per row.
          segment_ids: int32 `[batch, length]`, as for `causal_mask`.

        Raises:
          ValueError: segment ids of another shape.
        """
        return cls._self_attention(batch, length, segment_ids, causal=False)

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
        """Attention to another sequence, such as that of an encoder.

        Args:
          batch: Number of rows.
          num_queries: Tokens per row that read.
          num_keys: Tokens per row that are read.
          query_segments: int32 `[batch, num_queries]`, which document of `key_segments` each query
            reads; None for 1, the one document of `segments_from_paddings`.
          key_segments: int32 `[batch, num_keys]`, the documents to be read; 0 is padding. None for
            a single one without padding.

        Raises:
          ValueError: segments of another shape, or of queries alone.
        """
        if key_segments is None and query_segments is not None:
            raise ValueError("query_segments are set without the key_segments that they refer to")
        if key_segments is not None and query_segments is None:
            query_segments = jnp.ones((batch, num_queries), jnp.int32)
        for name, segments, length in (
            ("query_segments", query_segments, num_queries),
            ("key_segments", key_segments, num_keys),
        ):
            if segments is not None and segments.shape != (batch, length):
                raise ValueError(f"{name} of shape {segments.shape}, expected {(batch, length)}")
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
        prefix_lengths: jax.Array | None = None,
    ) -> AttentionMask:
        """Causal attention of the newest tokens to a cache, each token at its own slot.

        Query i stands at time_step + i and may attend the slots up to its own; the later ones,
        which hold nothing yet, are hidden.

        Args:
          batch: Number of rows.
          num_queries: Newest tokens per row.
          max_length: Slots of the cache.
          time_step: Tokens that the cache held before; an integer, an int32 scalar, or `[batch]`.
          prefix_lengths: int32 `[batch]`, how many slots from 0 on every query sees, in a prefix
            language model; the first queries must be enough to fill them.
        """
        start = jnp.broadcast_to(jnp.asarray(time_step, jnp.int32), (batch,))
        return cls(
            query_positions=start[:, None] + jnp.arange(num_queries, dtype=jnp.int32),
            key_positions=row_positions(batch, max_length),
            key_in_prefix=(
                None if prefix_lengths is None else first_tokens(prefix_lengths, max_length)
            ),
            causal=True,
        )

    @classmethod
    def _self_attention(
        cls, batch: int, length: int, segments: jax.Array | None, *, causal: bool
    ) -> AttentionMask:
        if segments is not None and segments.shape != (batch, length):
            raise ValueError(
                f"segment_ids of shape {segments.shape}, expected [batch, length] ="
                f" {(batch, length)}"
            )
        positions = row_positions(batch, length)
        return cls(positions, positions, segments, segments, causal=causal, in_row_order=True)

    def within(self, window: int | None) -> AttentionMask:
        """This mask, narrowed to a window; None leaves it as it is.

        Raises:
          ValueError: a window below 1, in which a query would not even see itself.
        """
        if window is None:
            return self
        if window < 1:
            raise ValueError(f"window={window} must be at least 1, a query's own position")
        narrower = window if self.window is None else min(window, self.window)
        return dataclasses.replace(self, window=narrower)

    def distinct_positions(self) -> tuple[jax.Array, jax.Array]:
        """Positions of queries and of keys, `[1, …]` where all rows are known to be alike.

        What is computed from them, such as a bias, is then no larger than one row needs.
        """
        if self.in_row_order:
            return self.query_positions[:1], self.key_positions[:1]
        return self.query_positions, self.key_positions

    def dense(self) -> jax.Array:
        """The mask as booleans `[batch, 1, queries, keys]`; the axis of size 1 is for the heads.

        Raises:
          ValueError: segments of queries without those of keys, or the other way round.
        """
        if (self.query_segments is None) != (self.key_segments is None):
            raise ValueError("query_segments and key_segments must both be set, or neither")
        queries, keys = self.query_positions[:, :, None], self.key_positions[:, None, :]
        if self.causal:
            allowed = keys <= queries
            if self.key_in_prefix is not None:
                allowed |= self.key_in_prefix[:, None, :]
        else:
            allowed = jnp.ones(jnp.broadcast_shapes(queries.shape, keys.shape), bool)
        if self.window is not None:
            allowed &= jnp.abs(queries - keys) < self.window
        if self.query_segments is not None and self.key_segments is not None:
            allowed &= self.query_segments[:, :, None] == self.key_segments[:, None, :]
        return allowed[:, None]


def first_tokens(lengths: jax.Array, num_tokens: int) -> jax.Array:
    """Which tokens of each row are its first `lengths` (`[batch]`): bool `[batch, tokens]`."""
    return jnp.arange(num_tokens) < lengths[:, None]


def segments_from_paddings(paddings: jax.Array) -> jax.Array:
    """Segment ids of rows that hold one document each.

    Args:
      paddings: `[batch, length]`, 1 where there is padding and 0 where there is a token.

    Returns:
      int32 `[batch, length]`, 0 where there is padding and 1 where there is a token.
    """
    return (paddings == 0).astype(jnp.int32)


def row_positions(batch: int, length: int) -> jax.Array:
    """Positions counted from the start of each row, int32 `[batch, length]`."""
    return jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
