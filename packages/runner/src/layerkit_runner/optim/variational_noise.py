"""Variational noise: the loss is taken at weights that are shaken a little (Graves, 2011)."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from layerkit.config import Configurable
from layerkit.near_names import near_names
from layerkit_runner.errors import UsageError, first_names
from layerkit_runner.optim.trained_weights import check_patterns

# Folded into a step's key, so that no layer draws these numbers.
_STREAM = 0x766E


class VariationalNoise(Configurable):
    """Normal noise on weights while they are differentiated; the stored ones are never changed.

    It is drawn anew at every step, is the same for all rows of it, and is left out of evaluation
    and decoding (A. Graves, "Practical Variational Inference for Neural Networks", 2011).

    Attributes:
      scale: Its standard deviation.
      weights: Regular expressions, each of which has to match the whole path of one weight at
        least.
      start_step: Before how many completed steps there is none.

    Raises:
      UsageError: a number out of range, or what is no pattern.
    """

    scale: float = 0.0
    weights: Sequence[str] = (".*",)
    start_step: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.scale < math.inf:
            raise UsageError(
                f"task.vn.scale={self.scale} must be positive and finite; for no noise, vn=None"
            )
        if not self.start_step >= 0:
            raise UsageError(f"task.vn.start_step={self.start_step} must be at least 0")
        check_patterns(self.weights, field="task.vn.weights")

    def check(self, params: Any) -> None:
        """Raises UsageError when a pattern matches no weight, or there is no pattern."""
        names = list(flatten_dict(params, sep="/"))
        if not self.weights:
            raise UsageError("task.vn.weights=(): expected at least one pattern")
        for pattern in self.weights:
            if not any(re.fullmatch(pattern, name) for name in names):
                raise UsageError(
                    f"task.vn.weights: {pattern!r} matches no weight{near_names(pattern, names)}"
                    f" A pattern has to match the whole path. Weights: {first_names(names)}."
                )

    def add(self, params: Any, key: jax.Array, *, step: jax.Array) -> Any:
        """`params`, nested dicts `[...]`, with noise on those that match.

        Args:
          params: All weights.
          key: Of the step, the same on every shard of the batch.
          step: int32 scalar, completed steps.
        """
        key = jax.random.fold_in(key, _STREAM)
        scale = jnp.where(step >= self.start_step, jnp.float32(self.scale), 0.0)

        def shake(path: tuple[str, ...], leaf: jax.Array) -> jax.Array:
            name = "/".join(path)
            if not any(re.fullmatch(pattern, name) for pattern in self.weights):
                return leaf
            own = jax.random.fold_in(key, zlib.crc32(name.encode()))
            noise = scale * jax.random.normal(own, leaf.shape, jnp.float32)
            return leaf + noise.astype(leaf.dtype)

        flat = flatten_dict(params)
        return unflatten_dict({path: shake(path, leaf) for path, leaf in flat.items()})
