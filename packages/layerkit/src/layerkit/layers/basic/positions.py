"""Positional embeddings: sinusoids, learned tables and rotary embeddings.

`PositionalEmbedding` (sinusoids; `PositionalEmbedding2D` for images) and
`TrainablePositionalEmbedding` (a table) return vectors that are added to token embeddings.
`RotaryPositionalEmbedding` rotates queries and keys inside attention, so that their products depend
on distances only.

Positions are arguments and count from 0: in packed rows they restart with each segment, and in
cached decoding they start at the current step.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from layerkit.base.base_layer import BaseLayer
from layerkit.base.weights import WeightHParams, WeightInit
from layerkit.config import Config, assigned_fields
from layerkit.config.checks import (
    check_integer_arrays,
    check_integers,
    check_last_axis,
    check_sizes,
    require,
)
from layerkit.config.config import walk_configs
from layerkit.config.hparams import Conditions
from layerkit.layers.basic.embeddings import lookup
from layerkit.ops.rotary_scaling import LongRopeScaling, RotaryScaling

# Pairs of coordinates of a head that `RotaryPositionalEmbedding` rotates.


class PositionalEmbedding(BaseLayer):
    """Sinusoidal positional embeddings with geometrically spaced periods, without weights.

    With n = dims/2 and timescale_i = min_timescale·(max_timescale/min_timescale)^(i/(n−1)):

        [sin(position/timescale_0), …, sin(position/timescale_{n−1}), cos(…), …, cos(…)]

    Source: Vaswani et al., 2017 (arXiv:1706.03762), in the layout of its reference code: all sines,
    then all cosines.

    Attributes:
      dims: Size of a vector; even.
      min_timescale: Period of the fastest sinusoid, divided by 2π.
      max_timescale: Period of the slowest sinusoid, divided by 2π.

    Raises:
      ConfigError: `dims` is odd, or the timescales are not 0 < min < max.
    """

    dims: int = 0
    min_timescale: float = 1.0
    max_timescale: float = 10_000.0

    def setup(self) -> None:
        """Check the fields."""
        _check_halves(self)

    def fprop(self, positions: jax.Array) -> jax.Array:
        """Return vectors `[batch, length, dims]` of positions `[batch, length]`."""
        return self._sinusoids(positions, self.dims)

    def _sinusoids(self, positions: jax.Array, dims: int) -> jax.Array:
        half = dims // 2
        exponents = jnp.arange(half, dtype=jnp.float32) / max(half - 1, 1)
        timescales = self.min_timescale * (self.max_timescale / self.min_timescale) ** exponents
        angles = positions[..., None].astype(jnp.float32) / timescales
        return self.cast(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1))


class PositionalEmbedding2D(PositionalEmbedding):
    """Sinusoidal embeddings of rows and columns of image patches, without weights.

    The first half of a vector is the `PositionalEmbedding` of the row, the second half that of the
    column, so `dims` is a multiple of 4. The fields are those of `PositionalEmbedding`.
    """

    def setup(self) -> None:
        """Check the fields."""
        super().setup()
        require(self.dims % 4 == 0, self, "dims", self.dims, "a multiple of 4")

    def fprop(self, rows: jax.Array, columns: jax.Array) -> jax.Array:  # type: ignore[override]
        """Return vectors `[batch, length, dims]` of rows and columns, both `[batch, length]`.

        For patches in reading order they are `jnp.divmod(jnp.arange(height * width), width)`.
        """
        halves = [self._sinusoids(axis, self.dims // 2) for axis in (rows, columns)]
        return jnp.concatenate(halves, axis=-1)


class TrainablePositionalEmbedding(BaseLayer):
    """A learned vector for each position.

    Attributes:
      dims: Size of a vector.
      max_length: Number of positions.
      offset: Number of rows of the table before that of position 0, which are not used (2 in BART
        and RoBERTa).
      is_frozen: True for a table that training does not change (Whisper, whose folders hold
        sinusoids).
      weight_axes: Logical axes of `w`, `[offset + max_length, dims]`.
      weight_init: Initializer of `w`; None for the inherited `params_init`, or else normal with
        standard deviation 1/√dims.
    """

    dims: int = 0
    max_length: int = 0
    offset: int = 0
    is_frozen: bool = False
    weight_axes: tuple[str | None, ...] = ("positions", "embed")
    weight_init: WeightInit | None = None

    def setup(self) -> None:
        """Create the table."""
        check_sizes(self, max_length=self.max_length, dims=self.dims)
        check_integers(self, minimum=0, offset=self.offset)
        default = WeightInit.Gaussian(1.0 / math.sqrt(self.dims))
        init = self.weight_init or self.inherited("params_init") or default
        shape = (self.offset + self.max_length, self.dims)
        weight = WeightHParams(shape, axes=self.weight_axes, init=init, decays=False)
        self.create_variable("w", weight, trainable=not self.is_frozen)

    def fprop(self, positions: jax.Array) -> jax.Array:
        """Return vectors `[batch, length, dims]` of positions `[batch, length]`.

        The vector of a position outside [0, max_length) is NaN.

        Raises:
          ConfigError: Rows are longer than `max_length`. This includes packed rows, since a single
            document may fill a row.
        """
        length = positions.shape[-1]
        expected = f"at most max_length={self.max_length}"
        require(length <= self.max_length, self, "length of rows", length, expected)
        check_integer_arrays(self, positions=positions)
        # Features that are split stay so, since whole vectors of all tokens may be too large.
        weight = self.cast(self.get_var("w")) if self.is_frozen else self.theta.w
        gathered = (self.weight_axes[0], "act_embed")
        table = self.constrain(weight, *gathered, gradient_axes=self.weight_axes)
        return lookup(table[self.offset :], positions)


class RotaryPositionalEmbedding(BaseLayer):
    """Rotary positional embeddings, without weights.

    The first r = fraction·dims coordinates of a head are rotated in r/2 pairs: pair i by the angle
    position/timescale_i with timescale_i = min_timescale·(max_timescale/min_timescale)^(2i/r). The
    product of a rotated query and key then depends only on the difference of their positions.

    Source: Su et al., 2021 (arXiv:2104.09864).

    Attributes:
      dims: Size of a head; even.
      min_timescale: Positions per radian of the fastest pair.
      max_timescale: Upper bound of the positions per radian of the slowest pair, also known as
        `rope_theta`. Increase it for longer contexts.
      fraction: Fraction of a head that is rotated (partial rotary; 0.25 in GPT-NeoX).
      pairing: `halves` for pairs of coordinates i and i + r/2 (GPT-NeoX, Llama), or `neighbors`
        for 2i and 2i + 1 (the paper, GPT-J, DeepSeek).
      scaling: Scaling for contexts longer than the trained one; see
        `layerkit.ops.rotary_scaling`.
      sections: Number of pairs that each axis of the positions rotates, such as (16, 24, 24) for
        time, row and column (Qwen2-VL; Wang et al., 2024, arXiv:2409.12191). None for positions of
        one axis.
      section_order: `blocks` for consecutive pairs of an axis (Qwen2-VL); `interleaved` for pairs
        that alternate between the axes, of which the first has the rest (Qwen3-VL); `axial` for
        blocks whose timescales each start at the smallest (towers of images).

    Raises:
      ConfigError: `dims` is odd, the timescales are not 0 < min < max, the fraction selects no
        pairs, the pairing is unknown, scaling or sections are for another number of pairs, or
        positions have several axes without sections.
    """

    used_only_if: ClassVar[Conditions] = {"section_order": "sections"}

    dims: int = 0
    min_timescale: float = 1.0
    max_timescale: float = 10_000.0
    fraction: float = 1.0
    pairing: Literal["halves", "neighbors"] = "halves"
    scaling: RotaryScaling | None = None
    sections: tuple[int, ...] | None = None
    section_order: Literal["blocks", "interleaved", "axial"] = "blocks"

    def setup(self) -> None:
        """Check the fields."""
        _check_halves(self)
        pairs = self._num_rotated() // 2
        sizes = self.sections
        is_valid = sizes is None or (sum(sizes) == pairs and min(sizes) >= 0)
        require(is_valid, self, "sections", sizes, f"sizes of at least 0 with the sum {pairs}")
        self.frequencies()

    @nn.nowrap
    def frequencies(self) -> np.ndarray:
        """Return the scaled frequencies, float32 `[pairs]` in radians per position.

        They are `[2, pairs]`, for short and for long rows, if the scaling depends on the length.
        """
        pairs = self._num_rotated() // 2
        ratio = self.max_timescale / self.min_timescale
        exponents = np.arange(pairs, dtype=np.float64) / pairs
        if self.sections is not None and self.section_order == "axial":
            exponents = np.concatenate([np.arange(size) / size for size in self.sections])
        plain = ratio**-exponents / self.min_timescale
        scaled = plain if self.scaling is None else self.scaling.frequencies(plain)
        return scaled.astype(np.float32)

    def fprop(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Rotate `x` `[batch, length, heads, dims]` at positions `[batch, length]`.

        With `sections`, positions may be `[batch, length, axes]`. Those of one axis stand for all.
        The computation is in float32; the result has the dtype of `x`.
        """
        check_last_axis(self, x, dims=self.dims)
        frequencies: Any = self.frequencies()
        if isinstance(self.scaling, LongRopeScaling) and frequencies.ndim == 2:
            longest = jnp.max(positions, axis=tuple(range(1, positions.ndim)))
            is_long = longest >= self.scaling.original_max_position
            frequencies = jnp.where(is_long[:, None, None, None], frequencies[1], frequencies[0])
        if positions.ndim == 2:
            positions = positions[..., None]
        else:
            positions = positions[..., self._axes(positions.shape[-1])]
        # float32, because bfloat16 represents integers exactly only up to 256.
        angles = positions[..., None, :].astype(jnp.float32) * frequencies
        magnitude = 1.0 if self.scaling is None else self.scaling.magnitude()
        sin, cos = jnp.sin(angles) * magnitude, jnp.cos(angles) * magnitude
        rotated, rest = jnp.split(x, [self._num_rotated()], axis=-1)
        first, second = self._split_pairs(rotated.astype(jnp.float32))
        rotated = self._merge_pairs(first * cos - second * sin, second * cos + first * sin)
        return jnp.concatenate([rotated.astype(x.dtype), rest], axis=-1)

    def _num_rotated(self) -> int:
        rotated = round(self.fraction * self.dims)
        is_valid = 0 < self.fraction <= 1 and rotated >= 2 and rotated % 2 == 0
        expected = f"a number in (0, 1] that selects an even number of dims={self.dims}"
        require(is_valid, self, "fraction", self.fraction, expected)
        return rotated

    def _axes(self, number: int) -> np.ndarray:
        """Return which of `number` axes of positions rotates each pair."""
        sections = self.sections or ()
        expected = f"the pairs of {number} axes of positions"
        require(len(sections) == number, self, "sections", self.sections, expected)
        if self.section_order != "interleaved":
            return np.repeat(np.arange(number), sections)
        pairs = np.arange(sum(sections))
        axes = pairs % number
        return np.where(pairs // number < np.array(sections)[axes], axes, 0)

    def _split_pairs(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Split `[..., 2·pairs]` into the first and second coordinates `[..., pairs]`."""
        if self.pairing == "neighbors":
            return x[..., 0::2], x[..., 1::2]
        first, second = jnp.split(x, 2, axis=-1)
        return first, second

    def _merge_pairs(self, first: jax.Array, second: jax.Array) -> jax.Array:
        if self.pairing == "neighbors":
            return jnp.stack([first, second], axis=-1).reshape(*first.shape[:-1], -1)
        return jnp.concatenate([first, second], axis=-1)


def first_axis(positions: jax.Array) -> jax.Array:
    """Return the positions `[batch, length]` of the first axis, such as time, or of the only one.

    Chunks of attention and the growth of queries are counted by it.
    """
    return positions if positions.ndim == 2 else positions[..., 0]


def switching_length(value: Any) -> int | None:
    """Return the length beyond which rows are rotated otherwise; None if there is none.

    Args:
      value: Config that may contain rotary embeddings, such as that of a stack of layers.
    """
    scalings = (scaling for _, scaling in _switching(value))
    return next((scaling.original_max_position for scaling in scalings), None)


def set_longest_sequence(config: Config, length: int) -> Config:
    """Return a copy of a config whose rotary embeddings rotate all rows as those of one length."""
    config = config.clone()
    for rotary, scaling in _switching(config):
        rotary.scaling = dataclasses.replace(scaling, longest_sequence=length)
    return config


def _switching(value: Any) -> list[tuple[Any, LongRopeScaling]]:
    """Return the configs of rotary embeddings whose scaling depends on the length, and these."""
    scalings = ((config, assigned_fields(config).get("scaling")) for config in walk_configs(value))
    return [
        (config, scaling)
        for config, scaling in scalings
        if isinstance(scaling, LongRopeScaling) and scaling.longest_sequence is None
    ]


def _check_halves(layer: PositionalEmbedding | RotaryPositionalEmbedding) -> None:
    check_sizes(layer, dims=layer.dims)
    require(layer.dims % 2 == 0, layer, "dims", layer.dims, "an even number")
    expected = f"a number above 0 and below max_timescale={layer.max_timescale}"
    is_valid = 0 < layer.min_timescale < layer.max_timescale
    require(is_valid, layer, "min_timescale", layer.min_timescale, expected)
