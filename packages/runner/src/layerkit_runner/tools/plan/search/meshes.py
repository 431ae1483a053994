"""Meshes that a number of devices can be arranged in."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

# Tensor parallelism over more devices than these has never paid: it adds up activations twice in
# every layer.
_MOST_TENSOR = 16


@dataclasses.dataclass(frozen=True, order=True)
class MeshShape:
    """A mesh, as the fields of an `SpmdPartitioner` say it.

    Attributes:
      ici: A size for each axis within a slice.
      dcn: A size for each axis across slices; None for one slice.
    """

    ici: tuple[int, ...]
    dcn: tuple[int, ...] | None = None

    def sizes(self, axis_names: Sequence[str]) -> dict[str, int]:
        """The size of each axis of the whole mesh."""
        return {name: i * d for name, i, d in zip(axis_names, self.ici, self._dcn, strict=True)}

    def across(self, axis_names: Sequence[str]) -> dict[str, int]:
        """Those axes that slices lie along, and how many slices along each."""
        return {name: d for name, d in zip(axis_names, self._dcn, strict=True) if d > 1}

    @property
    def _dcn(self) -> tuple[int, ...]:
        return self.dcn or (1,) * len(self.ici)


def mesh_shapes(
    axis_names: Sequence[str], *, current: MeshShape, num_slices: int = 1, devices_per_slice: int
) -> Iterator[MeshShape]:
    """All meshes over `data`, `fsdp` and `tensor` with as many devices, in a fixed order.

    Other axes keep the sizes that they have. Slices are spread over `data` and `fsdp` alone, since
    the slow network carries no activations.

    Args:
      axis_names: Of the partitioner.
      current: Its mesh.
      num_slices: That the mesh spans.
      devices_per_slice: Of each.

    >>> [mesh.ici for mesh in mesh_shapes(
    ...     ("data", "fsdp"), current=MeshShape((1, 4)), devices_per_slice=4)]
    [(1, 4), (2, 2), (4, 1)]
    """
    fixed = current.sizes(axis_names)
    free_ici = [name for name in ("data", "fsdp", "tensor") if name in axis_names]
    free_dcn = [name for name in ("data", "fsdp") if name in axis_names]
    fixed_ici = {n: s for n, s in zip(axis_names, current.ici, strict=True) if n not in free_ici}
    rest, remainder = divmod(devices_per_slice, math.prod(fixed_ici.values()))
    if remainder or not free_ici or any(fixed[name] != size for name, size in fixed_ici.items()):
        return  # a stage or an expert axis that spans slices is left as it is
    outer: list[tuple[int, ...]] = [()] if num_slices == 1 else list(_products(num_slices, 2))
    for sizes in _products(rest, len(free_ici)):
        ici = {**fixed_ici, **dict(zip(free_ici, sizes, strict=True))}
        if ici.get("tensor", 1) > _MOST_TENSOR:
            continue
        for across in outer:
            dcn = dict(zip(free_dcn, across, strict=False))
            yield MeshShape(
                tuple(ici[name] for name in axis_names),
                tuple(dcn.get(name, 1) for name in axis_names) if across else None,
            )


def _products(total: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `total` as a product of `count` numbers, the first ones small first."""
    if count == 1:
        yield (total,)
        return
    for first in range(1, total + 1):
        if total % first == 0:
            for others in _products(total // first, count - 1):
                yield (first, *others)


def split_of_networks(
    bytes_sent: Mapping[str, float],
    mesh: MeshShape,
    axis_names: Sequence[str],
    *,
    devices_per_node: int | None,
) -> tuple[float, float]:
    """Bytes over the fast and over the slow network, of what is sent along each axis.

    A collective over i devices within a slice and o slices is taken to be done in two levels, so
    that over the slow network each device sends (o - 1)/o of a 1/i of the whole.

    Args:
      bytes_sent: By each device, by axis.
      mesh: Its axes across slices are slow.
      axis_names: Of the partitioner.
      devices_per_node: Where nodes of GPUs end, for a mesh that does not say it; None for a network
        that joins all devices of a slice.
    """
    fast = slow = 0.0
    stride = 1
    inner: dict[str, int] = {}
    for name, size in reversed(list(mesh.sizes(axis_names).items())):
        if mesh.dcn is not None or devices_per_node is None:
            inner[name] = mesh.ici[list(axis_names).index(name)]
        else:
            inner[name] = math.gcd(size, max(devices_per_node // stride, 1))
        stride *= size
    for name, size in mesh.sizes(axis_names).items():
        sent, outer = bytes_sent.get(name, 0.0), size // inner[name]
        if outer == 1:
            fast += sent
            continue
        whole = sent * size / (size - 1)
        over_slow = whole * (outer - 1) / outer / inner[name]
        slow += over_slow
        fast += sent - over_slow
    return fast, slow
