"""Biases of the logits by the distance of query and key: learned in buckets, or linear (ALiBi).

Each layer maps positions of queries and keys to a float32 bias `[batch or 1, heads, queries,
keys]`, which attention adds to the scaled logits. If all rows have the same positions, one row of
positions is enough, and the bias is as large as one row of logits.

Where attention stays within rows in the order of their tokens, the bias is one number per distance;
see `layerkit.ops.attention.distance_bias`.

Distances within documents that are packed in one row are correct, since positions in the row and in
the document differ by a constant.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from layerkit.base.base_layer import BaseLayer
from layerkit.base.weights import WeightHParams, WeightInit
from layerkit.config.checks import check_sizes, require
from layerkit.ops.attention.distance_bias import DistanceBias, LogitBias
from layerkit.ops.attention.masks import AttentionMask


class RelativeBias(BaseLayer):
    """A learned bias for each head and bucket of distances.

    Half of the buckets hold one distance each. The width of the others grows logarithmically, and
    the last one holds all distances from max_distance on. Source: Raffel et al., 2020 (T5,
    arXiv:1910.10683).

    Attributes:
      num_heads: Number of query heads.
      num_buckets: Number of buckets; even if bidirectional.
      max_distance: Smallest distance of the last bucket.
      bidirectional: Reserves half of the buckets for keys after the query (encoders). Otherwise
        these keys share the bucket of distance 0, since they are masked (decoders).
      weight_axes: Logical axes of `w` `[num_buckets, num_heads]`.
      weight_init: Initializer of `w`; None inherits `params_init`.

    Raises:
      ConfigError: The number of buckets or the distance is too small for the logarithm.
    """

    num_heads: int = 0
    num_buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = False
    weight_axes: tuple[str | None, ...] = (None, "heads")
    weight_init: WeightInit | None = None

    def setup(self) -> None:
        """Check the fields and create the weight."""
        check_sizes(self, num_heads=self.num_heads, num_buckets=self.num_buckets)
        self._check_buckets()
        shape = (self.num_buckets, self.num_heads)
        axes, init = self.weight_axes, self.weight_init
        weight = WeightHParams(shape, axes=axes, init=init, decays=False)
        self.create_variable("w", weight)

    def fprop(self, query_positions: jax.Array, key_positions: jax.Array) -> jax.Array:
        """Return the bias of each pair of query and key.

        Args:
          query_positions: int32 `[batch or 1, queries]`.
          key_positions: int32 `[batch or 1, keys]`.

        Returns:
          float32 `[batch or 1, heads, queries, keys]`.
        """
        distances = key_positions[:, None, :] - query_positions[:, :, None]
        buckets = relative_buckets(
            distances,
            num_buckets=self.num_buckets,
            max_distance=self.max_distance,
            bidirectional=self.bidirectional,
        )
        by_head = self.theta.w.astype(jnp.float32).T
        bias = jnp.moveaxis(jnp.take(by_head, buckets, axis=1), 0, 1)
        return _constrain_bias(self, bias)

    def _check_buckets(self) -> None:
        one_side = self.num_buckets // 2 if self.bidirectional else self.num_buckets
        expected = "at least 2 buckets, of an even number if bidirectional, on each side"
        is_valid = one_side >= 2 and not (self.bidirectional and self.num_buckets % 2)
        require(is_valid, self, "num_buckets", self.num_buckets, expected)
        expected = f"more than {one_side // 2}, the number of distances with a bucket each"
        is_valid = self.max_distance > one_side // 2
        require(is_valid, self, "max_distance", self.max_distance, expected)


def relative_buckets(
    distances: jax.Array, *, num_buckets: int, max_distance: int, bidirectional: bool
) -> jax.Array:
    """Return the bucket of each distance, key position - query position.

    Args:
      distances: Integers `[...]`.
      num_buckets: Number of buckets.
      max_distance: Smallest distance of the last bucket.
      bidirectional: True to reserve half of the buckets for positive distances.

    Returns:
      int32 `[...]` in [0, num_buckets).
    """
    # Bucket limits are computed on the host, since a device or compiler that rounds the logarithm
    # differently would move them.
    one_side = num_buckets // 2 if bidirectional else num_buckets
    table = jnp.asarray(_one_sided_buckets(one_side, max_distance))
    if not bidirectional:
        return table[jnp.clip(-distances, 0, max_distance)]
    later = jnp.where(distances > 0, one_side, 0)
    return table[jnp.clip(jnp.abs(distances), 0, max_distance)] + later


def _one_sided_buckets(num_buckets: int, max_distance: int) -> np.ndarray:
    """Return the bucket of each distance of one sign, int32 `[max_distance + 1]`."""
    exact = num_buckets // 2
    # float32 gives the limits of the reference code, with which published weights were trained.
    distances = np.arange(max_distance + 1, dtype=np.float32)
    logarithms = np.log(np.maximum(distances, 1) / np.float32(exact))
    per_octave = np.float32(math.log(max_distance / exact))
    growing = exact + (logarithms / per_octave * np.float32(num_buckets - exact)).astype(np.int32)
    buckets = np.where(distances < exact, distances, np.minimum(growing, num_buckets - 1))
    return buckets.astype(np.int32)


class Alibi(BaseLayer):
    """The bias -slope·|query position - key position|, with a fixed slope per head.

    Source: Press et al., 2022 (arXiv:2108.12409).

    Attributes:
      num_heads: Number of query heads.
    """

    num_heads: int = 0

    def setup(self) -> None:
        """Check the fields."""
        check_sizes(self, num_heads=self.num_heads)

    def fprop(self, query_positions: jax.Array, key_positions: jax.Array) -> jax.Array:
        """Return the bias `[batch or 1, heads, queries, keys]`; see `RelativeBias.fprop`."""
        distances = jnp.abs(key_positions[:, None, :] - query_positions[:, :, None])
        slopes = jnp.asarray(alibi_slopes(self.num_heads))[:, None, None]
        bias = -slopes * distances[:, None].astype(jnp.float32)
        return _constrain_bias(self, bias)


def add_bias_of_rows(layer: Any, bias: LogitBias | None, mask: AttentionMask) -> LogitBias:
    """Return the sum of a bias and of the output of a layer of relative biases, for whole rows.

    Args:
      layer: Layer that maps positions of queries and keys to a bias.
      bias: float32 `[batch or 1, heads or 1, queries, keys]`, a bias by distance, or None.
      mask: Mask of self-attention. Its positions define the distances.

    Returns:
      A bias by distance if `mask` is in row order, the layer is a `RelativeBias` or `Alibi`, and
      `bias` is no array, otherwise float32 `[batch or 1, heads, queries, keys]`.
    """
    # A layer of another class may read the positions themselves.
    is_by_distance = mask.in_row_order and isinstance(layer, RelativeBias | Alibi)
    if not (is_by_distance and (bias is None or isinstance(bias, DistanceBias))):
        dense = bias.dense() if isinstance(bias, DistanceBias) else bias
        by_pair: jax.Array = layer(*mask.distinct_positions())
        return by_pair if dense is None else by_pair + dense
    length = mask.key_positions.shape[1]
    # The last query of a row, in the middle of a row of keys that is nearly twice as long.
    query, keys = jnp.array([[length - 1]]), jnp.arange(2 * length - 1)[None]
    by_distance: jax.Array = layer(query, keys)[:, :, 0]
    # A subclass may learn its slopes.
    relative = DistanceBias(by_distance, is_learned=type(layer) is not Alibi)
    return relative if bias is None else relative.plus(bias)


def _constrain_bias(layer: BaseLayer, bias: jax.Array) -> jax.Array:
    rows = "batch" if bias.shape[0] > 1 else None
    return layer.constrain(bias, rows, "act_heads", "length", None)


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Return the slope of each head, float32 `[heads]`.

    For a number of heads n that is a power of two, the slopes are 2^(-8·1/n), 2^(-8·2/n), … For
    other numbers they are those of the power of two below, followed by every other slope of the
    power above, as in the paper's code.
    """

    def power_of_two_slopes(n: int) -> list[float]:
        return [2.0 ** (-8.0 * (head + 1) / n) for head in range(n)]

    below = 2 ** math.floor(math.log2(num_heads))
    between = power_of_two_slopes(2 * below)[::2][: num_heads - below]
    return np.asarray(power_of_two_slopes(below) + between, np.float32)
