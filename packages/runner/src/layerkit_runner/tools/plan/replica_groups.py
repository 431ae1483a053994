"""Which mesh axes a collective runs over, from the groups of devices that HLO names.

HLO does not know our axes: it lists groups of device numbers, where number i is the i-th device of
the mesh in row-major order. Groups along `fsdp` are those whose members differ in the fsdp
coordinate, in all of its values, and in nothing else.

The groups are written in one of three ways, or as the pairs of a permutation:

    {{0,2},{1,3}}                                     a list; {} is one group of all devices
    [2,2]<=[2,2]T(1,0)                                a reshaped and transposed range
    mesh['a'=2,'b'=2], device_ids=([4]) {'a'}         a mesh of the compiler's own, and its axes
    {{0,1},{1,0}}                                     source_target_pairs
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

MIXED = "mixed"
"""The label of groups that are not whole mesh axes."""

_NUMBERS = re.compile(r"\d+")
_LIST = re.compile(r"\{([\d,\s]*)\}")
_RANGE = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"mesh\[(?P<sizes>[^\]]*)\](?:, device_ids=\((?P<ids>.*?)\))? \{(?P<axes>[^}]*)\}$"
)
_MESH_SIZE = re.compile(r"'?([^'=,]+)'?=(\d+)")
# An axis, or a part of one: `'a':(2)4` is a's second factor when a is seen as [2, 4, rest].
_MESH_AXIS = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?")

Groups = Sequence[Sequence[int]] | np.ndarray


def parse_groups(text: str, *, num_devices: int) -> list[list[int]]:
    """The groups that `replica_groups=` names.

    Args:
      text: What stands after the `=`, in any of the three forms.
      num_devices: Of the mesh.

    Returns:
      Device numbers, a list per group.

    Raises:
      ValueError: a form that is not known.

    >>> parse_groups("[2,2]<=[2,2]T(1,0)", num_devices=4)
    [[0, 2], [1, 3]]
    """
    if text.startswith("mesh["):
        return _parse_mesh(text).tolist()
    if text.startswith("["):
        sizes = _RANGE.fullmatch(text)
        if sizes is None:
            raise ValueError(f"replica_groups={text} is of no known form")
        return _parse_range(text).reshape(_ints(sizes[1])).tolist()
    if not text.startswith("{"):
        raise ValueError(f"replica_groups={text} is of no known form")
    groups = [_ints(match[1]) for match in _LIST.finditer(text)]
    groups = [group for group in groups if group]
    return groups or [list(range(num_devices))]


def axes_of_groups(groups: Groups, mesh_shape: Mapping[str, int]) -> str:
    """The mesh axes that the groups span: `fsdp`, `data+fsdp`, or `mixed`.

    >>> axes_of_groups([[0, 2], [1, 3]], {"data": 2, "fsdp": 2})
    'data'
    """
    if len({len(group) for group in groups}) != 1:
        return MIXED
    coordinates = _coordinates(groups, mesh_shape)  # [groups, members, axes]
    varying = (coordinates != coordinates[:, :1]).any(axis=(0, 1))
    axes = [axis for axis, varies in zip(mesh_shape, varying, strict=True) if varies]
    # Members that differ in these axes only, and are as many as there are combinations, are all of
    # them; device numbers in a group are distinct.
    if len(groups[0]) != math.prod(mesh_shape[axis] for axis in axes):
        return MIXED
    return "+".join(axes)


def axes_of_pairs(pairs: Groups, mesh_shape: Mapping[str, int]) -> str:
    """The mesh axes along which the pairs (source, target) of a permutation move data."""
    coordinates = _coordinates(pairs, mesh_shape)  # [pairs, 2, axes]
    moved = (coordinates[:, 0] != coordinates[:, 1]).any(axis=0)
    return "+".join(axis for axis, moves in zip(mesh_shape, moved, strict=True) if moves)


def _coordinates(groups: Groups, mesh_shape: Mapping[str, int]) -> np.ndarray:
    return np.stack(np.unravel_index(np.asarray(groups), tuple(mesh_shape.values())), axis=-1)


def _parse_range(text: str) -> np.ndarray:
    """`[4,2]<=[2,4]T(1,0)`, or without the first part `[2,4]T(1,0)`: device numbers in order."""
    match = _RANGE.fullmatch(text)
    if match is None:  # written out
        return np.array(_ints(text))
    shape = _ints(match[2] or match[1])
    numbers = np.arange(math.prod(shape)).reshape(shape)
    return numbers.transpose(_ints(match[3])).ravel() if match[3] else numbers.ravel()


def _parse_mesh(text: str) -> np.ndarray:
    match = _MESH.fullmatch(text)
    if match is None:
        raise ValueError(f"replica_groups={text} is of no known form")
    sizes = {name: int(size) for name, size in _MESH_SIZE.findall(match["sizes"])}
    grouped = [
        (name, int(pre or 1), int(part or sizes[name]))
        for name, pre, part in _MESH_AXIS.findall(match["axes"])
    ]
    # Each axis is cut where one of its parts begins or ends, so that a part is a dimension.
    shape: list[int] = []
    dimension: dict[tuple[str, int], int] = {}
    for name, size in sizes.items():
        parts = [(pre, pre * part) for axis, pre, part in grouped if axis == name]
        cuts = sorted({1, size, *itertools.chain(*parts)})
        for start, stop in itertools.pairwise(cuts):
            dimension[name, start] = len(shape)
            shape.append(stop // start)
    count = math.prod(shape)
    ids = np.arange(count) if match["ids"] is None else _parse_range(match["ids"])
    chosen = [dimension[name, pre] for name, pre, part in grouped if part > 1]
    grid = np.moveaxis(ids.reshape(shape), chosen, range(-len(chosen), 0))
    return grid.reshape(-1, math.prod(part for _, _, part in grouped))


def _ints(text: str) -> list[int]:
    return [int(number) for number in _NUMBERS.findall(text)]
