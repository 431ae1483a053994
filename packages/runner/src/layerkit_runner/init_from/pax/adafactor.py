"""The state of ShardedAdafactor in a step of Paxml.

Praxis drops the dimension over which a factor or a scale is reduced, `sharded_adafactor` keeps it
with size 1. Both have the same numbers if the optimizer of the run takes the dimensions of each
weight in the order of Praxis (`layerkit.interop.praxis.axis_order`).
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable

import numpy as np

from layerkit.interop.praxis import Ranges, Shape, WeightSource
from layerkit_runner.checkpointing.structure import LeafSpec

# Dimension of a weight in Praxis over which each array of the state is reduced.
REDUCED_AXES = {"m": None, "m_scale": 0, "vr": -1, "vc": -2, "v": None}


@dataclasses.dataclass(frozen=True)
class Slot:
    """An array of the state that belongs to one weight of this library.

    `stored` is the shape of each array in Praxis, with size 1 in the dropped dimension.
    """

    source: WeightSource
    stored: Shape
    dropped: int | None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays in Praxis."""
        return self.source.names

    def shape_of(self, like: Shape) -> Shape:
        """Return the shape in the state of a run, which has the shape `like`."""
        return self.source.shape_of(self.stored, like)

    def read_block(
        self, read: Callable[[str, Ranges], np.ndarray], shape: Shape, ranges: Ranges
    ) -> np.ndarray:
        """Read a block; see `WeightSource.read_block`."""

        def read_with_all(name: str, block: Ranges) -> np.ndarray:
            if self.dropped is None:
                return read(name, block)
            kept = (*block[: self.dropped], *block[self.dropped + 1 :])
            return np.expand_dims(read(name, kept), self.dropped)

        return self.source.read_block(read_with_all, self.stored, shape, ranges)


def find_slot(
    kind: str, source: WeightSource, weight_shape: Shape, spec: LeafSpec, *, dtype: np.dtype
) -> Slot | None:
    """Return the slot of a weight, or None if the run cannot use the stored array.

    Praxis stores an array of one number for a slot that a weight does not have. The scale of a
    momentum that several weights of this library share does not fit any of them. `weight_shape` is
    that in Praxis, `[...layers, (parts), ...]`; the stored array may be padded.
    """
    axis, rank = REDUCED_AXES[kind], source.weight.rank
    is_shared = source.weight.part is not None and kind in ("m", "m_scale")
    if is_shared or spec.dtype != dtype or (axis is not None and not -rank <= axis < rank):
        return None
    dropped = None if axis is None else len(weight_shape) - rank + axis % rank
    whole, left = list(weight_shape), list(weight_shape)
    if dropped is not None:
        whole[dropped] = 1
        del left[dropped]
    fits = len(left) == len(spec.shape) and all(map(operator.le, left, spec.shape))
    return Slot(source, tuple(whole), dropped) if fits else None
