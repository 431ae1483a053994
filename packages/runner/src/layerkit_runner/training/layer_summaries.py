"""The summaries that layers report, by path: scalars with each step, arrays at summary steps.

Histograms and images are computed by a program of their own, which runs the model forward once more
before a step that is summarized, on the same rows and with the same random numbers. A run whose
layers report none never has it, and a step that is not summarized pays nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from layerkit.summaries import DEFAULT_VERBOSITY, MAX_IMAGES, Summary
from layerkit_runner.observers import Histogram
from layerkit_runner.training.gradients import microbatch_keys, split_rows
from layerkit_runner.training.metrics import StepContext, histogram_of

PREFIX = "summaries/"

ArraySummaries = tuple[dict[str, Any], dict[str, jax.Array]]
"""Histograms `[layers..., bins]` and images uint8 `[rows, layers..., height, width, channels]`."""


def by_path(tree: Any, *, verbosity: int) -> dict[str, Any]:
    """What layers reported, arrays or `Summary`, by the path of the layer and the name.

    Args:
      tree: A collection of summaries, as Flax gives it.
      verbosity: The highest of those to keep.
    """
    flat = {}
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_summary)
    for path, leaf in leaves:
        own = leaf.verbosity if _is_summary(leaf) else DEFAULT_VERBOSITY
        if own > verbosity:
            continue
        parts = [str(getattr(part, "key", getattr(part, "idx", part))) for part in path]
        name = "/".join(parts[:-1]) + ("" if parts[-1] == "0" else f"_{parts[-1]}")
        flat[PREFIX + name] = leaf
    return flat


def scalars_and_marks(tree: Any, context: StepContext, *, verbosity: int) -> dict[str, Any]:
    """Scalars, averaged over shards and over repeated layers, and marks of arrays.

    Args:
      tree: The collection of scalar summaries.
      context: How the step is spread.
      verbosity: The highest of those to keep.

    Returns:
      A mark is a `Summary` of no array, which says that a layer would report one.
    """
    found = by_path(tree, verbosity=verbosity)
    for name, leaf in found.items():
        value = leaf.value if _is_summary(leaf) else leaf
        if value is not None:
            found[name] = context.batch_sum(jnp.mean(value) / context.num_shards)
    return found


def array_summaries(
    run: Callable[[Any, jax.Array], Any],
    batch: Any,
    key: jax.Array,
    context: StepContext,
    *,
    microbatches: int,
    verbosity: int,
) -> ArraySummaries:
    """The histograms and images that layers report of a batch.

    Args:
      run: `(rows, key) -> the collection of array summaries`.
      batch: Arrays `[rows, ...]` of one shard.
      key: Of this shard's random numbers.
      context: How the step is spread.
      microbatches: Into how many parts the rows are divided, one of which is run at a time.
      verbosity: The highest of the summaries to keep.
    """
    if microbatches == 1:
        found = by_path(run(batch, key), verbosity=verbosity)
    else:
        parts = split_rows(batch, microbatches, multiple=context.row_shards)
        keys = microbatch_keys(key, microbatches)
        stacked = jax.lax.map(lambda part: run(*part), (parts, keys))
        found = {
            name: summary.merged(axis=0)
            for name, summary in by_path(stacked, verbosity=verbosity).items()
        }
    histograms = {name: s.value for name, s in found.items() if s.kind == "histogram"}
    # Rows in front, on which the shards are put together.
    images = {name: jnp.moveaxis(s.value, -4, 0) for name, s in found.items() if s.kind == "image"}
    return context.batch_sum(histograms), images


def for_observers(
    fetched: ArraySummaries,
) -> tuple[dict[str, Histogram], dict[str, np.ndarray]]:
    """Fetched summaries as observers take them, one for each of repeated layers and each row."""
    histograms, images = {}, {}
    for name, counts in fetched[0].items():
        for index in np.ndindex(counts.counts.shape[:-1]):
            own = jax.tree.map(lambda leaf, index=index: leaf[index], counts)
            histograms[name + _suffix(index)] = _trimmed(histogram_of(own))
    for name, stacked in fetched[1].items():
        for index in np.ndindex(stacked.shape[1:-3]):
            for row, image in enumerate(stacked[(slice(MAX_IMAGES), *index)]):
                images[f"{name}{_suffix(index)}/{row}"] = np.asarray(image)
    return histograms, images


def has_arrays(scalars: Mapping[str, Any]) -> bool:
    """Whether there is a mark among what a step reports."""
    return any(_is_summary(value) for value in scalars.values())


def _is_summary(value: Any) -> bool:
    return isinstance(value, Summary)


def _suffix(index: tuple[int, ...]) -> str:
    """`/layer_3`, of the layer 3 of several; with several axes `/layer_0_3`."""
    return "/layer_" + "_".join(map(str, index)) if index else ""


def _trimmed(histogram: Histogram) -> Histogram:
    """Without the empty bins at both ends, which would hide what there is."""
    filled = np.flatnonzero(histogram.counts)
    if not len(filled):
        return histogram
    first, last = filled[0], filled[-1]
    return Histogram(
        edges=histogram.edges[first : last + 2],
        counts=histogram.counts[first : last + 1],
        sum=histogram.sum,
        sum_of_squares=histogram.sum_of_squares,
    )
