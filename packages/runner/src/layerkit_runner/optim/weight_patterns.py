"""Weights chosen by regular expressions over their paths: those to train, those to add noise to.

A pattern must match the whole path of a weight, such as `lm/embedding/.*`. The stacked weights of
repeated layers are one weight.
"""

from __future__ import annotations

import dataclasses
import math
import re
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from layerkit.config import Configurable
from layerkit.errors import first_names
from layerkit.near_names import near_names
from layerkit_runner.errors import UsageError, check_patterns

# Folded into the key of a step, so that no layer draws the numbers of the variational noise.
_NOISE_STREAM = 0x766E


def matching_paths(
    pattern: str, paths: Iterable[str], *, field: str, kind: str = "weight"
) -> list[str]:
    """Return the paths that a pattern matches.

    Args:
      pattern: Regular expression.
      paths: Paths of all weights.
      field: Field that holds the pattern, for messages.
      kind: What the paths are, for messages.

    Raises:
      UsageError: The pattern matches no path.
    """
    paths = list(paths)
    found = [path for path in paths if re.fullmatch(pattern, path)]
    if not found:
        raise UsageError(
            f"{field}: {pattern!r} matches no {kind}{near_names(pattern, paths)} A pattern has to"
            f" match the whole path. Weights: {first_names(paths)}."
        )
    return found


@dataclasses.dataclass(frozen=True)
class TrainedWeights:
    """A selection of the weights to train, by default all of them.

    The other weights are frozen: they have no gradient, optimizer state or weight decay, and keep
    their bits. The trained part is a tree of its own with the same paths.

    Attributes:
      trainable: Patterns of the trained weights; None trains all but `frozen`.
      frozen: Patterns of the weights that are not trained.

    Raises:
      UsageError: Both are given, or a pattern is not a regular expression.
    """

    trainable: Sequence[str] | None = None
    frozen: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.trainable is not None and self.frozen:
            raise UsageError(
                "Learner: set trainable or frozen, not both"
                f" ({tuple(self.trainable)} and {tuple(self.frozen)})"
            )
        for field in ("trainable", "frozen"):
            check_patterns(getattr(self, field) or (), label=f"Learner.{field}")

    def select(self, params: Any) -> Any:
        """Return the trained part of a tree of weights, nested dicts of arrays.

        Raises:
          UsageError: A pattern matches no weight, or no weight is left to train.
        """
        if self._is_all:
            return params
        flat = flatten_dict(params)
        field = f"Learner.{'frozen' if self.trainable is None else 'trainable'}"
        matched: set[str] = set()
        for pattern in self.frozen if self.trainable is None else self.trainable:
            matched.update(matching_paths(pattern, map("/".join, flat), field=field))
        trains_matched = self.trainable is not None
        trained = {
            path: leaf
            for path, leaf in flat.items()
            if ("/".join(path) in matched) == trains_matched
        }
        if not trained:
            raise UsageError(f"{field}: no weight is left to train")
        return unflatten_dict(trained)

    def merge(self, params: Any, trained: Any) -> Any:
        """Return `params` with the values of `trained` in place of its trained part."""
        if self._is_all:
            return trained
        return unflatten_dict({**flatten_dict(params), **flatten_dict(trained)})

    def validate_frozen(self, patterns: Sequence[str], params: Any) -> None:
        """Raise an error if weights that the model keeps frozen are trained.

        Args:
          patterns: Patterns of the weights that the model keeps frozen.
          params: All weights.

        Raises:
          UsageError: A trained weight matches one of the patterns.
        """
        if not patterns:
            return
        for path in flatten_dict(self.select(params), sep="/"):
            for pattern in patterns:
                if re.fullmatch(pattern, path):
                    raise UsageError(
                        f"Learner: {path} is trained, but the model keeps {pattern} as it is; set"
                        f" frozen={tuple(patterns)}"
                    )

    @property
    def _is_all(self) -> bool:
        return self.trainable is None and not self.frozen


class VariationalNoise(Configurable):
    """Normal noise on the weights at which the loss is computed; stored weights never change.

    Each step draws new noise, the same for all rows of its batch. Evaluation and decoding have no
    noise (A. Graves, "Practical Variational Inference for Neural Networks", 2011).

    Attributes:
      scale: Standard deviation.
      weights: Regular expressions, each of which has to match the whole path of at least one
        weight.
      start_step: Number of completed steps from which on there is noise.

    Raises:
      UsageError: A number is out of range, or a pattern is not a regular expression.
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
        check_patterns(self.weights, label="task.vn.weights")

    def check(self, params: Any) -> None:
        """Raise `UsageError` if a pattern matches no weight, or there is no pattern."""
        if not self.weights:
            raise UsageError("task.vn.weights=(): expected at least one pattern")
        for pattern in self.weights:
            matching_paths(pattern, flatten_dict(params, sep="/"), field="task.vn.weights")

    def add(self, params: Any, key: jax.Array, *, step: jax.Array) -> Any:
        """Return `params` with noise on the weights that match.

        Args:
          params: All weights, nested dicts `[...]`.
          key: Random key of the step, the same on every shard of the batch.
          step: Number of completed steps, int32 scalar.
        """
        key = jax.random.fold_in(key, _NOISE_STREAM)
        scale = jnp.where(step >= self.start_step, jnp.float32(self.scale), 0.0)
        flat = flatten_dict(params)
        for path, leaf in flat.items():
            name = "/".join(path)
            if any(re.fullmatch(pattern, name) for pattern in self.weights):
                own = jax.random.fold_in(key, zlib.crc32(name.encode()))
                noise = scale * jax.random.normal(own, leaf.shape, jnp.float32)
                flat[path] = leaf + noise.astype(leaf.dtype)
        return unflatten_dict(flat)
