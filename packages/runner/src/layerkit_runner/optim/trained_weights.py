"""Which weights are trained: chosen by regular expressions over their paths.

What is not trained is frozen: it gets no gradient, no state of the optimizer, no weight decay, and
keeps its bits. So the trained part of a tree of weights is a tree of its own, with the same paths;
it is taken out before a step differentiates, and its new values are put back.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

from flax.traverse_util import flatten_dict, unflatten_dict

from layerkit.near_names import near_names
from layerkit_runner.errors import UsageError, first_names


@dataclasses.dataclass(frozen=True)
class TrainedWeights:
    """A selection of the weights to train, by default all of them.

    A pattern must match the whole path of a weight, such as `lm/embedding/.*`. The stacked weights
    of repeated layers are one weight.

    Attributes:
      trainable: Patterns of the trained weights; None trains all but `frozen`.
      frozen: Patterns of the weights that are not trained.

    Raises:
      UsageError: both are given, or a pattern is not a regular expression.
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
            check_patterns(getattr(self, field) or (), field=f"Learner.{field}")

    def select(self, params: Any) -> Any:
        """Return the trained part of a tree of weights, nested dicts of arrays.

        Raises:
          UsageError: a pattern matches no weight, or no weight is left to train.
        """
        if self._is_all:
            return params
        flat = flatten_dict(params)
        frozen = self._frozen_paths("/".join(path) for path in flat)
        trained = {path: leaf for path, leaf in flat.items() if "/".join(path) not in frozen}
        if not trained:
            raise UsageError(f"Learner.{self._field}: no weight is left to train")
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
        for path in map("/".join, flatten_dict(self.select(params))):
            for pattern in patterns:
                if re.fullmatch(pattern, path):
                    raise UsageError(
                        f"Learner: {path} is trained, but the model keeps {pattern} as it is; set"
                        f" frozen={tuple(patterns)}"
                    )

    @property
    def _is_all(self) -> bool:
        return self.trainable is None and not self.frozen

    @property
    def _field(self) -> str:
        return "frozen" if self.trainable is None else "trainable"

    def _frozen_paths(self, paths: Iterable[str]) -> set[str]:
        paths = list(paths)
        matched: set[str] = set()
        for pattern in self.frozen if self.trainable is None else self.trainable:
            found = [path for path in paths if re.fullmatch(pattern, path)]
            if not found:
                raise UsageError(
                    f"Learner.{self._field}: {pattern!r} matches no weight"
                    f"{near_names(pattern, paths)} A pattern has to match the whole path. Weights:"
                    f" {first_names(paths)}."
                )
            matched.update(found)
        return matched if self.trainable is None else set(paths) - matched


def check_patterns(patterns: Sequence[str], *, field: str) -> None:
    """Check that a field is a sequence of regular expressions.

    Args:
      patterns: Value of the field.
      field: Name of the field, for the message.

    Raises:
      UsageError: The value is a bare string, or a pattern is not a regular expression.
    """
    if isinstance(patterns, str):
        raise UsageError(f"{field}={patterns!r}: expected a tuple of patterns")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UsageError(f"{field}: {pattern!r} is not a regular expression: {error}") from None
