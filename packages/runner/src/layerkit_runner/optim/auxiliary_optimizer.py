"""AuxiliaryOptimizer: an optimizer beside the main one, for weights chosen by pattern."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import optax

from layerkit.config import Configurable, instance_field
from layerkit_runner.errors import UsageError
from layerkit_runner.optim.concrete_numbers import concrete_number
from layerkit_runner.optim.optimizer_groups import MAIN
from layerkit_runner.optim.trained_weights import check_patterns


class AuxiliaryOptimizer(Configurable):
    """An optimizer for some of the weights.

    Attributes:
      name: In scalars (`learning/lr_<name>`) and in the optimizer's state.
      weights: Regular expressions, each of which has to match the whole path of one trained weight
        at least. Those of several optimizers must not overlap.
      optimizer: As `Learner.optimizer`.
      learning_rate: As `Learner.learning_rate`.

    Raises:
      UsageError: no name or no weights.
      ValueError: contradictory fields, or a rate that is out of range.
    """

    name: str = ""
    weights: Sequence[str] = ()
    optimizer: Any = instance_field(None)
    learning_rate: Any = None

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or self.name == MAIN:
            raise UsageError(
                f"AuxiliaryOptimizer.name={self.name!r}: expected a word other than {MAIN!r}, such"
                " as 'embedding'"
            )
        field = f"auxiliary optimizer {self.name}: weights"
        check_patterns(self.weights, field=field)
        if not self.weights:
            raise UsageError(f"{field}={self.weights!r}: expected at least one pattern")
        self.transformation = make_transformation(
            self.optimizer, self.learning_rate, owner=f"AuxiliaryOptimizer {self.name}: "
        )


def make_transformation(
    optimizer: Any, learning_rate: Any, *, owner: str
) -> optax.GradientTransformation:
    """The Optax transformation of an `optimizer` field and a `learning_rate`.

    Args:
      optimizer: A transformation, or a function of `learning_rate` that makes one.
      learning_rate: A number or schedule, or None for a transformation that has its own.
      owner: Whose fields they are, for messages.

    Raises:
      ValueError: one of them is missing, both say the rate, or it is none.
    """
    if optimizer is None:
        raise ValueError(f"{owner}optimizer is not set; for example Partial(optax.adamw)")
    if isinstance(optimizer, optax.GradientTransformation):
        if learning_rate is not None:
            raise ValueError(
                f"{owner}learning_rate is set, but the optimizer is already complete;"
                " give it as Partial(optimizer) without a rate, or leave learning_rate out"
            )
        return optimizer
    if learning_rate is None:
        raise ValueError(f"{owner}learning_rate is not set, and the optimizer needs one")
    if not _is_rate(learning_rate):
        raise ValueError(
            f"{owner}learning_rate={learning_rate!r} must be a finite number from 0, or a schedule"
        )
    return optimizer(learning_rate=learning_rate)


def _is_rate(value: Any) -> bool:
    number = concrete_number(value)
    if number is None:
        return callable(value) or isinstance(value, jax.core.Tracer)
    return 0 <= number < math.inf  # nor is NaN
