"""Which query may attend which key, kept as a description rather than an array of booleans.

A mask of `[batch, queries, keys]` grows with the square of the length, and a fused attention kernel
does not want it: it asks whether the mask is causal, and where segments begin and end.
`AttentionMask` holds that much; `dense()` writes the booleans out for backends that do want them.

There is one convention: True means "may attend". Segment ids count the documents packed in a row
from 1; 0 is padding. Padding attends padding and nothing else, so that no row is empty and no
softmax is taken over nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class AttentionMask:
    """Positions and segments of queries and keys; a pytree, with `causal` static.

    A query may attend a key when both are in the same segment (where there are segments) and, if
    causal, the key's position is not greater than the query's. Positions are compared only within
    a segment, so positions in the row, which the class methods use, and positions that start anew
    with each segment describe the same mask.

    Attributes:
      query_positions: int32 `[batch, queries]`.
      key_positions: int32 `[batch, keys]`.
      query_segments: int32 `[batch, queries]`, or None for a single segment without padding.
      key_segments: int32 `[batch, keys]`, or None, together with `query_segments`.
      causal: Whether keys at later positions are hidden.
    """

    query_positions: jax.Array
    key_positions: jax.Array
    query_segments: jax.Array | None = None
    key_segments: jax.Array | None = None
    causal: bool = struct.field(pytree_node=False, default=False)

    @classmethod
    def causal_mask(
        cls, batch: int, length: int, *, segment_ids: jax.Array | None = None
    ) -> AttentionMask:
        """Self-attention to what came before, as in a decoder.

        Args:
          batch: Number of rows.
          length: Tokens per row.
          segment_ids: int32 `[batch, length]`, the documents of packed rows; 0 is padding. See
            `segments_from_paddings` for rows of one document.

        Raises:
          ValueError: segment ids of another shape.
        """
        return cls._self_attention(batch, length, segment_ids, causal=True)

    @classmethod
    def bidirectional_mask(
        cls, batch: int, length: int, *, segment_ids: jax.Array | None = None
    ) -> AttentionMask:
        """Self-attention to everything in the same segment, as in an encoder.

        Args:
          batch: Number of rows.
          length: Tokens per row.
          segment_ids: As for `causal_mask`.

        Raises:
          ValueError: segment ids of another shape.
        """
        return cls._self_attention(batch, length, segment_ids, causal=False)

    @classmethod
    def decoding_mask(
        cls, batch: int, num_queries: int, max_length: int, *, time_step: int | jax.Array
    ) -> AttentionMask:
        """Causal attention of the newest tokens to a cache, each token at its own slot.

        Query i stands at time_step + i and may attend the slots up to its own; the later ones,
        which hold nothing yet, are hidden.

        Args:
          batch: Number of rows.
          num_queries: Newest tokens per row.
          max_length: Slots of the cache.
          time_step: Tokens that the cache held before; an integer, an int32 scalar, or `[batch]`.
        """
        start = jnp.broadcast_to(jnp.asarray(time_step, jnp.int32), (batch,))
        return cls(
            query_positions=start[:, None] + jnp.arange(num_queries, dtype=jnp.int32),
            key_positions=row_positions(batch, max_length),
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
        return cls(positions, positions, segments, segments, causal=causal)

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
        else:
            allowed = jnp.ones(jnp.broadcast_shapes(queries.shape, keys.shape), bool)
        if self.query_segments is not None and self.key_segments is not None:
            allowed &= self.query_segments[:, :, None] == self.key_segments[:, None, :]
        return allowed[:, None]


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
