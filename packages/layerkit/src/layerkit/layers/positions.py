"""Where a token stands in its sequence, told to the model in one of three ways.

`PositionalEmbedding` (sinusoids, `PositionalEmbedding2D` for images) and
`TrainablePositionalEmbedding` (a table) give vectors that are added to the token embeddings;
`RotaryPositionalEmbedding` turns queries and keys inside attention, so that their products depend
on distances alone.

All take the positions as an argument, since only the caller knows them: packed rows start anew with
each segment, and cached decoding starts at the current step. Positions count from 0.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from layerkit.base_layer import BaseLayer
from layerkit.checks import check_integer_arrays, check_last_axis, check_sizes
from layerkit.layers.embeddings import lookup
from layerkit.layers.rotary_scaling import RotaryScaling
from layerkit.near_names import near_names
from layerkit.weights import WeightHParams, WeightInit

# Which coordinates of a head `RotaryPositionalEmbedding` turns together.
PAIRINGS = ("halves", "neighbours")


class PositionalEmbedding(BaseLayer):
    """Sinusoids of geometrically spaced periods, without weights.

    With n = dims/2 and timescale_i = min_timescale·(max_timescale/min_timescale)^(i/(n−1)):

        [sin(position/timescale_0), …, sin(position/timescale_{n−1}), cos(…), …, cos(…)]

    Source: Vaswani et al., 2017 (arXiv:1706.03762), in the layout of its reference code: all sines,
    then all cosines.

    Attributes:
      dims: Size of a vector; even.
      min_timescale: Period of the fastest sinusoid, over 2π.
      max_timescale: Period of the slowest, over 2π.

    Raises:
      ValueError: odd dims, or timescales that are not 0 < min < max.
    """

    dims: int = 0
    min_timescale: float = 1.0
    max_timescale: float = 10_000.0

    def setup(self) -> None:
        _check_halves(self)

    def fprop(self, positions: jax.Array) -> jax.Array:
        """Vectors `[batch, length, dims]` of positions `[batch, length]`."""
        half = self.dims // 2
        exponents = jnp.arange(half, dtype=jnp.float32) / max(half - 1, 1)
        angles = _angles(positions, exponents, self.min_timescale, self.max_timescale)
        return self.cast(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1))


class PositionalEmbedding2D(BaseLayer):
    """Sinusoids of a row and a column, for the patches of an image, without weights.

    The first half of a vector is the `PositionalEmbedding` of the row, the second that of the
    column.

    Attributes:
      dims: Size of a vector; a multiple of 4.
      min_timescale: Period of the fastest sinusoid, over 2π.
      max_timescale: Period of the slowest, over 2π.

    Raises:
      ValueError: dims that are not a multiple of 4, or timescales that are not 0 < min < max.
    """

    dims: int = 0
    min_timescale: float = 1.0
    max_timescale: float = 10_000.0

    def setup(self) -> None:
        check_sizes(self, dims=self.dims)
        if self.dims % 4:
            raise ValueError(
                f"{self.path_name}: dims={self.dims} must be a multiple of 4, such as"
                f" {4 * (self.dims // 4 + 1)}"
            )
        one = PositionalEmbedding.HParams.config(
            dims=self.dims // 2,
            min_timescale=self.min_timescale,
            max_timescale=self.max_timescale,
        )
        self.create_child("one_axis", one)

    def fprop(self, rows: jax.Array, columns: jax.Array) -> jax.Array:
        """Vectors `[batch, length, dims]` of rows and columns, both `[batch, length]`.

        `jnp.divmod(jnp.arange(height * width), width)` gives them for patches in reading order.
        """
        return jnp.concatenate([self.one_axis(rows), self.one_axis(columns)], axis=-1)


class TrainablePositionalEmbedding(BaseLayer):
    """A learned vector for each position.

    Attributes:
      dims: Size of a vector.
      max_length: Number of positions.
      weight_axes: Logical axes of `w`, `[max_length, dims]`.
      weight_init: None is the inherited `params_init`, or normal with deviation 1/√dims.
    """

    dims: int = 0
    max_length: int = 0
    weight_axes: tuple[str | None, ...] = ("positions", "embed")
    weight_init: WeightInit | None = None

    def setup(self) -> None:
        check_sizes(self, max_length=self.max_length, dims=self.dims)
        default = WeightInit.Gaussian(1.0 / math.sqrt(self.dims))
        init = self.weight_init or self.inherited("params_init") or default
        shape = (self.max_length, self.dims)
        self.create_variable("w", WeightHParams(shape, axes=self.weight_axes, init=init))

    def fprop(self, positions: jax.Array) -> jax.Array:
        """Vectors `[batch, length, dims]` of positions `[batch, length]`.

        A position outside [0, max_length) gives NaN.

        Raises:
          ValueError: rows longer than max_length. A packed row is refused too, although its
            positions start anew: one document may fill it.
        """
        if positions.shape[-1] > self.max_length:
            raise ValueError(
                f"{self.path_name}: max_length={self.max_length}, but the rows have"
                f" {positions.shape[-1]} positions; raise max_length or shorten the rows"
            )
        check_integer_arrays(self, positions=positions)
        return lookup(self.constrain(self.theta.w, self.weight_axes[0], None), positions)


class RotaryPositionalEmbedding(BaseLayer):
    """Turns pairs of coordinates by angles that grow with the position; without weights.

    Of the `dims` coordinates of a head the first r = fraction·dims are turned, in r/2 pairs; pair i
    by position/timescale_i with timescale_i = min_timescale·(max_timescale/min_timescale)^(2i/r).
    The product of a turned query and a turned key then depends on their positions only through the
    difference.

    Source: Su et al., 2021 (arXiv:2104.09864).

    Attributes:
      dims: Size of a head; even.
      min_timescale: Positions per radian of the fastest pair.
      max_timescale: Bound of the slowest, called `rope_theta` elsewhere; raise it for longer
        contexts.
      fraction: How much of a head is turned (partial rotary: 0.25 in GPT-NeoX).
      pairing: `halves`, coordinates i and i + r/2 (GPT-NeoX, Llama), or `neighbours`, 2i and 2i + 1
        (the paper, GPT-J, DeepSeek).
      scaling: For contexts longer than the trained one; see `layerkit.layers.rotary_scaling`.

    Raises:
      ValueError: odd dims, timescales that are not 0 < min < max, a fraction that leaves no pairs,
        an unknown pairing, a scaling for another number of pairs.
    """

    dims: int = 0
    min_timescale: float = 1.0
    max_timescale: float = 10_000.0
    fraction: float = 1.0
    pairing: str = "halves"
    scaling: RotaryScaling | None = None

    def setup(self) -> None:
        _check_halves(self)
        if self.pairing not in PAIRINGS:
            raise ValueError(
                f"{self.path_name}: pairing={self.pairing!r} is not a pairing"
                f"{near_names(str(self.pairing), PAIRINGS)} Pairings: {', '.join(PAIRINGS)}."
            )
        self.frequencies()

    @nn.nowrap
    def frequencies(self) -> np.ndarray:
        """float32 `[pairs]`: radians per position, scaled."""
        pairs = self._num_turned() // 2
        ratio = self.max_timescale / self.min_timescale
        plain = ratio ** -(np.arange(pairs, dtype=np.float64) / pairs) / self.min_timescale
        scaled = plain if self.scaling is None else self.scaling.frequencies(plain)
        return scaled.astype(np.float32)

    def fprop(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Turns `x` `[batch, length, heads, dims]` at positions `[batch, length]`.

        The angles and the turn are computed in float32, the result has the dtype of `x`.

        Raises:
          ValueError: heads of another size than dims.
        """
        check_last_axis(self, x, dims=self.dims)
        # float32, as bfloat16 counts exactly only to 256.
        angles = positions[..., None, None].astype(jnp.float32) * self.frequencies()
        magnitude = 1.0 if self.scaling is None else self.scaling.magnitude()
        sin, cos = jnp.sin(angles) * magnitude, jnp.cos(angles) * magnitude
        turned, rest = jnp.split(x, [self._num_turned()], axis=-1)
        first, second = self._pairs(turned.astype(jnp.float32))
        turned = self._joined(first * cos - second * sin, second * cos + first * sin)
        return jnp.concatenate([turned.astype(x.dtype), rest], axis=-1)

    @nn.nowrap
    def _num_turned(self) -> int:
        turned = round(self.fraction * self.dims)
        if not 0 < self.fraction <= 1 or turned % 2 or turned < 2:
            raise ValueError(
                f"{self.path_name}: fraction={self.fraction} of dims={self.dims} turns {turned}"
                " coordinates, expected an even number from 2 to dims"
            )
        return turned

    @nn.nowrap
    def _pairs(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first and the second coordinate of all pairs: `[..., 2·pairs]` → `[..., pairs]`."""
        if self.pairing == "neighbours":
            return x[..., 0::2], x[..., 1::2]
        first, second = jnp.split(x, 2, axis=-1)
        return first, second

    @nn.nowrap
    def _joined(self, first: jax.Array, second: jax.Array) -> jax.Array:
        if self.pairing == "neighbours":
            return jnp.stack([first, second], axis=-1).reshape(*first.shape[:-1], -1)
        return jnp.concatenate([first, second], axis=-1)


def _angles(
    positions: jax.Array, exponents: jax.Array, min_timescale: float, max_timescale: float
) -> jax.Array:
    """Angles `[..., n]` of positions `[...]`; float32, as bfloat16 counts exactly only to 256."""
    timescales = min_timescale * (max_timescale / min_timescale) ** exponents
    return positions[..., None].astype(jnp.float32) / timescales


def _check_halves(layer: PositionalEmbedding | RotaryPositionalEmbedding) -> None:
    check_sizes(layer, dims=layer.dims)
    if layer.dims % 2:
        raise ValueError(
            f"{layer.path_name}: dims={layer.dims} must be even, such as {layer.dims + 1}"
        )
    if not 0 < layer.min_timescale < layer.max_timescale:
        raise ValueError(
            f"{layer.path_name}: min_timescale={layer.min_timescale} and"
            f" max_timescale={layer.max_timescale} must be 0 < min_timescale < max_timescale"
        )
