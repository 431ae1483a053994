"""Stored values by name, and which of them each first value is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import jax
import numpy as np

from layerkit_runner.checkpointing.structure import LeafPath, LeafSpec
from layerkit_runner.init_from.rules import Origin
from layerkit_runner.init_from.settings import Source

PARAMS = "params"
OPT_STATE = "opt_state"
EMA = "ema"
# The fields of a state that a model reads; their values are named by layer path alone.
MODEL_FIELDS = (PARAMS, "non_trainable", "overwrite_with_gradient")


class StoredValues(Protocol):
    """A source that has been opened: `StoredCheckpoint`, `StoredHuggingFace`."""

    @property
    def label(self) -> str:
        """Where it is, for messages and records."""

    @property
    def step(self) -> int | None:
        """Of a checkpoint."""

    @property
    def leaves(self) -> Mapping[LeafPath, LeafSpec]:
        """Shape and dtype of every value by its path, such as `("params", "lm", "w")`."""

    def read(self, wanted: Mapping[LeafPath, jax.ShapeDtypeStruct]) -> dict[LeafPath, jax.Array]:
        """Some of the values, each under the sharding that is wanted."""


@dataclasses.dataclass(frozen=True)
class Opened:
    """A source of the settings and what was found in its folder."""

    settings: Source
    stored: StoredValues


@dataclasses.dataclass(frozen=True)
class Found:
    """Where one first value comes from.

    Attributes:
      stored: The source.
      origin: How it is made of values of the source.
      paths: Their paths in the source.
      target: Shape, dtype and sharding of the value here.
    """

    stored: StoredValues
    origin: Origin
    paths: tuple[LeafPath, ...]
    target: jax.ShapeDtypeStruct

    @property
    def stored_dtype(self) -> np.dtype:
        """The dtype in the source."""
        return self.stored.leaves[self.paths[0]].dtype

    def __str__(self) -> str:
        """`DIR:STEP:params/lm/w[3]`."""
        collection = self.paths[0][0]
        return f"{self.stored.label}:{collection}/{self.origin.text}"


@dataclasses.dataclass(frozen=True)
class Matched:
    """The outcome.

    Attributes:
      found: By path in the state, such as `("params", "lm", "w")`.
      drawn: Paths of the weights that are drawn.
      copied: Paths below `params` of weights that start as copies, and those of their originals.
      step: The first step.
      step_from: The label of the source whose step it is; None where the run counts from 0.
    """

    found: Mapping[LeafPath, Found]
    drawn: tuple[LeafPath, ...]
    copied: Mapping[LeafPath, LeafPath] = dataclasses.field(default_factory=dict)
    step: int = 0
    step_from: str | None = None
