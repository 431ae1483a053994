"""Storage of weights in 8-bit and 4-bit integers, for inference and for frozen weights.

A weight w is stored as integers q and float32 scales s, such that w ≈ q·s. A scale is shared by all
inputs of an output (one per channel), or by a group of consecutive inputs. The formats are those of
Qwix (Google's quantization library), whose results the tests compare:

- `int8` and `int4`: s = max|w| / (largest integer + 1/2), and q = w / s, rounded to nearest.
- `nf4`: s = max|w|, and q is the index of the nearest of 16 quantiles of the normal distribution
  (Dettmers et al., "QLoRA", 2023, arXiv:2305.14314, Appendix E).

Two 4-bit integers are packed into a uint8: consecutive inputs, the first one in the lower half, and
int4 with 8 added. JAX's own int4 is not used: compiled functions reject int4 arrays from other
sources, since their layouts differ (jax 0.10.2), and checkpoints cannot hold uint4.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from layerkit.base.weights import WeightBox, WeightHParams
from layerkit.config.checks import require
from layerkit.errors import ConfigError

_FORMAT = re.compile(r"(?P<kind>int8|int4|nf4)(:(?P<group>[1-9]\d*))?")
_LARGEST = {"int8": 127, "int4": 7}
SCALE_SUFFIX = "_scale"
"""Suffix of the name of a weight's scales: `w_scale` for `w`."""

NF4_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The 16 values of `nf4`, in the order of their indices."""


def scale_path(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the path of the scales of a weight."""
    return (*path[:-1], path[-1] + SCALE_SUFFIX)


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """A format of stored weights.

    Attributes:
      kind: `int8`, `int4` or `nf4`.
      group_size: Number of inputs that share a scale; None for all inputs of an output.
    """

    kind: str
    group_size: int | None = None

    @classmethod
    def parse(cls, text: Any, *, owner: str | None = None) -> WeightFormat:
        """Return the format of a text such as `int8` or `int4:64`.

        Raises:
          ConfigError: The text names no format.
        """
        match = _FORMAT.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ConfigError(
                owner=owner,
                field="weight_format",
                value=text,
                expected="int8, int4 or nf4, with the number of inputs that share a scale after a"
                " colon, such as int4:64",
            )
        group = match["group"]
        return cls(match["kind"], None if group is None else int(group))

    def scale_shape(
        self, shape: tuple[int, ...], contracted: tuple[int, ...], *, owner: str | None = None
    ) -> tuple[int, ...]:
        """Return the shape of the scales, with a divisor of each size of the weight.

        Args:
          shape: Shape of the weight.
          contracted: Dimensions that are contracted with the inputs.
          owner: Owner of the weight, for messages.

        Raises:
          ConfigError: The inputs cannot be divided into groups.
        """
        scales = list(shape)
        left = self.group_size
        for axis in reversed(contracted):
            if left is None:
                scales[axis] = 1
                continue
            size, other = max(left, shape[axis]), min(left, shape[axis])
            if size % other:
                left = 0
                break
            scales[axis] = shape[axis] // other
            left = left // other
        if left not in (None, 1):
            sizes = [shape[axis] for axis in contracted]
            raise ConfigError(
                owner=owner,
                field="group size of weight_format",
                value=self.group_size,
                expected=f"a divisor of the inputs {sizes} of the weight",
            )
        return tuple(scales)


@dataclasses.dataclass(frozen=True)
class StoredWeight:
    """A weight in integers.

    Attributes:
      values: int8 in the shape of the weight, or uint8 with half the size of one dimension.
      scale: float32 of the same rank, whose sizes divide those of the weight.
      kind: `int8`, `int4` or `nf4`.
      shape: Shape of the weight.
    """

    values: jax.Array
    scale: jax.Array
    kind: str
    shape: tuple[int, ...]

    def restored(self, dtype: Any) -> jax.Array:
        """Return the weight `[...]` in a floating dtype, in which it is computed.

        With int8, TPUs compute this inside of the product. Other programs store the weight of one
        product at a time.
        """
        split, ones = _tiles(self.shape, self.scale.shape)
        scale = self.scale.astype(dtype).reshape(ones)
        return (self._unscaled(dtype).reshape(split) * scale).reshape(self.shape)

    def _unscaled(self, dtype: Any) -> jax.Array:
        if self.kind == "int8":
            return self.values.astype(dtype)
        sizes = zip(self.values.shape, self.shape, strict=True)
        (axis,) = [axis for axis, (packed, size) in enumerate(sizes) if packed != size]
        # Pairs of neighbors stay on their device, and XLA fuses shifts better than concatenations.
        shifts = np.array([0, 4], np.uint8).reshape(2, *[1] * (len(self.shape) - axis - 1))
        pairs = (jnp.expand_dims(self.values, axis + 1) >> shifts) & 15
        integers = pairs.reshape(self.shape)
        if self.kind == "nf4":
            return jnp.asarray(NF4_VALUES, dtype)[integers.astype(jnp.int32)]
        return integers.astype(dtype) - 8


def quantize(
    w: jax.Array, *, kind: str, scale_shape: tuple[int, ...], packed_axis: int | None
) -> StoredWeight:
    """Round a weight to integers.

    Args:
      w: Weight `[...]`.
      kind: `int8`, `int4` or `nf4`.
      scale_shape: Shape of the scales; see `WeightFormat.scale_shape`.
      packed_axis: Dimension whose pairs share a byte; None for int8.
    """
    split, ones = _tiles(w.shape, scale_shape)
    tiled = w.astype(jnp.float32).reshape(split)
    shared = tuple(axis for axis, size in enumerate(ones) if size == 1)
    most = 1.0 if kind == "nf4" else _LARGEST[kind] + 0.5
    scale = jnp.max(jnp.abs(tiled), axis=shared, keepdims=True) / most
    # Zeros and values near the smallest float have the scale 1.
    scale = jnp.where(scale < np.sqrt(np.finfo(np.float32).tiny), 1.0, scale)
    scaled = (tiled / scale).reshape(w.shape)
    if kind == "nf4":
        values = np.asarray(NF4_VALUES, np.float32)
        # A value in the middle has the lower index.
        q = jnp.searchsorted((values[1:] + values[:-1]) / 2, scaled, side="left")
    else:
        # The largest weight is in the middle of two integers, of which int8 has one only.
        q = jnp.clip(jnp.round(scaled), -_LARGEST[kind], _LARGEST[kind])
    if packed_axis is None:
        integers = q.astype(jnp.int8)
    else:
        q = (q + 8 * (kind == "int4")).astype(jnp.uint8)
        first, second = (lax.slice_in_dim(q, n, None, 2, packed_axis) for n in (0, 1))
        integers = first | (second << 4)
    return StoredWeight(integers, scale.reshape(scale_shape), kind, w.shape)


def create_stored(
    layer: Any,
    name: str,
    weight: WeightHParams,
    text: str,
    draw: Callable[[jax.Array], WeightBox],
) -> StoredWeight:
    """Create the integers `[...]` and the scales of a weight of a layer.

    Each is drawn from a key of its own, so random weights have about the declared distribution.

    Args:
      layer: Layer of the weight, in its `setup`.
      name: Name of the integers.
      weight: Declaration of the weight.
      text: Format, such as `int4:64`.
      draw: Function of a key that draws the weight in floats.

    Raises:
      ConfigError: The format is unknown, or the inputs cannot be divided into groups or pairs.
    """
    owner = f"{layer.path_name}.{name}"
    form = WeightFormat.parse(text, owner=owner)
    shape = form.scale_shape(weight.shape, weight.contracted_dims, owner=owner)
    sizes = zip(weight.axes, weight.shape, shape, strict=True)
    # The number of groups need not be divisible by a mesh axis.
    axes = tuple(axis if count == size else None for axis, size, count in sizes)

    packed = None if form.kind == "int8" else weight.contracted_dims[-1]
    if packed is not None:
        size, expected = weight.shape[packed], f"an even number for {form.kind}"
        require(size % 2 == 0, owner, "number of inputs", size, expected)

    def rounded(box: WeightBox) -> StoredWeight:
        return quantize(box.value, kind=form.kind, scale_shape=shape, packed_axis=packed)

    def draw_values(key: jax.Array) -> WeightBox:
        box = draw(key)
        return box.replace(value=rounded(box).values)

    def draw_scale(key: jax.Array) -> WeightBox:
        return WeightBox(rounded(draw(key)).scale, axes)

    values = layer.param(name, draw_values)
    scale = layer.param(f"{name}{SCALE_SUFFIX}", draw_scale)
    return StoredWeight(values, scale, form.kind, weight.shape)


def _tiles(
    shape: tuple[int, ...], scale_shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of a weight split into (group, member) pairs, and that of its scales."""
    split = [size for s, n in zip(shape, scale_shape, strict=True) for size in (n, s // n)]
    ones = [size for n in scale_shape for size in (n, 1)]
    return tuple(split), tuple(ones)
