"""Norm and histogram of each weight.

A separate program computes them every `weight_summary_interval_steps`, so that other steps cost
nothing. Every device reads its own shard of a weight; no weight is gathered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from layerkit_runner.observers.base import Histogram

_NUM_BUCKETS = 64


@functools.lru_cache
def weight_summary_fn(replicated: jax.sharding.Sharding) -> Callable[[Any], dict[str, Any]]:
    """Return a jitted function from the weights to the argument of `histograms`."""

    def summarize(params: Any) -> dict[str, Any]:
        flat = flatten_dict(params, sep="/")
        return {
            f"vars/{path}": _histogram(leaf.astype(jnp.float32))
            for path, leaf in flat.items()
            if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size
        }

    return jax.jit(summarize, out_shardings=replicated)


def _histogram(x: jax.Array) -> dict[str, jax.Array]:
    edges = jnp.linspace(jnp.min(x), jnp.max(x), _NUM_BUCKETS + 1)
    # One sum for each edge, which XLA partitions; it does not partition a scatter into buckets.
    below = jax.lax.map(lambda edge: jnp.sum(x <= edge, dtype=jnp.float32), edges[1:-1])
    ends = jnp.zeros(1), jnp.full(1, x.size, jnp.float32)
    counts = jnp.diff(jnp.concatenate([ends[0], below, ends[1]]))
    return {
        "edges": edges,
        "counts": counts,
        "sum": jnp.sum(x),
        "sum_of_squares": jnp.sum(jnp.square(x)),
    }


def histograms(fetched: Mapping[str, Any]) -> dict[str, Histogram]:
    """Convert the computed histograms, fetched to the host, for observers."""
    return {
        name: Histogram(
            edges=np.asarray(values["edges"], np.float64),
            counts=np.asarray(values["counts"], np.float64),
            sum=float(values["sum"]),
            sum_of_squares=float(values["sum_of_squares"]),
        )
        for name, values in fetched.items()
    }
