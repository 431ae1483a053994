"""How the weights are spread: a norm and a histogram of each, for the curves.

It is a program of its own beside the training step, run every `weight_summary_interval_steps`: a
run that does not ask pays nothing, and one that asks pays at those steps alone. Every device reads
its own part of a weight, and none is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from layerkit_runner.observers import Histogram
from layerkit_runner.partitioning import Partitioner

_NUM_BUCKETS = 64


def weight_summary_fn(partitioner: Partitioner) -> Callable[[Any], dict[str, Any]]:
    """A jitted function from the weights (nested dicts `[...]`) to what `histograms` takes."""

    def summarize(params: Any) -> dict[str, Any]:
        flat = flatten_dict(params, sep="/")
        return {
            f"vars/{path}": _spread(leaf.astype(jnp.float32))
            for path, leaf in flat.items()
            if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size
        }

    return jax.jit(summarize, out_shardings=partitioner.replicated())


def _spread(x: jax.Array) -> dict[str, jax.Array]:
    edges = jnp.linspace(jnp.min(x), jnp.max(x), _NUM_BUCKETS + 1)
    # One pass for each edge, which partitions like any sum; scattering into buckets would not.
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
    """What was computed, on the host, in the form that observers take."""
    return {
        name: Histogram(
            edges=np.asarray(spread["edges"], np.float64),
            counts=np.asarray(spread["counts"], np.float64),
            sum=float(spread["sum"]),
            sum_of_squares=float(spread["sum_of_squares"]),
        )
        for name, spread in fetched.items()
    }
