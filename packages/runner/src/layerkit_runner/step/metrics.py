"""Metrics of steps, and their reduction over microbatches, shards and batches.

    WeightedScalar    a mean, reduced by Σ value·weight / Σ weight
    LossSum           a sum of means, each reduced with its own weight
    Maximum           a largest value, reduced by the maximum
    BinCounts         a histogram over fixed bins, whose counts are added

`StepContext` reduces them over shards on the devices, and `OverBatches` over batches on the host in
double precision. `ByExample` collects one value for each example of a data set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from layerkit.base.base_model import WeightedScalar
from layerkit.base.step_reports import AuxLoss, BinCounts
from layerkit_runner.errors import UsageError


class Maximum(struct.PyTreeNode):
    """The largest of some values, a float32 scalar; −∞ if there are none."""

    value: jax.Array


class LossSum(struct.PyTreeNode):
    """A loss that is a sum of means, each with its own weight.

    Attributes:
      parts: Terms of the loss, then the auxiliary losses of layers.
      num_terms: Number of parts that are terms.
    """

    parts: tuple[AuxLoss, ...]
    num_terms: int = struct.field(pytree_node=False)

    @classmethod
    def of(cls, terms: Sequence[WeightedScalar], aux: Sequence[AuxLoss]) -> LossSum:
        """Return the sum of terms and auxiliary losses."""
        parts = (*(AuxLoss((term.value[None],), term.weight) for term in terms), *aux)
        return cls(parts, len(terms))

    @property
    def value(self) -> jax.Array:
        """The loss, a float32 scalar; a part without weight is 0, as in training."""
        return sum((jnp.sum(part.value) for part in self.parts), start=jnp.float32(0))

    @property
    def weight(self) -> jax.Array:
        """Weight of the first term."""
        return self.parts[0].weight


Reported = WeightedScalar | LossSum | Maximum | BinCounts


def reduce_microbatches(metric: Reported) -> Reported:
    """Return the metric of a batch from those of its microbatches `[microbatches, ...]`."""
    if isinstance(metric, WeightedScalar):
        # The value of a microbatch of weight 0 may be NaN.
        value = jnp.where(metric.weight > 0, metric.value, 0.0)
        weight = jnp.sum(metric.weight)
        return WeightedScalar(jnp.sum(value * metric.weight) / jnp.maximum(weight, 1e-30), weight)
    if isinstance(metric, Maximum):
        return Maximum(jnp.max(metric.value))
    return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), metric)


def reduce_shards(metric: Reported, context: StepContext) -> Reported:
    """Return the metric of the global batch from that of each shard."""
    if isinstance(metric, WeightedScalar):
        value = jnp.where(metric.weight > 0, metric.value, 0.0)
        total, weight = context.batch_sum((value * metric.weight, metric.weight))
        return WeightedScalar(total / jnp.maximum(weight, 1e-30), weight)
    if isinstance(metric, LossSum):
        totals = context.batch_sum([part.totals() for part in metric.parts])
        return metric.replace(parts=tuple(map(AuxLoss.from_totals, totals)))
    if isinstance(metric, Maximum):
        return context.batch_max(metric)
    return context.batch_sum(metric)


class OverBatches:
    """The reduction of metrics over global batches."""

    def __init__(self) -> None:
        """Start without metrics."""
        self._totals: dict[str, Any] = {}

    def add(self, metrics: Mapping[str, Reported]) -> None:
        """Add the metrics of one global batch, once they are computed."""
        for name, metric in jax.device_get(dict(metrics)).items():
            totals = _float64_totals(metric)
            if name in self._totals:
                # Unlike Python's max, np.maximum propagates NaN.
                add = np.maximum if isinstance(metric, Maximum) else np.add
                totals = jax.tree.map(add, self._totals[name], totals)
            self._totals[name] = totals

    def means(self) -> dict[str, float]:
        """Return means and maxima by name. A metric without any weight is NaN."""
        means = {}
        for name, total in self._totals.items():
            if isinstance(total, LossSum):
                parts: Any = total.parts  # as `_float64_totals` returns them
                has_weight = any(weight > 0 for *_, weight in parts[: total.num_terms])
                means[name] = sum(map(_loss_of_totals, parts)) if has_weight else np.nan
            elif isinstance(total, Maximum):
                means[name] = np.nan if total.value == -np.inf else float(total.value)
        return means

    def histograms(self) -> dict[str, BinCounts]:
        """Return histograms by name, in double precision on the host."""
        return {name: x for name, x in self._totals.items() if isinstance(x, BinCounts)}

    def weight(self, name: str) -> float:
        """Return the total weight of the metric `name`; 0 before anything was added."""
        total = self._totals.get(name)
        parts: Any = total.parts if isinstance(total, LossSum) else [(0.0,)]
        return float(parts[0][-1])


def _float64_totals(metric: Reported) -> Any:
    """Return the metric of a batch in double precision; a mean as sums of its parts."""
    metric = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), metric)
    if isinstance(metric, WeightedScalar):
        metric = LossSum.of([metric], [])
    if not isinstance(metric, LossSum):
        return metric
    parts = []
    for part in metric.parts:
        # The value of a batch of weight 0 may be NaN.
        weight = part.weight[..., None]
        parts.append((*(np.where(weight > 0, x, 0.0) * weight for x in part.factors), part.weight))
    return metric.replace(parts=tuple(parts))


def _loss_of_totals(totals: tuple[np.ndarray, ...]) -> float:
    *sums, weight = totals
    divisor = np.maximum(weight, 1e-30)[..., None]
    return float(np.sum(np.prod([total / divisor for total in sums], axis=0)))


@dataclasses.dataclass(frozen=True)
class StepContext:
    """Reductions over the shards of a batch, for step functions of any partitioner.

    Attributes:
      batch_sum: Function that adds a tree of arrays over all shards of the batch.
      batch_max: Function that takes the maximum of a tree of arrays over all shards.
      fold_shard: Function that makes a random key different on each shard.
      num_shards: Number of shards of the batch; 1 under SPMD.
      row_shards: Number of devices that the rows of a step are split over; 1 under pmap.
      optimizer_layout: Layout of the optimizer's arrays; None if each device holds them whole. See
        `layerkit_runner.optim.weight_selection.Layout`.
    """

    batch_sum: Callable[[Any], Any]
    batch_max: Callable[[Any], Any]
    fold_shard: Callable[[jax.Array], jax.Array]
    num_shards: int
    row_shards: int = 1
    optimizer_layout: Callable[..., Any] | None = None

    def mean_metrics(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return the metrics of the global batch from those of each shard; see `Reported`."""
        return {name: reduce_shards(metric, self) for name, metric in metrics.items()}


GLOBAL_BATCH = StepContext(
    batch_sum=lambda tree: tree,
    batch_max=lambda tree: tree,
    fold_shard=lambda key: key,
    num_shards=1,
)


Value = TypeVar("Value")


class ByExample(Generic[Value]):
    """A collection of one value for each example, without padding (rows of provenance -1)."""

    def __init__(self, dataset: str) -> None:
        """Start without values; `dataset` is the name of the data set in error messages."""
        self._dataset = dataset
        self.values: dict[int, Value] = {}

    def add(self, provenance: Any, values: Sequence[Value]) -> None:
        """Add the value of each row of a global batch, whose numbers `[batch]` are `provenance`.

        Raises:
          UsageError: An example was added before.
        """
        for number, value in zip(np.asarray(provenance).tolist(), values, strict=True):
            if number < 0:
                continue
            if number in self.values:
                raise UsageError(
                    "an example occurs twice in one evaluation",
                    owner=f"data set {self._dataset!r}",
                    field="provenance",
                    value=number,
                )
            self.values[number] = value


def as_floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Convert metrics, such as NumPy scalars, to Python floats."""
    return {name: float(value) for name, value in metrics.items()}
