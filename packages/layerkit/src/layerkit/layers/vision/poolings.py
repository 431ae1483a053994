"""Pooling over windows of positions, and over all positions."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import BaseLayer
from layerkit.config.checks import require
from layerkit.layers.vision.convolutions import (
    Padding,
    check_padding,
    expand_axes,
    resolve_padding,
)


class Pooling(BaseLayer):
    """The maximum or mean of windows: `[batch, *positions, dims]` → `[batch, *positions', dims]`.

    Padding around the positions enters no maximum and no mean.

    Attributes:
      window: Size of the window on each axis of positions.
      strides: Distance of the windows; an integer stands for all axes, and None for `window`.
      kind: `max` or `mean`.
      padding: Padding of the positions; see `resolve_padding`.
    """

    window: tuple[int, ...] = (2, 2)
    strides: int | tuple[int, ...] | None = None
    kind: Literal["max", "mean"] = "max"
    padding: Padding = "SAME"

    def setup(self) -> None:
        """Check the fields."""
        rank, padding = len(self.window), self.padding
        expand_axes(self, rank, window=self.window, strides=self._strides)
        check_padding(self, padding, rank)
        pairs = [] if isinstance(padding, str) else zip(padding, self.window, strict=True)
        is_valid = all(max(pair) < size for pair, size in pairs)
        require(is_valid, self, "padding", padding, f"less than the window {self.window}")

    def fprop(self, inputs: jax.Array, *, is_token: jax.Array | None = None) -> jax.Array:
        """Pool windows of positions.

        Args:
          inputs: `[batch, *positions, dims]`.
          is_token: bool `[batch, length]` of the first axis of positions, False for padding, which
            enters no maximum and no mean. Outputs without `pool_tokens` are 0. None for all True.

        Returns:
          `[batch, *positions', dims]` in the compute dtype.
        """
        # Sums of half precision would lose small terms, and float16 would overflow.
        is_mean = self.kind == "mean"
        x = jnp.asarray(inputs, jnp.float32 if is_mean else self.compute_dtype)
        if is_token is None:
            counted = jnp.ones((1, *x.shape[1:-1], 1), x.dtype)
        else:
            after = tuple(range(2, x.ndim))
            inside = jnp.broadcast_to(jnp.expand_dims(is_token, after), (*x.shape[:-1], 1))
            x = jnp.where(inside, x, 0.0 if is_mean else -jnp.inf)
            counted = inside.astype(x.dtype)
        if is_mean:
            count = self._reduce(counted, 0.0, jax.lax.add)
            outputs = self.cast(self._reduce(x, 0.0, jax.lax.add) / jnp.maximum(count, 1))
        else:
            outputs = self._reduce(x, -jnp.inf, jax.lax.max)
        if is_token is None:
            return outputs
        return jnp.where(jnp.expand_dims(self.pool_tokens(is_token), after), outputs, 0.0)

    def pool_tokens(self, is_token: jax.Array) -> jax.Array:
        """Return which outputs are tokens, bool `[batch, length']`, as Praxis does.

        They are those whose windows have no padding; at stride 1 and `SAME`, those at tokens.
        """
        stride = expand_axes(self, len(self.window), strides=self._strides)[0][0]
        if stride == 1 and self.padding == "SAME":
            return is_token
        return self._reduce(is_token.astype(jnp.float32), jnp.inf, jax.lax.min, rank=1) > 0

    @property
    def _strides(self) -> int | tuple[int, ...]:
        return self.window if self.strides is None else self.strides

    def _reduce(self, x: jax.Array, start: float, function: Any, rank: int = 0) -> jax.Array:
        """Reduce windows of `[batch, *positions, ...]`, on the first `rank` axes if it is set."""
        rank = rank or len(self.window)
        window, strides = self.window[:rank], self._strides
        strides = strides if isinstance(strides, int) else strides[:rank]
        [steps] = expand_axes(self, rank, strides=strides)
        padding = resolve_padding(self.padding, self.window, (1,) * len(self.window))
        after = x.ndim - rank - 1
        if not isinstance(padding, str):
            padding = [(0, 0), *padding[:rank], *((0, 0),) * after]
        return jax.lax.reduce_window(
            x,
            start,
            function,
            (1, *window, *(1,) * after),
            (1, *steps, *(1,) * after),
            padding,
        )


class GlobalPooling(BaseLayer):
    """The mean or maximum over all positions: `[batch, *positions, dims]` → `[batch, dims]`.

    Attributes:
      kind: `mean` or `max`.
    """

    kind: Literal["mean", "max"] = "mean"

    def fprop(self, inputs: jax.Array, *, is_token: jax.Array | None = None) -> jax.Array:
        """Pool all positions.

        Args:
          inputs: `[batch, *positions, dims]`.
          is_token: bool `[batch, *positions]`, False for padding; None if there is none. A row
            without tokens is pooled to 0.
        """
        x, axes = inputs.astype(self.compute_dtype), tuple(range(1, inputs.ndim - 1))
        where = jnp.ones(x.shape[:-1], bool) if is_token is None else is_token
        count = jnp.sum(where, axis=axes, dtype=jnp.float32)[:, None]
        where = where[..., None]
        if self.kind == "mean":
            total = jnp.sum(x, axis=axes, where=where, dtype=jnp.float32)
            return self.cast(total / jnp.maximum(count, 1))
        largest = jnp.max(x, axis=axes, where=where, initial=-jnp.inf)
        return jnp.where(count > 0, largest, 0.0)
