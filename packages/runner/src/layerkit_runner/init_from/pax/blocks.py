"""Reads blocks of a weight from the weights of Praxis that make it.

A block is read from the smallest part of the stored arrays that holds it, so that a host needs
memory for its own shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from layerkit.interop.praxis import WeightSource

Shape = tuple[int, ...]
Ranges = tuple[slice, ...]


def shape_of(source: WeightSource, stored: Shape, like: Shape) -> Shape:
    """Return the shape that a weight has in this library.

    Args:
      source: Weights of Praxis that make it.
      stored: Shape of each of them, `[...layers, (parts), ...]`.
      like: Shape in the model. Its axes over layers are used if they hold as many layers.

    Raises:
      ValueError: The weights have too few axes.
    """
    leading, own = _split(source, stored)
    if source.layers is None or not source.is_stacked:
        return own
    count = len(range(math.prod(leading) * len(source.names))[source.layers])
    over_layers = like[: len(like) - len(own)]
    return (*(over_layers if math.prod(over_layers) == count else (count,)), *own)


def read_block(
    source: WeightSource,
    read: Callable[[str, Ranges], np.ndarray],
    stored: Shape,
    shape: Shape,
    ranges: Ranges,
) -> np.ndarray:
    """Read a block of a weight.

    Args:
      source: Weights of Praxis that make it.
      read: Function that reads a block of one of them.
      stored: Shape of each of them.
      shape: Shape of the weight, as `shape_of` returns it.
      ranges: Slice of each axis of the weight, with start and stop.
    """
    leading, own = _split(source, stored)
    num_layer_axes = len(shape) - len(own)
    layer_ranges, own_ranges = ranges[:num_layer_axes], ranges[num_layer_axes:]
    part, axes = source.weight.part, source.weight.transpose or tuple(range(len(own)))
    theirs = [slice(0)] * len(own)
    for axis, wanted in zip(axes, own_ranges, strict=True):
        theirs[axis] = wanted
    tail = (*(() if part is None else (slice(part, part + 1),)), *theirs)

    def arrange(block: np.ndarray) -> np.ndarray:
        """Return `[layers, (1), ...]` of Praxis in the order of axes of this library."""
        block = block if part is None else block[:, 0]
        return block.transpose(0, *(1 + axis for axis in axes))

    if source.layers is None:
        return arrange(read(source.names[0], tail)[None])[0]
    held = np.arange(math.prod(leading) * len(source.names))[source.layers]
    wanted_layers = held.reshape(shape[:num_layer_axes])[layer_ranges]
    rows, which = np.divmod(wanted_layers.reshape(-1), len(source.names))
    blocks: list[Any] = [None] * len(rows)
    for number in sorted(set(which)):
        mine = np.flatnonzero(which == number)
        places = np.unravel_index(rows[mine], leading) if leading else ()
        box = tuple(slice(int(one.min()), int(one.max()) + 1) for one in places)
        block = read(source.names[number], (*box, *tail))
        inside = tuple(one - edge.start for one, edge in zip(places, box, strict=True))
        arranged = arrange(block[inside] if leading else block[None])
        for position, one in zip(mine, arranged, strict=True):
            blocks[position] = one
    return np.stack(blocks).reshape(*wanted_layers.shape, *blocks[0].shape)


def _split(source: WeightSource, stored: Shape) -> tuple[Shape, Shape]:
    """Return (axes over layers, axes of one layer in the order of this library)."""
    weight = source.weight
    num_leading = len(stored) - weight.rank if source.layers is not None else 0
    if num_leading < 0 or len(stored) - num_leading != weight.rank:
        raise ValueError(f"{source.names[0]} has shape {list(stored)}, and {weight.rank} axes fit")
    leading, own = stored[:num_leading], stored[num_leading:]
    if weight.part is not None:
        own = own[1:]
    return leading, tuple(own[axis] for axis in weight.transpose or range(len(own)))
