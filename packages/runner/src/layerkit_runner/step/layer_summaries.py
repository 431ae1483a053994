"""Summaries of layers by path: scalars of each step, histograms and images of summary steps.

A separate program computes histograms and images, by running the forward pass once more before a
summary step, with the same rows and random numbers. Other steps have no additional cost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from layerkit.base.step_reports import (
    DEFAULT_VERBOSITY,
    LOG_EDGES,
    LOGGED_IMAGES,
    BinCounts,
    Summary,
)
from layerkit_runner.step.gradients import microbatch_keys, split_rows
from layerkit_runner.step.metrics import StepContext

PREFIX = "summaries/"

ArraySummaries = tuple[dict[str, Any], dict[str, jax.Array]]
"""Histograms `[layers..., bins]` and images uint8 `[rows, layers..., height, width, channels]`."""


def flatten_summaries(tree: Any, *, verbosity: int) -> dict[str, Any]:
    """Return the summaries of layers, arrays or `Summary`, by path of the layer and name."""
    flat = {}
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_summary)
    for path, leaf in leaves:
        needed = leaf.verbosity if _is_summary(leaf) else DEFAULT_VERBOSITY
        if needed > verbosity:
            continue
        parts = [str(getattr(part, "key", getattr(part, "idx", part))) for part in path]
        name = "/".join(parts[:-1]) + ("" if parts[-1] == "0" else f"_{parts[-1]}")
        flat[PREFIX + name] = leaf
    return flat


def scalars_and_marks(tree: Any, context: StepContext, *, verbosity: int) -> dict[str, Any]:
    """Return scalars by path, averaged over shards and repeated layers, and marks of arrays.

    A mark is a `Summary` without an array: a layer reports an array at summary steps.
    """
    summaries = flatten_summaries(tree, verbosity=verbosity)
    for name, leaf in summaries.items():
        value = leaf.value if _is_summary(leaf) else leaf
        if value is not None:
            summaries[name] = context.batch_sum(jnp.mean(value) / context.num_shards)
    return summaries


def array_summaries(
    run: Callable[[Any, jax.Array], Any],
    batch: Any,
    key: jax.Array,
    context: StepContext,
    *,
    microbatches: int,
    verbosity: int,
) -> ArraySummaries:
    """Return the histograms and images that layers report of a batch."""
    if microbatches == 1:
        summaries = flatten_summaries(run(batch, key), verbosity=verbosity)
    else:
        parts = split_rows(batch, microbatches, multiple=context.row_shards)
        keys = microbatch_keys(key, microbatches)
        stacked = jax.lax.map(lambda part: run(*part), (parts, keys))
        summaries = {
            name: summary.merged(axis=0)
            for name, summary in flatten_summaries(stacked, verbosity=verbosity).items()
        }
    histograms = {name: s.value for name, s in summaries.items() if s.kind == "histogram"}
    # The rows come first, because the outputs of the shards are concatenated along that axis.
    images = {n: jnp.moveaxis(s.value, -4, 0) for n, s in summaries.items() if s.kind == "image"}
    return context.batch_sum(histograms), images


def split_layers(
    fetched: ArraySummaries,
) -> tuple[dict[str, BinCounts], dict[str, np.ndarray]]:
    """Return the histograms of each repeated layer, and the images of each layer and row."""
    histograms, images = {}, {}
    for name, counts in fetched[0].items():
        for index in np.ndindex(counts.counts.shape[:-1]):
            histograms[name + _suffix(index)] = jax.tree.map(
                lambda leaf, index=index: leaf[index], counts
            )
    for name, stacked in fetched[1].items():
        for index in np.ndindex(stacked.shape[1:-3]):
            for row, image in enumerate(stacked[(slice(LOGGED_IMAGES), *index)]):
                images[f"{name}{_suffix(index)}/{row}"] = np.asarray(image)
    return histograms, images


@functools.lru_cache
def weight_histograms_fn(
    replicated: jax.sharding.Sharding,
) -> Callable[[Any], dict[str, BinCounts]]:
    """Return a jitted function from weights to their counts by `vars/PATH`, replicated.

    Every device reads its own shard of a weight; no weight is gathered.
    """

    def count(params: Any) -> dict[str, BinCounts]:
        flat = flatten_dict(params, sep="/")
        floats = {p: x for p, x in flat.items() if jnp.issubdtype(x.dtype, jnp.floating) and x.size}
        return {f"vars/{path}": BinCounts.of(leaf, LOG_EDGES) for path, leaf in floats.items()}

    return jax.jit(count, out_shardings=replicated)


def has_arrays(scalars: Mapping[str, Any]) -> bool:
    """Return whether the scalars of a step hold a mark; see `scalars_and_marks`."""
    return any(_is_summary(value) for value in scalars.values())


def _is_summary(value: Any) -> bool:
    return isinstance(value, Summary)


def _suffix(index: tuple[int, ...]) -> str:
    return "/layer_" + "_".join(map(str, index)) if index else ""
