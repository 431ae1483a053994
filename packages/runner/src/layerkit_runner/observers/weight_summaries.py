"""A norm and a histogram of each weight, for the curves.

They are computed by a program of their own, every `weight_summary_interval_steps`: a run that asks
for none pays nothing, and one that asks pays at those steps alone. Every device reads its own part
of a weight; none is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from layerkit_runner.observers.base import Histogram

_NUM_BUCKETS = 64


def weight_summary_fn(replicated: jax.sharding.Sharding) -> Callable[[Any], dict[str, Any]]:
    """Return a jitted function from the weights to what `histograms` takes.

    Args:
      replicated: Sharding of the results, which every device holds whole.
    """

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
    """Return computed histograms, fetched to the host, as observers take them."""
    return {
        name: Histogram(
            edges=np.asarray(values["edges"], np.float64),
            counts=np.asarray(values["counts"], np.float64),
            sum=float(values["sum"]),
            sum_of_squares=float(values["sum_of_squares"]),
        )
        for name, values in fetched.items()
    }
