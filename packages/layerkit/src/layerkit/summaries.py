"""What layers report besides scalars: histograms and images.

They cost more than a scalar, so a layer computes them only where somebody collects them, at the
few steps that are summarized. Otherwise a mark without any array says that there would be one.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

# Names of the Flax collections that layers report to.
SUMMARIES = "summaries"
SUMMARY_ARRAYS = "summary_arrays"

Kind = Literal["scalar", "histogram", "image"]
KINDS: tuple[Kind, ...] = ("scalar", "histogram", "image")

DEFAULT_VERBOSITY = 3
"""Of summaries that do not say theirs, and up to which a task reports them (Pax's numbers)."""

MAX_IMAGES = 3
"""Rows of a batch whose image is kept."""

_PER_OCTAVE, _OCTAVES = 4, 10


class BinCounts(struct.PyTreeNode):
    """How values are spread over bins that do not depend on them, so that counts can be added up.

    Attributes:
      counts: float32 `[bins]`, the weight of the values above an edge, up to and with the next. The
        first bin holds what lies below it too, the last one what lies above.
      sum: float32 scalar, Σ weight·value.
      sum_of_squares: float32 scalar, Σ weight·value².
      edges: `bins + 1` numbers, ascending.
    """

    counts: jax.Array
    sum: jax.Array
    sum_of_squares: jax.Array
    edges: tuple[float, ...] = struct.field(pytree_node=False)

    @classmethod
    def of(
        cls, values: jax.Array, edges: tuple[float, ...], weights: jax.Array | None = None
    ) -> BinCounts:
        """Counts `values` `[...]`, each once or by `weights` of that shape; of weight 0 not."""
        values = jnp.asarray(values, jnp.float32)
        weights = jnp.ones(values.shape) if weights is None else weights
        values = jnp.where(weights > 0, values, 0.0)
        # One pass for each edge, which partitions like any sum; scattering into bins would not.
        below = jax.lax.map(
            lambda edge: jnp.sum(jnp.where(values <= edge, weights, 0.0)),
            jnp.asarray(edges[1:-1], jnp.float32),
        )
        below = jnp.concatenate([jnp.zeros(1), below, jnp.sum(weights).reshape(1)])
        return cls(
            counts=jnp.diff(below),
            sum=jnp.sum(weights * values),
            sum_of_squares=jnp.sum(weights * jnp.square(values)),
            edges=edges,
        )


def _log_edges() -> tuple[float, ...]:
    """From −1024 to 1024, four bins between a power of two and the next, one around 0."""
    steps = range(-_OCTAVES * _PER_OCTAVE, _OCTAVES * _PER_OCTAVE + 1)
    positive = [math.pow(2.0, step / _PER_OCTAVE) for step in steps]
    return (*(-edge for edge in reversed(positive)), *positive)


LOG_EDGES = _log_edges()


class Summary(struct.PyTreeNode):
    """One report of a layer.

    Attributes:
      value: A scalar; a `BinCounts`; images uint8 `[rows, height, width, channels]`, of at most
        `MAX_IMAGES` rows; None in a mark. Repeated layers put axes in front.
      kind: Which of these.
      verbosity: It is reported by tasks with this `summary_verbosity` or a higher one.
    """

    value: Any
    kind: Kind = struct.field(pytree_node=False)
    verbosity: int = struct.field(pytree_node=False, default=DEFAULT_VERBOSITY)

    def merged(self, axis: int) -> Summary:
        """What pieces of a batch, stacked on `axis`, reported of the whole.

        Counts are added up; the images are those of the first piece.
        """
        if self.kind == "image":
            return self.replace(value=jax.lax.index_in_dim(self.value, 0, axis, keepdims=False))
        return self.replace(value=jax.tree.map(lambda leaf: jnp.sum(leaf, axis), self.value))


def sow_summary(layer: Any, name: str, value: Any, *, kind: Kind, verbosity: int) -> None:
    """Puts what a layer reports into the collection for it, where that is collected.

    Args:
      layer: A `BaseLayer`.
      name: Of the value, below the layer.
      value: See `BaseLayer.add_summary`.
      kind: What to make of it.
      verbosity: See `Summary`.

    Raises:
      ValueError: another kind, or an image of another shape.
    """
    owner = f"{layer.path_name}.{name}"
    if kind not in KINDS:
        raise ValueError(f"{owner}: kind={kind!r} must be one of {', '.join(KINDS)}")
    if kind == "scalar":
        if layer.is_mutable_collection(SUMMARIES):
            value = jax.lax.stop_gradient(value)
            is_plain = verbosity == DEFAULT_VERBOSITY
            layer.sow(SUMMARIES, name, value if is_plain else Summary(value, kind, verbosity))
    elif layer.is_mutable_collection(SUMMARY_ARRAYS):
        kept = _counts(value) if kind == "histogram" else _images(value, owner=owner)
        layer.sow(SUMMARY_ARRAYS, name, Summary(kept, kind, verbosity))
    elif layer.is_mutable_collection(SUMMARIES):
        layer.sow(SUMMARIES, name, Summary(None, kind, verbosity))


def _counts(value: jax.Array) -> BinCounts:
    return BinCounts.of(jax.lax.stop_gradient(value), LOG_EDGES)


def _images(value: jax.Array, *, owner: str) -> jax.Array:
    """The first rows, uint8 `[rows, height, width, channels]`."""
    shape = jnp.shape(value)
    if len(shape) != 4 or shape[-1] not in (1, 3, 4):
        raise ValueError(
            f"{owner}: an image summary of shape {list(shape)}; expected [rows, height, width,"
            " channels] with 1, 3 or 4 channels"
        )
    images = jax.lax.stop_gradient(jnp.asarray(value)[:MAX_IMAGES])
    if images.dtype == jnp.uint8:
        return images
    return jnp.round(jnp.clip(images.astype(jnp.float32), 0.0, 1.0) * 255).astype(jnp.uint8)
