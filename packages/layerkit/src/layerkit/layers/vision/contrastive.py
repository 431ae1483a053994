"""Losses of matching rows, such as images and their texts, with the other rows as negatives."""

from __future__ import annotations

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import BaseLayer
from layerkit.base.weights import WeightHParams, WeightInit
from layerkit.config.checks import check_positive
from layerkit.config.nested_map import NestedMap


class ContrastiveLoss(BaseLayer):
    """The loss of pairs of vectors among all pairs of the global batch, with learned temperature.

    The logit of a pair is exp(log_scale)·cos(image, text), plus a learned bias with `sigmoid`. Each
    device computes the logits of its rows with the gathered vectors of all rows: of both sides for
    `softmax`, of the texts for `sigmoid`. It is so under all meshes and partitioners. A
    microbatch is compared with itself.

    Attributes:
      kind: `softmax` for the mean cross-entropy of both directions (CLIP; Radford et al., 2021,
        arXiv:2103.00020); `sigmoid` for a binary loss of each pair, summed over texts (SigLIP; Zhai
        et al., 2023, arXiv:2303.15343), whose bias starts at -10.
      initial_scale: First value of exp(log_scale), the inverse of the temperature; None for that of
        the paper, 1/0.07 or 10.
      max_scale: Largest value of exp(log_scale) that is used and learned; None for the paper's,
        100 for `softmax` and no limit for `sigmoid`.
    """

    kind: Literal["softmax", "sigmoid"] = "softmax"
    initial_scale: float | None = None
    max_scale: float | None = None

    def setup(self) -> None:
        """Create the logarithm of the scale and the bias, which weight decay spares."""
        check_positive(self, initial_scale=self.initial_scale, max_scale=self.max_scale)
        scale = self.initial_scale or {"softmax": 1 / 0.07, "sigmoid": 10.0}[self.kind]
        values = {"log_scale": math.log(scale)}
        if self.kind == "sigmoid":
            values["bias"] = -10.0
        for name, value in values.items():
            self.create_variable(name, WeightHParams((), (), init=WeightInit.Constant(value)))

    def fprop(
        self, images: jax.Array, texts: jax.Array, *, weights: jax.Array | None = None
    ) -> NestedMap:
        """Compute the losses of pairs.

        Args:
          images: `[batch, dims]`, of any length.
          texts: `[batch, dims]`; row i belongs to image i.
          weights: float32 `[batch]`. Rows of weight 0 are no negatives. None for 1.

        Returns:
          `per_example_loss` float32 `[batch]` in nats, and `correct` bool `[batch]`, True
          for images whose text has the highest logit.
        """
        images, texts = _normalize(images), _normalize(texts)
        if weights is None:
            weights = jnp.ones(len(images), jnp.float32)
        counts = self._gather(weights) > 0
        # Clipped once, so that the gradients of both directions are added before.
        largest = self.max_scale or {"softmax": 100.0, "sigmoid": math.inf}[self.kind]
        scale = jnp.exp(_clip(self.theta.log_scale, math.log(largest)))
        logits = self._logits(images, texts, scale)
        rows = jnp.arange(len(images))
        if axes := _manual_axes():
            rows += jax.lax.axis_index(axes) * len(images)
        is_pair = rows[:, None] == jnp.arange(len(counts))
        is_seen = counts | is_pair
        masked = jnp.where(is_seen, logits, -jnp.inf)
        if self.kind == "sigmoid":
            pairs = -jax.nn.log_sigmoid(jnp.where(is_pair, logits, -logits))
            losses = jnp.sum(pairs, axis=1, where=is_seen)
        else:
            both = jnp.stack([logits, self._logits(texts, images, scale)])
            sums = jax.nn.logsumexp(both, axis=-1, where=is_seen)
            losses = jnp.mean(sums, axis=0) - jnp.sum(logits, axis=1, where=is_pair)
        return NestedMap(per_example_loss=losses, correct=jnp.argmax(masked, axis=1) == rows)

    def _logits(self, rows: jax.Array, others: jax.Array, scale: jax.Array) -> jax.Array:
        """Return the logits float32 `[rows, all rows]` of this device's rows."""
        rows, others = self.constrain(rows, "batch", None), self._gather(others)
        cosines = jnp.einsum("bd,cd->bc", rows, others, precision="highest")
        logits = self.constrain(scale * cosines, "batch", None)
        return logits + self.theta.bias if self.kind == "sigmoid" else logits

    def _gather(self, x: jax.Array) -> jax.Array:
        """Return the rows `[all rows, ...]` of all devices."""
        if axes := _manual_axes():
            return jax.lax.all_gather(x, axes, tiled=True)
        return self.constrain(x, *(None,) * x.ndim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _clip(x: jax.Array, largest: float) -> jax.Array:
    """Return at most `largest`, from where gradients lead back (a projection, as in CLIP)."""
    return jnp.minimum(x, largest)


def _clip_forward(x: jax.Array, largest: float) -> tuple[jax.Array, jax.Array]:
    return _clip(x, largest), x < largest


def _clip_backward(largest: float, is_below: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    del largest
    # Descent along a positive gradient, of all devices together, lowers the value.
    axes = _manual_axes()
    total = jax.lax.psum(gradient, axes) if axes else gradient
    return (jnp.where(is_below | (total > 0), gradient, 0.0),)


_clip.defvjp(_clip_forward, _clip_backward)


def _normalize(x: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(jnp.square(x), axis=-1, keepdims=True), 1e-24))


def _manual_axes() -> tuple[str, ...]:
    """Return the axes that split the rows in a `shard_map`, as under the pmap partitioner."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)
