"""Layouts: conversion between the axes of a stored tensor and those of a layerkit weight.

A layout is written in the notation of einops, with the axes of the stored tensor first:

    "(heads head_dim) embed -> embed heads head_dim"

Axes in parentheses form one axis of the stored tensor; the first varies slowest. `()` is an axis
of size 1. A layout changes
only the order of axes, so that a round trip is exact.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Sequence

import numpy as np

# Layouts of linear layers in PyTorch, and of projections to and from heads.
LINEAR = "out in -> in out"
INTO_HEADS = "(heads head_dim) embed -> embed heads head_dim"
OUT_OF_HEADS = "embed (heads head_dim) -> heads head_dim embed"
BIAS_OF_HEADS = "(heads head_dim) -> heads head_dim"


@dataclasses.dataclass(frozen=True)
class Layout:
    """The order of axes in a stored tensor (theirs) and in a layerkit weight (ours).

    Attributes:
      theirs: Axes of the stored tensor, each a group of names.
      ours: Names of the axes of the weight.
    """

    theirs: tuple[tuple[str, ...], ...]
    ours: tuple[str, ...]

    @classmethod
    @functools.cache
    def parse(cls, text: str) -> Layout:
        """Return the layout of a text such as `"out in -> in out"`.

        Raises:
          ValueError: The two sides do not name the same axes.
        """
        left, _, right = text.partition("->")
        groups = re.findall(r"\(([^()]*)\)|(\S+)", left)
        theirs = tuple(tuple((group or name).split()) for group, name in groups)
        ours = tuple(right.split())
        if sorted(ours) != sorted(name for group in theirs for name in group):
            raise ValueError(f"layout={text!r}. Expected the same axes on both sides.")
        return cls(theirs, ours)

    def their_shape(self, our_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the stored tensor of a weight with shape `our_shape`."""
        sizes = dict(zip(self.ours, our_shape, strict=True))
        return tuple(math.prod(sizes[name] for name in group) for group in self.theirs)

    def to_theirs(self, weight: np.ndarray) -> np.ndarray:
        """Convert a weight with axes `ours` to the stored tensor with axes `theirs`."""
        names = [name for group in self.theirs for name in group]
        ordered = weight.transpose([self.ours.index(name) for name in names])
        return ordered.reshape(self.their_shape(weight.shape))

    def to_ours(self, tensor: np.ndarray, our_shape: tuple[int, ...]) -> np.ndarray:
        """Return a view of a stored tensor with the axes `ours`, of a weight `our_shape`."""
        sizes = dict(zip(self.ours, our_shape, strict=True))
        names = [name for group in self.theirs for name in group]
        split = tensor.reshape([sizes[name] for name in names])
        return split.transpose([names.index(name) for name in self.ours])

    def locate(
        self, ranges: Sequence[tuple[int, ...]], our_shape: tuple[int, ...]
    ) -> tuple[list[tuple[int, ...]], tuple[int, ...], tuple[slice, ...]]:
        """Return the part of the stored tensor that holds a part of a weight.

        An axis of the stored tensor is cut along the first of its names only.

        Args:
          ranges: Range (start, stop) of each axis of the weight.
          our_shape: Shape of the weight.

        Returns:
          (range of each axis of the stored tensor, shape of the weight in these, slices of the part
          in that).
        """
        sizes = dict(zip(self.ours, our_shape, strict=True))
        bounds = dict(zip(self.ours, ranges, strict=True))
        theirs: list[tuple[int, ...]] = []
        held: dict[str, tuple[int, ...]] = {name: (0, size) for name, size in sizes.items()}
        for group in self.theirs:
            if not group:
                theirs.append((0, 1))
                continue
            first, *rest = group
            inner = math.prod(sizes[name] for name in rest)
            theirs.append((bounds[first][0] * inner, bounds[first][1] * inner))
            held[first] = bounds.pop(first)
        shape = tuple(stop - start for start, stop in held.values())
        inside = tuple(slice(*bounds.get(name, (None,))) for name in self.ours)
        return theirs, shape, inside
