"""Which device holds which rectangle of a sharded array: as data, and drawn."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from layerkit_runner.optim.weight_selection import mesh_axes
from layerkit_runner.tools.pages.page import render_drawing

if TYPE_CHECKING:
    from jax.sharding import Sharding


class Shard(NamedTuple):
    """A rectangle of an array: (start, stop) of each dimension, and the devices that hold it."""

    bounds: list[tuple[int, int]]
    devices: list[int]


def shards(
    shape: Sequence[int],
    sharding: Sequence[Sequence[str]],
    mesh: Mapping[str, int],
    devices: Sequence[int],
) -> list[Shard]:
    """Return the rectangles of an array in row-major order.

    Args:
      shape: Shape of the array. Where mesh axes do not divide it, the last rectangles are smaller,
        or missing.
      sharding: Mesh axes that split each dimension, the outermost first.
      mesh: Size of each mesh axis.
      devices: Numbers of the devices, in row-major order of the mesh.
    """
    order = dict.fromkeys([*itertools.chain(*sharding), *mesh])  # split axes, then the others
    numbers = np.reshape(devices, [*mesh.values()]).transpose([[*mesh].index(a) for a in order])
    counts = [math.prod(mesh[axis] for axis in axes) for axes in sharding]
    holders = numbers.reshape(math.prod(counts), -1).tolist()
    ends = [
        np.minimum(-(-size // count) * np.arange(count + 1), size).tolist()
        for size, count in zip(shape, counts, strict=True)
    ]
    bounds = itertools.product(*map(itertools.pairwise, ends))
    parts = [Shard([*pairs], sorted(held)) for pairs, held in zip(bounds, holders, strict=True)]
    return [part for part in parts if all(a < b or a == 0 for a, b in part.bounds)]


def drawing(parts: Sequence[Shard], names: Sequence[str], *, title: str) -> dict[str, Any]:
    """Return what the macro `rectangles` of `pages/drawings.html.jinja` draws.

    The last of several split dimensions runs from left to right, the others from top to bottom.
    """
    counts = [len({part.bounds[d] for part in parts}) for d in range(len(names))]
    split = [d for d, count in enumerate(counts) if count > 1]
    across = split[-1:] if split[1:] or split[-1:] == [len(names) - 1] else []
    columns = counts[across[0]] if across else 1
    return {
        "title": title,
        "names": names,
        "down": [names[d] for d in split if d not in across],
        "across": [names[d] for d in across],
        "columns": columns,
        "rows": len(parts) // columns,
        "parts": parts,
    }


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A drawing that notebooks show; `html` is its text and needs no style sheet."""

    html: str = dataclasses.field(repr=False)

    def _repr_html_(self) -> str:
        return self.html


def draw_sharding(
    shape: Sequence[int],
    sharding: Sharding,
    *,
    axes: Sequence[str | None] | None = None,
    title: str = "array",
) -> Drawing:
    """Draw which devices hold which rectangle of an array, for notebooks.

    Args:
      shape: Shape of the array.
      sharding: Sharding of the array, such as `array.sharding`.
      axes: Names of the dimensions, such as the logical axes of a weight; None for their indices.
      title: Name of the array.

    Raises:
      ValueError: The sharding cannot split the shape, or `axes` are of another number.
    """
    spec: Any = getattr(sharding, "spec", ())
    split = mesh_axes(spec, len(shape))
    names = dimension_names(shape, split, axes or [f"axis {d}" for d in range(len(shape))])
    placed: Mapping[Any, Any] = sharding.devices_indices_map(tuple(shape))
    holders = collections.defaultdict(list)
    for device, slices in placed.items():
        ranges = [part.indices(size)[:2] for part, size in zip(slices, shape, strict=True)]
        holders[tuple(ranges)].append(device.id)
    parts = [Shard([*bounds], sorted(devices)) for bounds, devices in sorted(holders.items())]
    return Drawing(render_drawing("rectangles", drawing(parts, names, title=title)))


def dimension_names(
    shape: Sequence[int],
    sharding: Sequence[Sequence[str]],
    axes: Sequence[str | None] | None = None,
) -> list[str]:
    """Return texts such as `embed 3072/fsdp`, with the mesh axes that split a dimension."""
    return [
        "/".join([f"{axis} {size}" if axis else str(size), *split])
        for size, split, axis in zip(shape, sharding, axes or [None] * len(shape), strict=True)
    ]


def weight_table(
    groups: Mapping[tuple[str, ...], Sequence[Any]], mesh: Mapping[str, int], devices: Sequence[int]
) -> dict[str, Any]:
    """Return what the macro `weights` of `pages/drawings.html.jinja` draws.

    Args:
      groups: `TensorMemory` of equal weights, by path and texts.
      mesh: Size of each mesh axis.
      devices: Numbers of the devices, in row-major order of the mesh.
    """
    total = sum(row.bytes_per_device for rows in groups.values() for row in rows) or 1
    table = []
    pictures: dict[str, dict[str, Any]] = {}  # of the first weight with each sharding
    for texts, rows in groups.items():
        row, size = rows[0], sum(row.bytes_per_device for row in rows)
        if (key := str(row.sharding)) not in pictures:
            names = dimension_names(row.shape, row.sharding, getattr(row, "axes", None))
            parts = shards(row.shape, row.sharding, mesh, devices)
            pictures[key] = drawing(parts, names, title=f"{len(pictures) + 1}. {texts[0]}")
        table.append((texts, size, f"{100 * size / total:.1f}%", [*pictures].index(key) + 1))
    return {"rows": table, "pictures": list(pictures.values())}
