"""Finds the arrays of a state that hold NaN or an infinity, on the devices that hold them.

Weights have to be finite. Other parts of a state may hold an infinity, such as the best value so
far of an optimizer that looks for plateaus, but no NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from layerkit_runner.checkpointing import structure
from layerkit_runner.errors import NonFiniteError, first_names

_MAY_BE_INFINITE = frozenset({"opt_state", "non_trainable"})


def nonfinite_leaves(
    leaves: Mapping[structure.LeafPath, jax.Array],
) -> list[structure.LeafPath]:
    """Return the paths of the arrays that hold NaN or, where it may not be, an infinity.

    All processes that share the arrays have to call it, and get the same result.

    Args:
      leaves: Arrays of a state by path; the first name is the part of the state.
    """
    flags = {}
    for path, leaf in leaves.items():
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            mesh = leaf.sharding.mesh if isinstance(leaf.sharding, NamedSharding) else None
            flags[path] = _finder(mesh, path[0] in _MAY_BE_INFINITE)(leaf)
    return [path for path, is_bad in jax.device_get(flags).items() if is_bad]


def require_finite(claim: str, leaves: Mapping[structure.LeafPath, jax.Array], hint: str) -> None:
    """Raise NonFiniteError if an array of a state holds NaN or an infinity.

    Args:
      claim: First words of the error, as in "The checkpoint of step 4 is not written".
      leaves: As for `nonfinite_leaves`.
      hint: Last sentence of the error.
    """
    found = nonfinite_leaves(leaves)
    if found:
        raise NonFiniteError(f"{claim}: {describe(found)}. Expected finite values. {hint}")


def describe(paths: Sequence[structure.LeafPath]) -> str:
    """Return a text that names the first of the arrays that `nonfinite_leaves` found."""
    return f"NaN or infinite values in {first_names(map(structure.join, paths), limit=4)}"


# One program for all arrays that are alike, such as a weight and its moments, and for all saves.
@functools.lru_cache
def _finder(mesh: Any, may_be_infinite: bool) -> Callable[[jax.Array], jax.Array]:  # noqa: FBT001
    def find(x: jax.Array) -> jax.Array:
        return jnp.any(jnp.isnan(x) if may_be_infinite else ~jnp.isfinite(x))

    # Whole on every process, so that each can read it.
    return jax.jit(find, out_shardings=mesh and NamedSharding(mesh, PartitionSpec()))
