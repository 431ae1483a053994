"""Summaries of layers: scalars, histograms and images.

Histograms and images cost more than a scalar. A layer computes them only if the collection
`summary_arrays` is mutable, as at the few steps that are summarized. At other steps it reports a
placeholder without an array, so that the runner knows which summaries exist.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from layerkit.config.checks import require
from layerkit.errors import ConfigError

# Names of the Flax collections that layers report to.
SUMMARIES = "summaries"
SUMMARY_ARRAYS = "summary_arrays"

Kind = Literal["scalar", "histogram", "image"]
KINDS: tuple[Kind, ...] = ("scalar", "histogram", "image")

DEFAULT_VERBOSITY = 3
"""Verbosity of summaries by default, and the highest that a task reports by default (as in Pax)."""

MAX_IMAGES = 3
"""Largest number of images that a summary keeps of a batch."""

_PER_OCTAVE, _OCTAVES = 4, 10


class BinCounts(struct.PyTreeNode):
    """A histogram over fixed bins, so that the counts of several batches can be added.

    Attributes:
      counts: float32 `[bins]`, the summed weight of the values in each bin (lower edge excluded,
        upper edge included). The first and last bins include all values beyond the edges.
      sum: float32 scalar, Σ weight·value.
      sum_of_squares: float32 scalar, Σ weight·value².
      edges: Ascending bin edges, `bins + 1` numbers.
    """

    counts: jax.Array
    sum: jax.Array
    sum_of_squares: jax.Array
    edges: tuple[float, ...] = struct.field(pytree_node=False)

    @classmethod
    def of(
        cls, values: jax.Array, edges: tuple[float, ...], weights: jax.Array | None = None
    ) -> BinCounts:
        """Count `values` `[...]` by `weights` of that shape; None weights each value by 1.

        Values of weight 0, even if not finite, are left out. NaN counts in the last bin, and makes
        the sums NaN.
        """
        values = jnp.asarray(values, jnp.float32)
        weights = jnp.ones(values.shape) if weights is None else weights
        values = jnp.where(weights > 0, values, 0.0)
        # One pass per edge is partitioned like any sum; scattering into bins is not.
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
    """Return edges from −1024 to 1024 with four bins per octave, and one bin around 0."""
    steps = range(-_OCTAVES * _PER_OCTAVE, _OCTAVES * _PER_OCTAVE + 1)
    positive = [math.pow(2.0, step / _PER_OCTAVE) for step in steps]
    return (*(-edge for edge in reversed(positive)), *positive)


LOG_EDGES = _log_edges()


class Summary(struct.PyTreeNode):
    """A value that a layer reports.

    Attributes:
      value: A scalar, an array that counts as its mean, a `BinCounts`, or images uint8 `[rows,
        height, width, channels]` with at most `MAX_IMAGES` rows; None in a placeholder. Repeated
        layers add leading axes.
      kind: Kind of the value.
      verbosity: Smallest `summary_verbosity` of tasks that report the value.
    """

    value: Any
    kind: Kind = struct.field(pytree_node=False)
    verbosity: int = struct.field(pytree_node=False, default=DEFAULT_VERBOSITY)

    def merged(self, axis: int) -> Summary:
        """Return the summary of a batch from those of its parts, which are stacked on `axis`.

        Scalars and counts are added. Images are those of the first part.
        """
        if self.kind == "image":
            return self.replace(value=jax.lax.index_in_dim(self.value, 0, axis, keepdims=False))
        return self.replace(value=jax.tree.map(lambda leaf: jnp.sum(leaf, axis), self.value))


def sow_summary(layer: Any, name: str, value: Any, *, kind: Kind, verbosity: int) -> None:
    """Store a summary of a layer in its Flax collection, if that collection is mutable.

    Args:
      layer: Layer that reports, a `BaseLayer`.
      name: Name of the summary below the layer.
      value: Reported array; see `BaseLayer.add_summary`.
      kind: Kind of the summary.
      verbosity: Verbosity of the summary; see `Summary`.

    Raises:
      ConfigError: The shape is not that of images.
    """
    owner = f"{layer.path_name}.{name}"
    if kind == "scalar":
        if layer.is_mutable_collection(SUMMARIES):
            value = jax.lax.stop_gradient(value)
            is_plain = verbosity == DEFAULT_VERBOSITY
            layer.sow(SUMMARIES, name, value if is_plain else Summary(value, kind, verbosity))
    elif layer.is_mutable_collection(SUMMARY_ARRAYS):
        if kind == "histogram":
            kept: Any = BinCounts.of(jax.lax.stop_gradient(value), LOG_EDGES)
        else:
            kept = _images(value, owner=owner)
        layer.sow(SUMMARY_ARRAYS, name, Summary(kept, kind, verbosity))
    elif layer.is_mutable_collection(SUMMARIES):
        layer.sow(SUMMARIES, name, Summary(None, kind, verbosity))


def _images(value: jax.Array, *, owner: str) -> jax.Array:
    """Return the images of the first rows, uint8 `[rows, height, width, channels]`."""
    shape = jnp.shape(value)
    if len(shape) != 4 or shape[-1] not in (1, 3, 4):
        raise ConfigError(
            owner=owner,
            field="shape of the image summary",
            value=list(shape),
            expected="[rows, height, width, channels] with 1, 3 or 4 channels",
        )
    images = jax.lax.stop_gradient(jnp.asarray(value)[:MAX_IMAGES])
    if images.dtype == jnp.uint8:
        return images
    is_float = jnp.issubdtype(images.dtype, jnp.floating)
    expected = "uint8 from 0 to 255, or floats from 0 to 1"
    require(is_float, owner, "dtype of the image summary", images.dtype.name, expected)
    return jnp.round(jnp.clip(images.astype(jnp.float32), 0.0, 1.0) * 255).astype(jnp.uint8)
