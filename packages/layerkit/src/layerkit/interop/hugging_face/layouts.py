"""Layouts: conversion between the axes of a stored tensor and those of a layerkit weight.

A layout is written in the notation of einops, with the axes of the stored tensor first:

    "(heads head_dim) embed -> embed heads head_dim"

Axes in parentheses form one axis of the stored tensor; the first varies slowest. A layout changes
only the order of axes, so that a round trip is exact.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable

import numpy as np

# Layouts of linear layers in PyTorch, and of projections to and from heads.
LINEAR = "out in -> in out"
INTO_HEADS = "(heads head_dim) embed -> embed heads head_dim"
OUT_OF_HEADS = "embed (heads head_dim) -> heads head_dim embed"
BIAS_OF_HEADS = "(heads head_dim) -> heads head_dim"

# Range (start, stop) of each axis.
Ranges = tuple[tuple[int, int], ...]


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

    def read(
        self,
        read_theirs: Callable[[Ranges], np.ndarray],
        our_shape: tuple[int, ...],
        ranges: Ranges,
    ) -> np.ndarray:
        """Read a block of a weight from a block of the stored tensor that contains it.

        Args:
          read_theirs: Function that reads the block of the stored tensor within ranges.
          our_shape: Shape of the whole weight.
          ranges: Range of the block in each dimension of the weight.

        Returns:
          The block, with axes `ours`.
        """
        sizes = dict(zip(self.ours, our_shape, strict=True))
        block_ranges = dict(zip(self.ours, ranges, strict=True))
        theirs: list[tuple[int, int]] = []
        block_shape: list[int] = []
        names: list[str] = []
        for group in self.theirs:
            first, *inner = group
            inner_size = math.prod(sizes[name] for name in inner)
            start, stop = block_ranges.pop(first)
            theirs.append((start * inner_size, stop * inner_size))
            block_shape += [stop - start, *(sizes[name] for name in inner)]
            names += group
        block = read_theirs(tuple(theirs)).reshape(block_shape)
        block = block.transpose([names.index(name) for name in self.ours])
        # The slowest axis of each group is sliced already; the other axes were read whole.
        return block[tuple(slice(*block_ranges.get(name, (None, None))) for name in self.ours)]
