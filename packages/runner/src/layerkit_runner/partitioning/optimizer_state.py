"""Layout of what only the optimizer reads: its state and the averages of the weights.

Weights that are replicated over `data` have replicated moments by the rules. `split_over` splits
these, and with them the update, over the replicas (ZeRO stage 1; Rajbhandari et al., 2020,
arXiv:1910.02054): the compiler sums the gradient of a part on the device that updates it, and
gathers the new weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh, PartitionSpec


def split_over(
    spec: PartitionSpec, shape: tuple[int, ...], *, mesh: Mesh, axes: Sequence[str]
) -> PartitionSpec:
    """Split the largest dimension that allows it over the mesh axes that the array does not use.

    Args:
      spec: Layout by the rules.
      shape: Shape of the whole array.
      mesh: Devices and their named axes.
      axes: Mesh axes to split over.

    Returns:
      The new layout; `spec` if no dimension is divisible, as for norms of few values.
    """
    entries = [_names(entry) for entry in (*spec, *[None] * (len(shape) - len(spec)))]
    used = {name for names in entries for name in names}
    added = tuple(axis for axis in axes if axis not in used and mesh.shape[axis] > 1)
    for dim in sorted(range(len(shape)), key=lambda dim: -shape[dim]):
        names = (*entries[dim], *added)
        if added and shape[dim] % math.prod(mesh.shape[name] for name in names) == 0:
            entries[dim] = names
            return PartitionSpec(*(names or None for names in entries))
    return spec


def _names(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)
