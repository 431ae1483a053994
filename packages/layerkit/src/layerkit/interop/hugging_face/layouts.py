"""Layouts: how the axes of a tensor in a folder lie in one of our weights, and back.

A layout is written once, in the notation of einops, theirs first:

    "(heads head_dim) embed -> embed heads head_dim"

Axes in parentheses are one axis of their tensor, the first of them varying slowest. Only the order
of axes changes, never a number, so that a tensor comes back from a round trip bit for bit.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable

import numpy as np

# What to read of each axis: (start, stop).
Ranges = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Two orders of the same axes.

    Attributes:
      theirs: Their axes, each a group of named ones.
      ours: The named axes in our order.
    """

    theirs: tuple[tuple[str, ...], ...]
    ours: tuple[str, ...]

    @classmethod
    @functools.cache
    def parse(cls, text: str) -> Layout:
        """The layout of a text such as `"out in -> in out"`.

        Raises:
          ValueError: the two sides do not name the same axes.
        """
        left, _, right = text.partition("->")
        groups = re.findall(r"\(([^()]*)\)|(\S+)", left)
        theirs = tuple(tuple((group or name).split()) for group, name in groups)
        ours = tuple(right.split())
        if sorted(ours) != sorted(name for group in theirs for name in group):
            raise ValueError(f"layout {text!r}: both sides must name the same axes")
        return cls(theirs, ours)

    def their_shape(self, our_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of their tensor, for a weight of ours of the shape `our_shape`."""
        sizes = dict(zip(self.ours, our_shape, strict=True))
        return tuple(math.prod(sizes[name] for name in group) for group in self.theirs)

    def to_theirs(self, weight: np.ndarray) -> np.ndarray:
        """Our weight, of axes `ours`, as their tensor, of axes `theirs`."""
        names = [name for group in self.theirs for name in group]
        ordered = weight.transpose([self.ours.index(name) for name in names])
        return ordered.reshape(self.their_shape(weight.shape))

    def read(
        self,
        read_theirs: Callable[[Ranges], np.ndarray],
        our_shape: tuple[int, ...],
        ranges: Ranges,
    ) -> np.ndarray:
        """A block of our weight, by reading the smallest block of theirs that holds it.

        Args:
          read_theirs: Gives the block of their tensor within ranges, one a dimension.
          our_shape: Of the whole weight.
          ranges: Which block of our weight, one a dimension.

        Returns:
          The block, with the axes `ours`.
        """
        sizes = dict(zip(self.ours, our_shape, strict=True))
        wanted = dict(zip(self.ours, ranges, strict=True))
        theirs: list[tuple[int, int]] = []
        block_shape: list[int] = []
        names: list[str] = []
        for group in self.theirs:
            first, *inner = group
            inner_size = math.prod(sizes[name] for name in inner)
            start, stop = wanted.pop(first)
            theirs.append((start * inner_size, stop * inner_size))
            block_shape += [stop - start, *(sizes[name] for name in inner)]
            names += group
        block = read_theirs(tuple(theirs)).reshape(block_shape)
        block = block.transpose([names.index(name) for name in self.ours])
        # The slowest axis of each group is cut already; the others were read whole.
        return block[tuple(slice(*wanted.get(name, (None, None))) for name in self.ours)]
