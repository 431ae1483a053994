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
    """Split the largest dimension that allows it over the mesh axes that the array does not use.

    Args:
      spec: Layout by the rules.
      shape: Shape of the whole array.
      mesh: Devices and their named axes.
      axes: Mesh axes to split over.

    Returns:
      The new layout; `spec` if no dimension is divisible, as for norms of few values.
    """
    split = mesh_axes(spec, shape)
    used = {name for names in split for name in names}
    added = tuple(axis for axis in axes if axis not in used and mesh.shape[axis] > 1)
    if added and split_largest(split, added, shape=shape, mesh=mesh):
        return PartitionSpec(*(names or None for names in split))
    return spec
