"""Reports of layers that are combined over all parts of a training step's batch.

The parts are microbatches, replicas and the microbatches of a pipeline. An auxiliary loss is a
mean, or a product of means, and each mean has the weight of its part, such as its number of tokens.
A total is added up over the parts, and then moves a variable once.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from flax.traverse_util import flatten_dict, unflatten_dict

from layerkit.base.diagnostics import immutable_error, warn_of_unset_train
from layerkit.base.summaries import SUMMARIES, SUMMARY_ARRAYS, Summary

# Names of the Flax collections that layers report to.
AUX_LOSS = "aux_loss"
AUX_MEANS = "aux_loss_means"
STEP_TOTALS = "step_totals"
REPORTS = (AUX_LOSS, AUX_MEANS, STEP_TOTALS, SUMMARIES, SUMMARY_ARRAYS)

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


def is_report(leaf: Any) -> bool:
    """Return whether a leaf of a collection is an `AuxLoss` or a `StepTotal`."""
    return isinstance(leaf, AuxLoss | StepTotal)


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

    def is_merged(leaf: Any) -> bool:
        return isinstance(leaf, AuxLoss | StepTotal | Summary)

    return {
        name: jax.tree.map(
            functools.partial(combine, is_mean=name in (AUX_LOSS, SUMMARIES)),
            tree,
            is_leaf=is_merged,
        )
        for name, tree in reports.items()
    }
