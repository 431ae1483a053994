"""Layout of what only the optimizer reads: its state and the averages of the weights.

Weights that are replicated over `data` have replicated moments by the rules. `split_over` splits
these, and with them the update, over the replicas (ZeRO stage 1; Rajbhandari et al., 2020,
arXiv:1910.02054): the compiler sums the gradient of a part on the device that updates it, and
gathers the new weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import Mesh, PartitionSpec

from layerkit_runner.partitioning.padding import mesh_axes, split_largest


def split_over(
    spec: PartitionSpec, shape: tuple[int, ...], *, mesh: Mesh, axes: Sequence[str]
) -> PartitionSpec:
    """Split the largest dimension that allows it over the axes that an array does not use."""
    split = mesh_axes(spec, shape)
    used = {name for names in split for name in names}
    added = tuple(axis for axis in axes if axis not in used and mesh.shape[axis] > 1)
    if added and split_largest(split, added, shape=shape, mesh=mesh):
        return PartitionSpec(*(names or None for names in split))
    return spec
