"""Biases of the logits that tell how far a key is from the query: learned in buckets, or linear.

Both take positions of queries and of keys and give a float32 bias `[batch or 1, heads, queries,
keys]`, which attention adds to the scaled logits. Where all rows count their positions alike, one
row of positions is enough, and the bias is as large as one row of logits rather than a batch.

Distances of documents that are packed in one row come out right, since within a document positions
in the row and positions in the document differ by a constant.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from layerkit.base_layer import BaseLayer
from layerkit.checks import check_sizes
from layerkit.weights import WeightHParams, WeightInit


class RelativeBias(BaseLayer):
    """A learned bias for each head and bucket of distances.

    Half of the buckets hold one distance each; the others grow as its logarithm, and the last holds
    everything from max_distance on. Source: Raffel et al., 2020 (T5, arXiv:1910.10683).

    Attributes:
      num_heads: Query heads.
      num_buckets: How many; even if bidirectional.
      max_distance: The distance from which on all are alike.
      bidirectional: Gives keys after the query buckets of their own, half of them all (encoders);
        otherwise these share the bucket of distance 0, since they are masked (decoders).
      weight_axes: Logical axes of `w` `[num_buckets, num_heads]`.
      weight_init: How `w` starts; None inherits `params_init`.

    Raises:
      ValueError: buckets or a distance too few for the logarithm.
    """

    num_heads: int = 0
    num_buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = False
    weight_axes: tuple[str | None, ...] = (None, "heads")
    weight_init: WeightInit | None = None

    def setup(self) -> None:
        check_sizes(self, num_heads=self.num_heads, num_buckets=self.num_buckets)
        self._check_buckets()
        shape = (self.num_buckets, self.num_heads)
        weight = WeightHParams(shape, axes=self.weight_axes, init=self.weight_init)
        self.create_variable("w", weight)

    def fprop(self, query_positions: jax.Array, key_positions: jax.Array) -> jax.Array:
        """The bias of every pair.

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
        return _laid_out(self, bias)

    def _check_buckets(self) -> None:
        one_side = self.num_buckets // 2 if self.bidirectional else self.num_buckets
        fewest = 4 if self.bidirectional else 2
        if self.num_buckets < fewest or (self.bidirectional and self.num_buckets % 2):
            raise ValueError(
                f"{self.path_name}: num_buckets={self.num_buckets} with"
                f" bidirectional={self.bidirectional}, expected"
                f" {'an even number of ' if self.bidirectional else ''}at least {fewest}"
            )
        if self.max_distance <= one_side // 2:
            raise ValueError(
                f"{self.path_name}: max_distance={self.max_distance} must be more than"
                f" {one_side // 2}, the distances that num_buckets={self.num_buckets} gives a"
                " bucket each"
            )


def relative_buckets(
    distances: jax.Array, *, num_buckets: int, max_distance: int, bidirectional: bool
) -> jax.Array:
    """The bucket of each distance, key position - query position.

    Args:
      distances: Integers `[...]`.
      num_buckets: How many there are.
      max_distance: From which on all are alike.
      bidirectional: Whether positive distances have buckets of their own.

    Returns:
      int32 `[...]` in [0, num_buckets).
    """
    # Borders are set once, on the host: a logarithm rounded otherwise by another device or compiler
    # would move them.
    one_side = num_buckets // 2 if bidirectional else num_buckets
    table = jnp.asarray(_buckets_of_one_side(one_side, max_distance))
    if not bidirectional:
        return table[jnp.clip(-distances, 0, max_distance)]
    later = jnp.where(distances > 0, one_side, 0)
    return table[jnp.clip(jnp.abs(distances), 0, max_distance)] + later


def _buckets_of_one_side(num_buckets: int, max_distance: int) -> np.ndarray:
    """int32 `[max_distance + 1]`: the bucket of each distance of one sign."""
    exact = num_buckets // 2
    # float32 as in the reference code, whose borders published weights were trained with.
    distances = np.arange(max_distance + 1, dtype=np.float32)
    logarithms = np.log(np.maximum(distances, 1) / np.float32(exact))
    per_octave = np.float32(math.log(max_distance / exact))
    growing = exact + (logarithms / per_octave * np.float32(num_buckets - exact)).astype(np.int32)
    buckets = np.where(distances < exact, distances, np.minimum(growing, num_buckets - 1))
    return buckets.astype(np.int32)


class Alibi(BaseLayer):
    """-slope·|query position - key position|, one slope per head; without weights.

    Source: Press et al., 2022 (arXiv:2108.12409).

    Attributes:
      num_heads: Query heads.
    """

    num_heads: int = 0

    def setup(self) -> None:
        check_sizes(self, num_heads=self.num_heads)

    def fprop(self, query_positions: jax.Array, key_positions: jax.Array) -> jax.Array:
        """The bias of every pair.

        Args:
          query_positions: int32 `[batch or 1, queries]`.
          key_positions: int32 `[batch or 1, keys]`.

        Returns:
          float32 `[batch or 1, heads, queries, keys]`.
        """
        distances = jnp.abs(key_positions[:, None, :] - query_positions[:, :, None])
        slopes = jnp.asarray(alibi_slopes(self.num_heads))[:, None, None]
        bias = -slopes * distances[:, None].astype(jnp.float32)
        return _laid_out(self, bias)


def add_relative_bias(
    layer: Any, bias: jax.Array | None, query_positions: jax.Array, key_positions: jax.Array
) -> jax.Array | None:
    """A bias that was handed in, and that of the layer's child `relative_bias`, if it has one.

    Args:
      layer: With a field `relative_bias_tpl`, the template of that child.
      bias: float32 `[batch or 1, heads or 1, queries, keys]`.
      query_positions: int32 `[batch or 1, queries]`.
      key_positions: int32 `[batch or 1, keys]`.

    Returns:
      float32 `[batch or 1, heads, queries, keys]`; None where there is neither.
    """
    if layer.relative_bias_tpl is None:
        return bias
    own: jax.Array = layer.relative_bias(query_positions, key_positions)
    return own if bias is None else own + bias


def _laid_out(layer: BaseLayer, bias: jax.Array) -> jax.Array:
    rows = "batch" if bias.shape[0] > 1 else None
    return layer.constrain(bias, rows, "act_heads", "length", None)


def alibi_slopes(num_heads: int) -> np.ndarray:
    """float32 `[heads]`: 2^(-8·1/n), 2^(-8·2/n), … for a power of two n.

    For other numbers the slopes of the power of two below, then every other one of those of the
    power above, as in the paper's code.
    """

    def of_power(n: int) -> list[float]:
        return [2.0 ** (-8.0 * (head + 1) / n) for head in range(n)]

    below = 2 ** math.floor(math.log2(num_heads))
    between = of_power(2 * below)[::2][: num_heads - below]
    return np.asarray(of_power(below) + between, np.float32)
