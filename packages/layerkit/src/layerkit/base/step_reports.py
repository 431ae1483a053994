"""Reports of layers that are combined over all parts of a training step's batch.

A layer reports auxiliary losses, totals, and summaries: scalars, histograms and images. The parts
are microbatches, replicas and the microbatches of a pipeline. An auxiliary loss is a mean, or a
product of means, and each mean has the weight of its part, such as its number of tokens. A total is
added up over the parts, and then moves a variable once. A maximum over the parts scales weights.

Histograms and images cost more than a scalar. A layer computes them only if the collection
`summary_arrays` is mutable, as at the few steps that are summarized. At other steps it reports a
placeholder without an array, so that the runner knows which summaries exist.
"""

from __future__ import annotations

import functools
import math
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from flax.traverse_util import flatten_dict, unflatten_dict

from layerkit.config.checks import require
from layerkit.errors import ConfigError

# Names of the Flax collections that layers report to.
SUMMARIES = "summaries"
SUMMARY_ARRAYS = "summary_arrays"
AUX_LOSS = "aux_loss"
AUX_MEANS = "aux_loss_means"
STEP_TOTALS = "step_totals"
STEP_MAXIMA = "step_maxima"
REPORTS = (AUX_LOSS, AUX_MEANS, STEP_TOTALS, STEP_MAXIMA, SUMMARIES, SUMMARY_ARRAYS)

Kind = Literal["scalar", "histogram", "image"]

DEFAULT_VERBOSITY = 3
"""Verbosity of summaries by default, and the highest that a task reports by default (as in Pax)."""

LOGGED_IMAGES = 3
"""Largest number of images that a summary keeps of a batch."""


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


_POSITIVE_EDGES = [math.pow(2.0, step / 4) for step in range(-40, 41)]
LOG_EDGES = (*(-edge for edge in reversed(_POSITIVE_EDGES)), *_POSITIVE_EDGES)
"""Edges from −1024 to 1024 with four bins per octave, and one bin around 0."""


class Summary(struct.PyTreeNode):
    """A value that a layer reports.

    Attributes:
      value: A scalar, an array that counts as its mean, a `BinCounts`, or images uint8 `[rows,
        height, width, channels]` with at most `LOGGED_IMAGES` rows; None in a placeholder. Repeated
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
    is_image = len(shape) == 4 and shape[-1] in (1, 3, 4)
    expected = "[rows, height, width, channels] with 1, 3 or 4 channels"
    require(is_image, owner, "shape of the image summary", list(shape), expected)
    images = jax.lax.stop_gradient(jnp.asarray(value)[:LOGGED_IMAGES])
    if images.dtype == jnp.uint8:
        return images
    is_float = jnp.issubdtype(images.dtype, jnp.floating)
    expected = "uint8 from 0 to 255, or floats from 0 to 1"
    require(is_float, owner, "dtype of the image summary", images.dtype.name, expected)
    return jnp.round(jnp.clip(images.astype(jnp.float32), 0.0, 1.0) * 255).astype(jnp.uint8)


Rule = Callable[[jax.Array, jax.Array], jax.Array]
"""Function `(value, total) -> value` of a variable; both may have leading axes of layers."""


class AuxLoss(struct.PyTreeNode):
    """An auxiliary loss of a part of a batch: the summed entries of a product of means.

    Attributes:
      factors: Means, float32 `[..., entries]` each; the leading axes are those of repeated layers.
      weight: Weight of the part in each mean, such as its number of tokens, float32 `[...]`.
    """

    factors: tuple[jax.Array, ...]
    weight: jax.Array

    @property
    def value(self) -> jax.Array:
        """The loss, float32 `[...]`."""
        return jnp.sum(functools.reduce(operator.mul, self.factors), axis=-1)

    def totals(self) -> tuple[Any, ...]:
        """Return the sums (Σ weight·factor, …, Σ weight), which are added over parts."""
        weight = self.weight[..., None]
        sums = [jnp.where(weight > 0, factor, 0.0) * weight for factor in self.factors]
        return (*sums, self.weight)

    @classmethod
    def from_totals(cls, totals: Sequence[jax.Array]) -> AuxLoss:
        """Return the loss of several parts from their added `totals`; 0 without weight.

        Args:
          totals: Sums of weighted factors, float32 `[..., entries]` each, and of weights `[...]`.
        """
        *sums, weight = totals
        divisor = jnp.maximum(weight, 1e-30)[..., None]
        return cls(tuple(total / divisor for total in sums), weight)

    def merged(self, axis: int) -> AuxLoss:
        """Return the loss of several parts, which are stacked on `axis`."""
        return self.from_totals([jnp.sum(total, axis) for total in self.totals()])


class StepTotal(struct.PyTreeNode):
    """A total over the tokens of a part of a batch, which moves a variable.

    Attributes:
      total: Array `[...]`.
      rule: Function that moves the variable; see `Rule`.
    """

    total: jax.Array
    rule: Rule = struct.field(pytree_node=False)

    def merged(self, axis: int) -> StepTotal:
        """Return the total of several parts, which are stacked on `axis`."""
        return self.replace(total=jnp.sum(self.total, axis))


class StepMaximum(struct.PyTreeNode):
    """A maximum over the tokens of a part of a batch, which scales weights after the update.

    Attributes:
      value: Array `[...]`.
      rule: Hashable function from `value` to the factors of the layer's weights by path, which
        broadcast to them; all may have leading axes of layers.
    """

    value: jax.Array
    rule: Callable[[jax.Array], Mapping[Any, jax.Array]] = struct.field(pytree_node=False)

    def merged(self, axis: int) -> StepMaximum:
        """Return the maximum of several parts, which are stacked on `axis`."""
        return self.replace(value=jnp.max(self.value, axis))


def is_report(leaf: Any) -> bool:
    """Return whether a leaf of a collection is a report of a class of this module."""
    return isinstance(leaf, AuxLoss | StepTotal | StepMaximum | Summary)


def sow_aux_loss(layer: Any, name: str, factors: Sequence[Any], *, weight: Any) -> None:
    """Store an auxiliary loss of a layer; see `BaseLayer.add_aux_loss`."""
    if not layer.is_mutable_collection(AUX_LOSS):
        if layer.is_training:
            raise immutable_error(layer, "the auxiliary loss would be lost", name, AUX_LOSS)
        return
    warn_of_unset_train(layer, collection=AUX_LOSS)
    factors = [jnp.asarray(factor, jnp.float32) for factor in factors]
    if layer.is_mutable_collection(AUX_MEANS):
        weight = jnp.asarray(1.0 if weight is None else weight, jnp.float32)
        layer.sow(AUX_MEANS, name, AuxLoss(tuple(map(jnp.ravel, factors)), weight))
    else:
        product = functools.reduce(operator.mul, factors)
        layer.sow(AUX_LOSS, name, product if len(factors) == 1 else jnp.sum(product))


def aux_losses(updates: Any) -> list[AuxLoss]:
    """Return the auxiliary losses in the collections that a call has changed."""
    means = jax.tree.leaves(updates.get(AUX_MEANS, {}), is_leaf=is_report)
    plain = jax.tree.leaves(updates.get(AUX_LOSS, {}))
    return [*means, *(AuxLoss((jnp.ravel(leaf),), jnp.float32(1.0)) for leaf in plain)]


def sow_total(layer: Any, name: str, total: jax.Array, rule: Rule) -> None:
    """Store a total `[...]` that moves a variable; see `BaseLayer.update_var_by_total`."""
    if layer.is_mutable_collection(STEP_TOTALS):
        layer.sow(STEP_TOTALS, name, StepTotal(total, rule))
    else:
        layer.update_var(name, rule(layer.get_var(name), total))


def apply_totals(variables: Any, totals: Any) -> Any:
    """Return nested variables `[...]`, moved by the nested totals of a whole batch."""
    moved = flatten_dict(variables)
    for path, reports in flatten_dict(totals).items():
        total = functools.reduce(operator.add, [report.total for report in reports])
        moved[path] = reports[0].rule(moved[path], total).astype(moved[path].dtype)
    return unflatten_dict(moved)


def apply_maxima(weights: Any, maxima: Any) -> Any:
    """Return nested trained weights `[...]`, scaled by nested maxima; raise if one is frozen."""
    scaled = flatten_dict(weights)
    for (*layer, name), reports in flatten_dict(maxima).items():
        maximum = functools.reduce(jnp.maximum, [report.value for report in reports])
        for relative, factor in reports[0].rule(maximum).items():
            path = (*layer, *relative)
            expected = f"a trained weight, for {name}"
            require(path in scaled, "Learner", "/".join(path), "frozen", expected)
            scaled[path] = (scaled[path] * factor).astype(scaled[path].dtype)
    return unflatten_dict(scaled)


def combine_reports(
    reports: Mapping[str, Any], where_real: tuple[np.ndarray, np.ndarray], *, is_circular: bool
) -> dict[str, Any]:
    """Return the reports of a pipeline's stages from those of all ticks, by collection.

    Args:
      reports: Nested reports `[ticks, stages, ...]` by collection.
      where_real: Indices of the ticks int `[repeats, microbatches, stages]`, and of the stages int
        `[stages]`, without bubbles.
      is_circular: True to keep the axis `repeats`, whose size is otherwise 1.
    """

    def combine(report: Any, *, is_mean: bool) -> Any:
        parts = jax.tree.map(lambda leaf: leaf[where_real], report)
        if is_mean:
            combined = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=1), parts)
        else:
            combined = parts.merged(axis=1)
        return combined if is_circular else jax.tree.map(lambda leaf: leaf[0], combined)

    return {
        name: jax.tree.map(
            functools.partial(combine, is_mean=name in (AUX_LOSS, SUMMARIES)),
            tree,
            is_leaf=is_report,
        )
        for name, tree in reports.items()
    }


def immutable_error(layer: Any, problem: str, field: str, collection: str) -> ConfigError:
    """Return the error about a value of `field` that an immutable collection would lose."""
    hint = f"Apply with mutable=['{collection}', …]"
    return ConfigError(problem, owner=layer.path_name, field=field, hint=hint)


def warn_of_unset_train(layer: Any, *, collection: str) -> None:
    """Warn if a model with `train=None` is applied as in training.

    Its gradients would be those of evaluation, without dropout, noise and expert capacities.

    Args:
      layer: Layer that depends on `train`.
      collection: Name of a collection that is mutable only in training.
    """
    if layer.inherited("train") is not None or layer.scope is None:
        return
    if not layer.is_mutable_collection(collection) or layer.is_initializing():
        return
    warnings.warn(
        f"{layer._root().path_name}: train=None while {collection!r} is mutable, as in training."
        " Dropout and noise are off, as in evaluation. Apply model.clone(train=True) to train, or"
        " model.clone(train=False) to evaluate.",
        stacklevel=3,
    )
